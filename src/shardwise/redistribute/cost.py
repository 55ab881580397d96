"""What steps cost: seconds first, then the memory that the largest rank needs."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shardwise.redistribute.steps import AllToAll, MakePartial, Slice, Step
from shardwise.redistribute.topology import Topology
from shardwise.sharding.spec import Spec

LOCAL = 1e-8  # seconds for a step that sends nothing: little, so that it only breaks ties
TICKS = 1e13  # a second, in the unit in which prices are compared: what differs by less is alike


class Price(NamedTuple):
    """Seconds (in whole ticks, so that equal sums are equal) and bytes; ordered as plans are to be preferred."""

    ticks: int
    peak: int


class Cost(NamedTuple):
    """How to price steps: the topology, and by how much the tensor is larger than the specs say."""

    topology: Topology
    scale: int = 1

    @property
    def nothing(self) -> Price:
        """The price of doing nothing."""
        return Price(0, 0)

    def of(self, step: Step, spec: Spec) -> Price:
        """The price of one step from ``spec``."""
        _, peak = _figures(step, spec)
        return Price(round(seconds(step, spec, self.topology, self.scale) * TICKS), peak * self.scale)

    def add(self, first: Price, then: Price) -> Price:
        """The price of both, one after the other."""
        return Price(first.ticks + then.ticks, max(first.peak, then.peak))


def seconds(step: Step, spec: Spec, topology: Topology, scale: int = 1) -> float:
    """What one step from ``spec`` takes, by the model: a latency, and the bytes over the bandwidth."""
    if isinstance(step, Slice | MakePartial):
        return LOCAL
    moved, _ = _figures(step, spec)
    if not moved and isinstance(step, AllToAll):
        return LOCAL
    names = spec.mesh.axis_names
    return topology.seconds(tuple([names[axis] for axis in step.group]), step.ranks(spec), moved * scale)


@lru_cache(maxsize=65536)
def _figures(step: Step, spec: Spec) -> tuple[int, int]:
    """The most bytes that a rank sends or receives, and the peak."""
    return max(step.traffic(spec)), step.peak(spec)
