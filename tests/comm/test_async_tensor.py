"""An asynchronous result waits at the first real use, whatever that is, and not before."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from shardwise import sim
from shardwise.collectives import AsyncCollectiveTensor, all_gather_tensor, all_reduce, wait_tensor
from shardwise.comm import wire
from shardwise.mesh.world import current_world, dry_world, use_world

VALUES = [[0.0, 1.0], [2.0, 3.0]]


@pytest.fixture
def fresh() -> Iterator[Callable[[], AsyncCollectiveTensor]]:
    def make() -> AsyncCollectiveTensor:
        result = all_reduce(torch.tensor(VALUES), "sum", None)
        assert isinstance(result, AsyncCollectiveTensor)
        assert not result.completed
        return result

    with use_world(dry_world(0, 2)):
        yield make


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    waited: list[Tensor] = []
    wait = wire.wait
    monkeypatch.setattr(wire, "wait", lambda x: waited.append(x) or wait(x))
    return waited


def saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    return torch.load(file)["x"]


def state(x: Tensor) -> Tensor:
    module = torch.nn.Module()
    module.register_buffer("x", x)
    return module.state_dict()["x"]


def loaded(x: Tensor) -> Tensor:
    module = torch.nn.Linear(2, 2, bias=False)
    module.load_state_dict({"weight": x})
    return module.weight.detach()


def stepped(gradient: Tensor) -> Tensor:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    weight.grad = gradient
    torch.optim.SGD([weight], lr=1.0).step()
    return weight.detach()


VIEWS: dict[str, Callable[[Tensor], object]] = {
    "view": lambda x: x.view(-1),
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "select": lambda x: x[0],
    "slice": lambda x: x[:, :1],
    "unsqueeze": lambda x: x[None],
    "squeeze": lambda x: x.squeeze(),
    "expand": lambda x: x.expand(3, 2, 2),
    "permute": lambda x: x.permute(1, 0),
    "unbind": lambda x: x.unbind(),
    "split": lambda x: x.split(1),
    "chunk": lambda x: x.chunk(2, dim=1),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "to the same dtype": lambda x: x.to(torch.float32),
    "contiguous": lambda x: x.contiguous(),
    "bits": lambda x: x.view(torch.int32),
    "flatten": lambda x: x.flatten(),
    "iteration": list,
}

READS: dict[str, tuple[Callable[[Tensor], object], object]] = {
    "add": (lambda x: x + 1, [[1, 2], [3, 4]]),
    "second operand": (lambda x: torch.ones(2, 2).mul(x), VALUES),
    "in a list": (lambda x: torch.cat([x, x], 1), [[0, 1, 0, 1], [2, 3, 2, 3]]),
    "out of place, into": (lambda x: torch.add(x, 1, out=torch.empty(2, 2)), [[1, 2], [3, 4]]),
    "copy_ from": (lambda x: torch.empty(2, 2).copy_(x), VALUES),
    "copy_ to": (lambda x: x.copy_(torch.ones(2, 2)), [[1, 1], [1, 1]]),
    "in place": (lambda x: x.add_(1), [[1, 2], [3, 4]]),
    "foreach in place": (lambda x: [torch._foreach_add_([x], 1), x][1], [[1, 2], [3, 4]]),
    "index put": (lambda x: x.__setitem__((0, 0), 5.0) or x, [[5, 1], [2, 3]]),
    "transpose in place": (lambda x: x.t_(), [[0, 2], [1, 3]]),
    "dtype": (lambda x: x.to(torch.float64), VALUES),
    "double": (lambda x: x.double(), VALUES),
    "copying to": (lambda x: x.to("cpu", copy=True), VALUES),
    "reshape that copies": (lambda x: x.t().reshape(-1), [0, 2, 1, 3]),
    "contiguous that copies": (lambda x: x.t().contiguous(), [[0, 2], [1, 3]]),
    "clone": (lambda x: x.clone(), VALUES),
    "deepcopy": (copy.deepcopy, VALUES),
    "deepcopy of a dict": (lambda x: copy.deepcopy({"x": x})["x"], VALUES),
    "pickle": (lambda x: pickle.loads(pickle.dumps(x)), VALUES),
    "torch.save": (saved, VALUES),
    "state dict": (lambda x: state(x).sum(), 6),
    "tolist": (lambda x: x.tolist(), VALUES),
    "item": (lambda x: x[1, 1].item(), 3),
    "float": (lambda x: float(x[1, 1]), 3),
    "bool": (lambda x: bool(x[1, 1]), True),
    "numpy": (lambda x: x.numpy().tolist(), VALUES),
    "asarray": (lambda x: np.asarray(x).tolist(), VALUES),
    "torch.tensor": (lambda x: torch.tensor(x.tolist()), VALUES),
    "dlpack": (torch.from_dlpack, VALUES),
    "numpy dlpack": (lambda x: np.from_dlpack(x).tolist(), VALUES),
    "bytes": (lambda x: x.untyped_storage().nbytes(), 16),
    "storage": (lambda x: x._typed_storage().tolist(), [0, 1, 2, 3]),
    "shared memory": (lambda x: x.share_memory_().wait().is_shared(), True),
    "set_ from": (lambda x: torch.empty(0).set_(x), VALUES),
    "numpy arithmetic": (lambda x: np.stack([x, x]).sum(), 12),
    "index": (lambda x: "abcd"[x[1, 1].long()], "d"),
    "membership": (lambda x: 3.0 in x, True),
    "masked": (lambda x: x[x > 1], [2, 3]),
    "copy": (copy.copy, VALUES),
    "gradient": (lambda x: stepped(x), [[0, -1], [-2, -3]]),
    "loading a state": (lambda x: loaded(x), VALUES),
    "functional gradient": (lambda x: torch.func.grad(lambda y: (y * y).sum())(x), [[0, 2], [4, 6]]),
    "address": (lambda x: x.data_ptr() == x.wait().data_ptr(), True),
    "repr": (repr, f"AsyncCollectiveTensor({torch.tensor(VALUES)!r})"),
    "format": (lambda x: f"{x[1, 1]:.1f}", "3.0"),
    "equal": (lambda x: torch.equal(x, torch.tensor(VALUES)), True),
    "apply_": (lambda x: x.apply_(lambda each: each + 1), [[1, 2], [3, 4]]),
    "map_": (lambda x: x.map_(x, lambda one, other: one + other), [[0, 2], [4, 6]]),
    "vmap": (lambda x: torch.func.vmap(lambda row: row + 1)(x), [[1, 2], [3, 4]]),
    "wait": (lambda x: x.wait(), VALUES),
    "wait_tensor": (wait_tensor, VALUES),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_do_not_wait(name: str, fresh: Callable[[], AsyncCollectiveTensor], waits: list[Tensor]) -> None:
    pending = fresh()
    seen = VIEWS[name](pending)
    for view in seen if isinstance(seen, list | tuple) else [seen]:
        assert isinstance(view, AsyncCollectiveTensor)
        assert not view.completed
    assert not waits


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_reads_wait(name: str, mode: type, fresh: Callable[[], AsyncCollectiveTensor]) -> None:
    read, want = READS[name]
    with mode():
        pending = fresh()
        got = read(pending)
        assert pending.completed
        assert (got.tolist() if isinstance(got, Tensor) else got) == want


def test_one_wait_for_all_views(fresh: Callable[[], AsyncCollectiveTensor], waits: list[Tensor]) -> None:
    pending = fresh()
    row, other = pending.t()[0].detach(), pending.view(4)
    assert len(waits) == 0
    assert (row + 1).tolist() == [1, 3]
    assert len(waits) == 1
    assert all(x.completed for x in (pending, row, other))
    assert (pending * 2 + other.sum()).tolist() == [[6, 8], [10, 12]]
    assert len(waits) == 1


def test_results_are_plain(fresh: Callable[[], AsyncCollectiveTensor]) -> None:
    plain = [fresh() + 1, fresh().wait(), fresh().clone(), copy.deepcopy(fresh()), pickle.loads(pickle.dumps(fresh()))]
    assert all(type(x) is Tensor for x in plain)


def test_in_place_returns_the_tensor_itself(fresh: Callable[[], AsyncCollectiveTensor]) -> None:
    pending = fresh()
    assert pending.add_(1) is pending
    assert pending.unsqueeze_(0) is pending
    assert pending.shape == (1, 2, 2)
    assert pending.tolist() == [[[1, 2], [3, 4]]]


def test_custom_operators_get_plain_tensors(fresh: Callable[[], AsyncCollectiveTensor]) -> None:
    with torch.library._scoped_library("shardwise_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: torch.from_numpy(x.numpy() * 2), "CPU")
        assert torch.ops.shardwise_test.twice(fresh()).tolist() == [[0, 2], [4, 6]]


def test_addresses_taken_past_the_dispatcher_are_refused(fresh: Callable[[], AsyncCollectiveTensor]) -> None:
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(fresh())  # C++ that takes the tensor as it is


@pytest.mark.parametrize("read", [repr, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x.wait()])
def test_leaves_that_need_gradients(read: Callable[[Tensor], object], fresh: Callable[[], Tensor]) -> None:
    leaf = fresh().requires_grad_()
    got = read(leaf)
    assert got.requires_grad if isinstance(got, Tensor) else "tensor" in str(got)


def test_what_nobody_reads_is_waited_for_when_it_dies(waits: list[Tensor]) -> None:
    def program() -> None:
        for _ in range(3):
            all_gather_tensor(torch.ones(2), 0, None)

    before = torch._C._distributed_c10d._get_work_registry_size()
    sim.run(program, 2)
    gc.collect()
    assert len(waits) == 6
    assert torch._C._distributed_c10d._get_work_registry_size() == before


def test_garbage_of_one_rank_collected_on_another() -> None:
    class Cycle:
        def __init__(self, pending: Tensor) -> None:
            self.pending, self.own = pending, self

    def program() -> list[float]:
        if current_world().rank == 0:
            Cycle(all_reduce(torch.ones(2), "sum", None))
            one = all_reduce(torch.ones(2), "sum", None)
        else:
            gc.collect()  # while rank 0 waits for this rank
            _, one = (all_reduce(torch.ones(2), "sum", None) for _ in range(2))
        return one.tolist()

    before = torch._C._distributed_c10d._get_work_registry_size()
    gc.disable()
    try:
        assert sim.run(program, 2) == [[2, 2]] * 2
    finally:
        gc.enable()
    assert torch._C._distributed_c10d._get_work_registry_size() == before


def test_many_collectives_leave_nothing() -> None:
    def some(count: int) -> tuple[int, int]:
        for _ in range(count):
            all_reduce(x, "sum", None)
        for _ in range(count // 50):
            all_gather_tensor(x, 1, None) + 1
        gc.collect()
        return torch._C._distributed_c10d._get_work_registry_size(), len(gc.get_objects())

    with use_world(dry_world(0, 2)):
        x = torch.ones(16, 16)  # a kilobyte
        registered, objects = some(100)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert some(30_000)[0] == registered
        assert some(100)[1] - objects < 100
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 10_000  # kilobytes


ENDS_UNREAD = """
import torch
import torch.distributed as dist
from shardwise.collectives import all_reduce

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
pending = [torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", group.group_name)]
from shardwise.comm.async_tensor import AsyncCollectiveTensor
pending = [AsyncCollectiveTensor(x) for x in pending]
"""


def test_what_nobody_reads_is_waited_for_at_exit() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS_UNREAD], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout + ended.stderr == ""
