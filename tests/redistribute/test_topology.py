"""What mesh axes can do: said, restored, and followed by prices."""

from __future__ import annotations

import random

import pytest
import torch

from redistribute.layouts import dry_mesh, placed, spec_of
from shardwise import Partial, distribute_tensor, init_device_mesh, sim
from shardwise.errors import RedistributeError
from shardwise.mesh.world import current_world
from shardwise.redistribute.cost import seconds
from shardwise.redistribute.planner import plan, price, stages
from shardwise.redistribute.steps import Step
from shardwise.redistribute.topology import BANDWIDTH, LATENCY, PEER, Topology, current_topology, topology
from shardwise.sharding.placement import Replicate, Shard
from shardwise.sharding.spec import Spec


def test_it_counts_at_once_and_in_a_block_until_its_end() -> None:
    with topology(bandwidth={"tp": 9e9}) as outer:
        assert current_topology() is outer
        topology(latency=1e-3)
        assert current_topology() is Topology(BANDWIDTH, 1e-3, (("tp", 9e9),))
        with topology(bandwidth=1e9):
            assert current_topology() is Topology(1e9, 1e-3)
        assert current_topology().bandwidth_over(("tp",)) == 9e9
    assert current_topology() is Topology()


def test_a_group_is_as_slow_as_its_slowest_axis() -> None:
    links = Topology(bandwidths=(("dp", 1e9), ("tp", 9e9)), latencies=(("tp", 1e-6),))
    assert links.bandwidth_over(("dp", "tp")) == 1e9
    assert links.latency_over(("dp", "tp")) == LATENCY
    assert links.bandwidth_over(("tp", "other")) == 9e9
    assert links.seconds(("tp",), 5, 9e9) == pytest.approx(1 + 1e-6 * (1 + 4 * PEER))
    assert not links.is_uniform(("dp", "tp"))
    assert links.is_uniform(("tp",))


def test_prices_follow_it() -> None:
    src = spec_of(dry_mesh((2,)), [Shard(0)], (1000, 1000))
    dst = src.with_placements([Replicate()])
    for bandwidth, latency in ((1e9, 1e-3), (1e6, 0.0)):
        with topology(bandwidth=bandwidth, latency={"dp": latency}):
            assert price(src, dst) == pytest.approx(latency * (1 + PEER) + 2_000_000 / bandwidth)
    assert price(src, dst) == price(src, dst, Topology())


def test_axes_without_names_go_by_their_index() -> None:
    with topology(bandwidth={0: 1e9, 1: 2e9}) as links:
        assert links.bandwidth_over(("1",)) == 2e9


@pytest.mark.parametrize("figures", [{"bandwidth": 0}, {"bandwidth": {"tp": -1}}, {"latency": -1e-6}], ids=str)
def test_impossible_figures_are_refused(figures: dict[str, float]) -> None:
    with pytest.raises(RedistributeError, match=r"is (not negative|positive)"):
        topology(**figures)
    assert current_topology() is Topology()


def test_each_world_has_its_own() -> None:
    def body() -> Topology:
        topology(bandwidth={"dp": 1.0})
        return current_topology()

    assert sim.run(body, 2) == [Topology(bandwidths=(("dp", 1.0),))] * 2
    assert current_topology() is Topology()


def test_equal_topologies_share_their_plans() -> None:
    src = spec_of(dry_mesh((2, 2)), [Shard(0), Shard(1)], (8, 8))
    dst = src.with_placements([Shard(1), Shard(0)])
    assert plan(src, dst, Topology(1e9)) is plan(src, dst, Topology(1e9))


def test_what_an_operator_chooses_follows_it_and_comes_back() -> None:
    """Where only bytes count, a half of one factor moves; where the wire is fast, fewer ranks talk."""

    def body() -> list[object]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        a = distribute_tensor(torch.ones(16, 64), mesh, [Shard(0), Shard(0)])
        b = distribute_tensor(torch.ones(64, 16), mesh, [Shard(0), Replicate()])
        chosen = [(a @ b).placements]
        with topology(bandwidth=1.0, latency=0.0):
            chosen += [(a @ b).placements, (a @ b).placements]
            topology(bandwidth=50e9, latency=1.0)
            chosen.append((a @ b).placements)
        return [*chosen, (a @ b).placements]

    gathered, reduced = (Shard(0), Shard(0)), (Partial(), Shard(0))
    assert sim.run(body, 4) == [[gathered, reduced, reduced, gathered, gathered]] * 4


LINKS = [
    Topology(),
    Topology(1.0, 0.0),
    Topology(50e9, 1.0),
    Topology(bandwidths=(("dp", 1e6), ("tp", 1e12))),
    Topology(bandwidths=(("dp", 1e12), ("tp", 1e6)), latencies=(("dp", 1e-3), ("tp", 1e-7))),
]


@pytest.mark.parametrize("shape", [(64, 64), (7, 5), (1024, 1024)], ids=str)
def test_no_plan_of_another_topology_is_ever_cheaper(shape: tuple[int, ...]) -> None:
    """Whatever was asked before under whatever topology, in any order; and they do differ."""
    choose, ways = random.Random(0), placed(2, 2)
    pairs = [[spec_of(dry_mesh((2, 4)), choose.choice(ways), shape) for _ in range(2)] for _ in range(60)]
    taken: dict[tuple[int, Topology], tuple[Step, ...]] = {}
    for number, links in random.Random(1).choices([(n, links) for n in range(len(pairs)) for links in LINKS], k=900):
        with topology(bandwidth=links.bandwidth, latency=links.latency):
            topology(bandwidth=dict(links.bandwidths), latency=dict(links.latencies))
            steps = plan(*pairs[number])
        assert taken.setdefault((number, links), steps) is steps
    differ = {
        number for number in range(len(pairs)) if len({taken.get((number, links), ()) for links in LINKS} - {()}) > 1
    }
    assert differ
    for number, links in taken:
        costs = {
            other: cost(pairs[number][0], taken[number, other], links) for other in LINKS if (number, other) in taken
        }
        assert costs[links] <= min(costs.values()) * (1 + 1e-9), (pairs[number], links, costs)


def cost(src: Spec, steps: tuple[Step, ...], links: Topology) -> float:
    return sum(seconds(step, spec, links) for spec, step in stages(src, steps))


def test_what_was_prepared_under_a_topology_is_kept_for_it() -> None:
    def body() -> list[int]:
        x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        plans = [id(current_world().memory["plans"]) for _ in range(2) if x.sum().ndim == 0]
        with topology(latency=1.0):
            x.sum()
            plans.append(id(current_world().memory["plans"]))
        return [*plans, id(current_world().memory["plans"])]

    first, again, other, back = sim.run(body, 2)[0]
    assert first == again == back != other
