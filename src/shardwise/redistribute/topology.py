"""What the wire of each mesh axis can do: bandwidth and latency, for plans to be priced by.

A topology is a value that the planner takes as an argument; which one counts for a rank is kept in its world's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from math import inf

from shardwise._value import derived, value
from shardwise.errors import RedistributeError, message
from shardwise.mesh.world import current_world

BANDWIDTH = 50e9  # bytes a second that a rank sends
LATENCY = 1e-5  # seconds that a collective takes however little it sends
PEER = 0.01  # the part of the latency that each rank of the group adds

Figures = float | Mapping[str | int, float]
Named = tuple[tuple[str, float], ...]


@value
class Topology:
    """Bandwidth (bytes a second that a rank sends) and latency (seconds) of mesh axes, by name, and of all others."""

    bandwidth: float = BANDWIDTH
    latency: float = LATENCY
    bandwidths: Named = ()
    latencies: Named = ()

    @derived
    def _bandwidths(self) -> dict[str, float]:
        return dict(self.bandwidths)

    @derived
    def _latencies(self) -> dict[str, float]:
        return dict(self.latencies)

    def bandwidth_over(self, axes: tuple[str, ...]) -> float:
        """The bandwidth of a group over these axes: that of the slowest."""
        named = self._bandwidths
        return min([named.get(axis, self.bandwidth) for axis in axes]) if named else self.bandwidth

    def latency_over(self, axes: tuple[str, ...]) -> float:
        """The latency of a group over these axes: that of the slowest."""
        named = self._latencies
        return max([named.get(axis, self.latency) for axis in axes]) if named else self.latency

    def is_uniform(self, axes: tuple[str, ...]) -> bool:
        """Whether all these axes are alike."""
        links = {(self.bandwidth_over((axis,)), self.latency_over((axis,))) for axis in axes}
        return len(links) < 2

    def seconds(self, axes: tuple[str, ...], ranks: int, nbytes: float) -> float:
        """What a collective of ``ranks`` ranks over these axes takes in which a rank sends or receives ``nbytes``."""
        return self.latency_over(axes) * (1 + PEER * (ranks - 1)) + nbytes / self.bandwidth_over(axes)


DEFAULT = Topology()
PRICED = ("plans", "roads")  # what a rank remembers by these names was chosen by price, under one topology
TOPOLOGIES = 8  # for how many topologies a rank keeps what is not in use


class _Restoring(AbstractContextManager[Topology]):
    """Gives back, at the end of a ``with`` block, the topology that was there before."""

    def __init__(self, now: Topology, before: Topology) -> None:
        self.now, self.before = now, before

    def __enter__(self) -> Topology:
        return self.now

    def __exit__(self, *exception: object) -> None:
        _enter(self.before)


def topology(*, bandwidth: Figures | None = None, latency: Figures | None = None) -> AbstractContextManager[Topology]:
    """Say what the mesh axes can do, so that redistribution and the choice of strategies follow it.

    ``bandwidth`` is in bytes a second, ``latency`` in seconds: a number for all axes, or a mapping from axis names (of
    axes without names, their indices) to numbers. What is not given stays as it is; an axis that was never named has
    50e9 bytes a second and 1e-5 seconds. A collective over several axes is as slow as the slowest of them. It counts at
    once, on this rank; as a context manager, until the end of the block. All ranks must say the same.

    Raises:
        RedistributeError: a bandwidth is not positive, or a latency is negative.

    >>> import shardwise
    >>> with shardwise.topology(bandwidth={"tp": 450e9, "dp": 25e9}, latency=5e-6) as now:
    ...     now.bandwidth_over(("dp", "tp")), now.latency_over(("tp",))
    (25000000000.0, 5e-06)
    """
    before = current_topology()
    now = Topology(
        before.bandwidth if bandwidth is None or isinstance(bandwidth, Mapping) else _checked(bandwidth, "bandwidth"),
        before.latency if latency is None or isinstance(latency, Mapping) else _checked(latency, "latency"),
        _named(bandwidth, before.bandwidths, "bandwidth"),
        _named(latency, before.latencies, "latency"),
    )
    _enter(now)
    return _Restoring(now, before)


def current_topology() -> Topology:
    """The topology that counts for this rank."""
    found: Topology = current_world().memory.get(Topology, DEFAULT)
    return found


def _enter(now: Topology) -> None:
    memory, before = current_world().memory, current_topology()
    if now is before:
        return
    apart = memory.setdefault("priced", {})
    found = apart.pop(now, {})
    if len(apart) >= TOPOLOGIES:
        apart.clear()
    apart[before] = {name: memory.pop(name) for name in PRICED if name in memory}
    memory.update({**found, Topology: now})


def _named(figures: Figures | None, before: Named, what: str) -> Named:
    if figures is None:
        return before
    if not isinstance(figures, Mapping):
        return ()
    given = {str(axis): _checked(figure, what) for axis, figure in figures.items()}
    return tuple(sorted((dict(before) | given).items()))


def _checked(figure: float, what: str) -> float:
    if not (0 < figure < inf or (figure == 0 and what == "latency")):
        law = "a bandwidth is positive" if what == "bandwidth" else "a latency is not negative"
        raise RedistributeError(message(law, asked=f"topology({what}={figure})", do="bytes a second, or seconds"))
    return float(figure)
