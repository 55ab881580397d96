"""The process group of one simulated rank: what torch's native collectives and `torch.distributed` reach.

Each method of `torch.distributed.ProcessGroup` turns its arguments into a `Request`, lets it join the group's meeting,
and returns a `SimulatedWork`. Launching never blocks; waiting passes the turn.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from shardwise.errors import CollectiveError, CollectiveMismatchError, message
from shardwise.sim.exchange import check_reduction
from shardwise.sim.lockstep import Lockstep
from shardwise.sim.meeting import Channel, Meeting, Message
from shardwise.sim.request import Request, Terms, shapes, tensor_text

Tensors = Sequence[torch.Tensor]

_REDUCTIONS = {
    int(getattr(dist.ReduceOp, name.upper()).value): name  # an integer, because torch's enumeration is slow to hash
    for name in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
}


class SimulatedWork(dist.Work):
    """A collective under way; ``wait`` passes the turn until all ranks of the group have come."""

    def __init__(self, meeting: Meeting, group: SimulatedGroup, outputs: Tensors) -> None:
        super().__init__()
        self.meeting = meeting
        self.group = group
        self.outputs = outputs
        self.abandoned = False

    def wait(self, timeout: object = None) -> bool:
        self.group.launched.pop(id(self), None)
        if not self.meeting.done and not self.abandoned:
            self.group.lockstep.wait(self.group.world_rank, self.meeting)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self.meeting.done:
            self.group.lockstep.give_way(self.group.world_rank, self.meeting)
        return self.meeting.done

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return list(self.outputs)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that is done already: one that is waited for in C++ could not pass the turn."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future

    def _source_rank(self) -> int:
        self.wait()
        assert isinstance(self.meeting, Message)
        return self.group.ranks.index(self.meeting.source)


_Base: Any = dist.ProcessGroup  # its stub declares overloads, for callers, that torch never calls on a subclass


class SimulatedGroup(_Base):  # type: ignore[misc]
    """One rank's end of a group; ``channel`` is what the ranks of the group share."""

    def __init__(self, rank: int, channel: Channel, lockstep: Lockstep, name: str) -> None:
        super().__init__(channel.ranks.index(rank), len(channel.ranks))
        self.world_rank = rank
        self.ranks = channel.ranks
        self.channel = channel
        self.lockstep = lockstep
        self.launched: dict[int, weakref.ref[SimulatedWork]] = {}  # and not waited for yet
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def name(self) -> str:
        return "simulated"

    def getBackendName(self) -> str:
        return "simulated"

    def shutdown(self) -> None:
        """Nothing to shut down; the run takes its groups away when it ends."""

    abort = shutdown

    def __repr__(self) -> str:
        return f"SimulatedGroup(rank {self.world_rank} in {list(self.ranks)})"

    def allreduce(self, tensors: Tensors, opts: AllreduceOptions | None = None) -> SimulatedWork:
        reduce_op = _reduction(opts or AllreduceOptions(), tensors[0])
        return self._call("all_reduce", tensors, tensors, terms=shapes(tensors), reduce_op=reduce_op)

    def allreduce_coalesced(self, tensors: Tensors, opts: AllreduceCoalescedOptions | None = None) -> SimulatedWork:
        return self.allreduce(tensors, opts or AllreduceCoalescedOptions())

    def reduce(self, tensors: Tensors, opts: ReduceOptions) -> SimulatedWork:
        reduce_op = _reduction(opts, tensors[0])
        root = self.ranks[opts.rootRank]
        return self._call("reduce", tensors, tensors, terms=shapes(tensors), reduce_op=reduce_op, root=root)

    def broadcast(self, tensors: Tensors, opts: BroadcastOptions) -> SimulatedWork:
        return self._call("broadcast", tensors, tensors, terms=shapes(tensors), root=self.ranks[opts.rootRank])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: AllgatherOptions | None = None
    ) -> SimulatedWork:
        for output, given in zip(outputs, inputs, strict=True):
            _check_sizes("all_gather_into_tensor", output, given, len(self.ranks))
        return self._call("all_gather_into_tensor", inputs, outputs, terms=shapes(inputs))

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: AllgatherOptions | None = None
    ) -> SimulatedWork:
        return self.all_gather_single_coalesced([output], [input])

    def allgather(
        self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: AllgatherOptions | None = None
    ) -> SimulatedWork:
        return self._call("all_gather", input_tensors, output_tensors[0], terms=(input_tensors[0].dtype,))

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: AllgatherOptions | None = None
    ) -> SimulatedWork:
        works = [
            self.allgather([[outputs[index] for outputs in output_lists]], [given])
            for index, given in enumerate(input_list)
        ]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: ReduceScatterOptions | None = None
    ) -> SimulatedWork:
        reduce_op = _reduction(opts or ReduceScatterOptions(), inputs[0])
        for output, given in zip(outputs, inputs, strict=True):
            _check_sizes("reduce_scatter_tensor", given, output, len(self.ranks))
        return self._call("reduce_scatter_tensor", inputs, outputs, terms=shapes(inputs), reduce_op=reduce_op)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: ReduceScatterOptions | None = None
    ) -> SimulatedWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter(
        self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: ReduceScatterOptions | None = None
    ) -> SimulatedWork:
        pieces = input_tensors[0]
        reduce_op = _reduction(opts or ReduceScatterOptions(), pieces[0])
        return self._call("reduce_scatter", pieces, output_tensors, terms=shapes(pieces), reduce_op=reduce_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: AllToAllOptions | None = None,
    ) -> SimulatedWork:
        sent = _splits(input, input_split_sizes, len(self.ranks))
        received = _splits(output, output_split_sizes, len(self.ranks))
        terms = (input.dtype, input.shape[1:])
        return self._call("all_to_all_single", [input], [output], terms=terms, splits=(sent, received))

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: object = None) -> SimulatedWork:
        return self._call("all_to_all", input_tensors, output_tensors, terms=(input_tensors[0].dtype,))

    def gather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: GatherOptions) -> SimulatedWork:
        outputs = output_tensors[0] if output_tensors else []
        return self._call("gather", input_tensors, outputs, root=self.ranks[opts.rootRank])

    def scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: ScatterOptions) -> SimulatedWork:
        inputs = input_tensors[0] if input_tensors else []
        return self._call("scatter", inputs, output_tensors, root=self.ranks[opts.rootRank])

    def barrier(self, opts: BarrierOptions | None = None) -> SimulatedWork:
        return self._call("barrier", [], [])

    def monitored_barrier(self, timeout: object = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    def send(self, tensors: Tensors, dstRank: int, tag: int) -> SimulatedWork:
        request = Request(self.world_rank, "send", tensors, [])
        return self._launch(lambda: self.channel.send(request, self.ranks[dstRank], tag), [])

    def recv(self, tensors: Tensors, srcRank: int, tag: int) -> SimulatedWork:
        request = Request(self.world_rank, "recv", [], tensors)
        return self._launch(lambda: self.channel.receive(request, self.ranks[srcRank], tag), tensors)

    def recv_anysource(self, tensors: Tensors, tag: int) -> SimulatedWork:
        request = Request(self.world_rank, "recv", [], tensors)
        return self._launch(lambda: self.channel.receive(request, Channel.ANYBODY, tag), tensors)

    def finish(self) -> None:
        """Take what this rank launched and never waited for out of torch's register of work under way."""
        for work in filter(None, [reference() for reference in self.launched.values()]):
            work.abandoned = True
            for output in work.outputs:
                torch.ops._c10d_functional.wait_tensor(output)
        self.launched.clear()

    def _call(
        self,
        op: str,
        inputs: Tensors,
        outputs: Tensors,
        *,
        terms: Terms = (),
        reduce_op: str = "",
        root: int | None = None,
        splits: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> SimulatedWork:
        request = Request(
            self.world_rank, op, inputs, outputs, terms=terms, reduce_op=reduce_op, root=root, splits=splits
        )
        return self._launch(lambda: self.channel.call(request), outputs)

    def _launch(self, join: Callable[[], Meeting], outputs: Tensors) -> SimulatedWork:
        self.lockstep.launch(self.world_rank)
        try:
            meeting = join()
        except CollectiveMismatchError as error:
            self.lockstep.end(error)
        work = SimulatedWork(meeting, self, outputs)
        self.launched[id(work)] = weakref.ref(work)
        return work

    # The names that these calls have in older torch.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _allgather_base = all_gather_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _reduction(opts: AllreduceOptions | ReduceOptions | ReduceScatterOptions, tensor: torch.Tensor) -> str:
    operation = opts.reduceOp.op  # type: ignore[attr-defined]
    reduce_op = _REDUCTIONS.get(int(operation)) or str(operation)
    check_reduction(reduce_op, tensor)
    return reduce_op


def _splits(tensor: torch.Tensor, sizes: Sequence[int], size: int) -> list[int]:
    length = tensor.shape[0] if tensor.ndim else 1
    if not sizes and length % size:
        raise CollectiveError(
            message(
                f"{tensor_text(tensor)} does not split evenly over {size} ranks",
                asked="all_to_all_single without split sizes",
                do="pass split sizes",
            )
        )
    if sizes and (len(sizes) != size or sum(sizes) != length):
        raise CollectiveError(
            message(f"splits {[*sizes]} do not fit {tensor_text(tensor)} over {size} ranks", asked="all_to_all_single")
        )
    return list(sizes) or [length // size] * size


def _check_sizes(op: str, large: torch.Tensor, small: torch.Tensor, size: int) -> None:
    if large.numel() != size * small.numel() or large.dtype != small.dtype:
        raise CollectiveError(
            message(f"{tensor_text(large)} is not {size} times {tensor_text(small)}", asked=f"{op} over {size} ranks")
        )
