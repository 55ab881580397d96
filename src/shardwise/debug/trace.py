"""What was sent: the collectives of a block of code, counted by kind and mesh axis."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType

import torch
from rich.console import Console
from rich.table import Table

from shardwise._value import value
from shardwise.comm import wire
from shardwise.comm.wire import Transmission

__all__ = ["CommCounts", "CommDebugMode", "Traffic"]

Packet = torch._ops.OpOverloadPacket

NATIVE = {
    "all_gather": "all_gather_into_tensor",
    "all_gather_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter_tensor",
    "reduce_scatter_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all": "all_to_all_single",
}


@value
class Traffic:
    """What this rank sent along one mesh axis by one kind of collective: how often, and how many bytes."""

    axis: str
    op: str
    count: int
    bytes: int


class CommCounts(dict[object, int]):
    """Numbers by collective; what did not occur has 0.

    Keys are torch's operators, such as ``torch.ops._c10d_functional.all_reduce``; one is also found by its overload, by
    its like in ``torch.ops.c10d_functional``, or by its name.
    """

    def __missing__(self, key: object) -> int:
        return super().get(_packet(key), 0)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(_packet(key))

    def get(self, key: object, default: int = 0) -> int:  # type: ignore[override]
        return super().get(_packet(key), default)


class CommDebugMode:
    """A block of code whose collectives are recorded, those of this rank.

    ``transmissions`` holds each of them in order; the methods sum up. Bytes are those that this rank sends in the ideal
    ring algorithm. Entering anew forgets what was recorded before.

    >>> import torch, shardwise, shardwise.sim
    >>> from shardwise.debug import CommDebugMode
    >>> def body():
    ...     mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     x = shardwise.distribute_tensor(torch.ones(4, 4), mesh, [shardwise.Shard(0)])
    ...     with CommDebugMode() as sent:
    ...         x.full_tensor()
    ...     return sent.traffic()
    >>> shardwise.sim.run(body, 2)[0]
    (Traffic(axis='tp', op='all_gather', count=1, bytes=32),)
    """

    def __init__(self) -> None:
        self.transmissions: list[Transmission] = []
        self._observing: list[AbstractContextManager[None]] = []

    def __enter__(self) -> CommDebugMode:
        self.transmissions.clear()
        watching = wire.observing(self.transmissions.append)
        watching.__enter__()
        self._observing.append(watching)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._observing.pop().__exit__(None, None, None)

    def get_total_counts(self) -> int:
        """The number of collectives."""
        return len(self.transmissions)

    def get_comm_counts(self) -> CommCounts:
        """The number of collectives of each kind."""
        return self._by_kind(lambda sent: 1)

    def get_comm_bytes(self) -> CommCounts:
        """The bytes sent by each kind of collective."""
        return self._by_kind(lambda sent: sent.bytes)

    def traffic(self) -> tuple[Traffic, ...]:
        """Count and bytes for each mesh axis and kind, sorted by both; outside any mesh the axis is ``""``."""
        return tuple(_traffic(self.transmissions))

    def table(self, title: str = "") -> Table:
        """`traffic` as a table for `rich`, with a last row for all of it."""
        return traffic_table(self.traffic(), title)

    def __str__(self) -> str:
        return as_text(self.table())

    def __repr__(self) -> str:
        return f"CommDebugMode({self.get_total_counts()} collectives)"

    def _by_kind(self, number: Callable[[Transmission], int]) -> CommCounts:
        counts = CommCounts()
        for sent in self.transmissions:
            packet = _packet(sent.op)
            counts[packet] = counts[packet] + number(sent)
        return counts


def _packet(key: object) -> Packet | None:
    name = key if isinstance(key, str) else getattr(key, "_qualified_op_name", getattr(key, "__name__", ""))
    short = str(name).rpartition("::")[2].partition(".")[0]
    found: Packet | None = getattr(torch.ops._c10d_functional, NATIVE.get(short, short), None)
    return found


def _traffic(transmissions: list[Transmission]) -> Iterator[Traffic]:
    kinds = sorted({(sent.axis, sent.op) for sent in transmissions})
    for axis, op in kinds:
        sizes = [sent.bytes for sent in transmissions if (sent.axis, sent.op) == (axis, op)]
        yield Traffic(axis, op, len(sizes), sum(sizes))


def traffic_table(traffic: tuple[Traffic, ...], title: str = "") -> Table:
    """A table for `rich` with the columns axis, op, count and bytes, and a last row for all of it."""
    table = Table(title=title or None, show_footer=True)
    table.add_column("axis", footer="all")
    table.add_column("op")
    table.add_column("count", justify="right", footer=f"{sum(row.count for row in traffic):,}")
    table.add_column("bytes", justify="right", footer=f"{sum(row.bytes for row in traffic):,}")
    for row in traffic:
        table.add_row(row.axis or "-", row.op, f"{row.count:,}", f"{row.bytes:,}")
    return table


def as_text(table: Table, width: int = 120) -> str:
    """A table as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
