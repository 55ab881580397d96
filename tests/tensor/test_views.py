"""Views of distributed tensors: the numbers of torch on the whole, no communication, and no refusal without need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redistribute.layouts import coordinates, spec_of
from shardwise import (
    DTensor,
    Owned,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    ViewError,
    current_world,
    distribute_tensor,
    init_device_mesh,
    sim,
)
from shardwise.mesh.world import dry_world, use_world
from shardwise.sharding.spec import Spec, misfits

View = tuple[str, Callable[[torch.Tensor], torch.Tensor]]


def named(text: str) -> View:
    return text, eval(f"lambda x: {text}", {"torch": torch})


def factors(size: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (size,)
        return
    for first in range(1, size + 1):
        if size % first == 0:
            yield from ((first, *rest) for rest in factors(size // first, count - 1))


@st.composite
def a_view(draw: st.DrawFn, shape: tuple[int, ...]) -> View:
    """A view of a tensor of this shape."""
    ndim = len(shape)
    dim = draw(st.integers(0, ndim - 1)) if ndim else 0
    size = shape[dim] if ndim else 1
    kinds = ["view", "unsqueeze"] + ["slice", "permute", "expand", "squeeze"] * bool(ndim)
    kinds += ["select", "split", "unfold"] * bool(ndim and size) + ["diagonal"] * (ndim > 1)
    match draw(st.sampled_from(kinds)):
        case "view" if prod(shape):
            count = draw(st.integers(1, 4))
            return named(f"x.view({list(draw(st.sampled_from(list(factors(prod(shape), count)))))})")
        case "slice":
            start, step = draw(st.integers(0, size)), draw(st.sampled_from([1, 1, 2, 3]))
            return named(f"torch.ops.aten.slice.Tensor(x, {dim}, {start}, {draw(st.integers(start, size))}, {step})")
        case "select":
            return named(f"x.select({dim}, {draw(st.integers(0, size - 1))})")
        case "split":
            length = draw(st.integers(1, size))
            return named(f"x.split({length}, {dim})[{draw(st.integers(0, -(-size // length) - 1))}]")
        case "unfold":
            length = draw(st.integers(1, size))
            return named(f"x.unfold({dim}, {length}, {draw(st.integers(1, 3))})")
        case "permute":
            return named(f"x.permute({draw(st.permutations(range(ndim)))})")
        case "expand":
            return named(f"x.expand({[2, *(3 if size == 1 else -1 for size in shape)]})")
        case "squeeze":
            return named(f"x.squeeze({dim})")
        case "diagonal":
            one, other = draw(st.permutations(range(ndim)))[:2]
            return named(f"x.diagonal({draw(st.integers(-1, 2))}, {one}, {other})")
    return named(f"x.unsqueeze({draw(st.integers(0, ndim))})")


def cuts(dim: int, size: int, parts: int) -> list:
    pieces = [list(reversed(range(size + 1)))[:4]] * (parts - 1)
    ragged = [RaggedShard(dim, (*sizes, size - sum(sizes))) for sizes in product(*pieces) if sum(sizes) <= size]
    return [Shard(dim), *(StridedShard(dim, n) for n in range(2, size + 1) if size % n == 0), *ragged[:12]]


@st.composite
def a_spec(draw: st.DrawFn) -> Spec:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    mesh_shape = draw(st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 3), (1, 2)]))
    with use_world(dry_world(0, prod(mesh_shape))):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[: len(mesh_shape)])
    placements = []
    for parts in mesh_shape:
        dim = draw(st.integers(0, len(shape) - 1))
        placements.append(draw(st.sampled_from([Replicate(), *[Shard(dim)] * 3, *cuts(dim, shape[dim], parts)])))
    return spec_of(mesh, placements, shape)


def part_of(spec: Spec, whole: torch.Tensor, coordinate: tuple[int, ...]) -> torch.Tensor | None:
    """What the rank there holds of the whole; None where it does not count."""
    owned = [own for own in zip(spec.placements, coordinate, strict=True) if isinstance(own[0], Owned)]
    return None if any(own.index != index for own, index in owned) else spec.take(whole, coordinate)


def seen_from(spec: Spec, whole: torch.Tensor, views: list[Callable[[torch.Tensor], torch.Tensor]]) -> list[DTensor]:
    """The view as each rank has it, in worlds where nobody talks to anybody."""
    found = []
    for rank, coordinate in enumerate(coordinates(spec.mesh.shape)):
        with use_world(dry_world(rank, prod(spec.mesh.shape))):
            x = DTensor._wrap(spec.take(whole, coordinate).clone(), spec)
            for view in views:
                x = view(x)
        found.append(x)
    return found


@settings(max_examples=300, deadline=None)
@given(a_spec(), st.data())
def test_chains_of_views_are_those_of_the_whole_or_refused_by_need(spec: Spec, data: st.DataObject) -> None:
    whole = torch.arange(prod(spec.shape)).view(spec.shape)
    spec = Spec(spec.mesh, spec.placements, type(spec.meta).of(whole))
    dense, views, before = whole, [], spec
    for _ in range(data.draw(st.integers(1, 3))):
        text, view = data.draw(a_view(tuple(dense.shape)))
        try:
            after = view(dense)
        except RuntimeError:  # torch has no such view
            return
        try:
            found = seen_from(spec, whole, [*views, view])
        except ViewError:
            pieces = named(text.rpartition("[")[0])[1](dense) if ".split(" in text else [after]
            assert not all(describable(before, dense, piece) for piece in pieces), (before, text)
            return
        views, dense, before = [*views, view], after, found[0]._spec
        for x, coordinate in zip(found, coordinates(spec.mesh.shape), strict=True):
            assert x._spec is before
            assert tuple(x.to_local().shape) == before.local_shape(coordinate)
            expected = part_of(before, dense, coordinate)
            assert expected is None or torch.equal(x.to_local(), expected), (before, text, coordinate)


def describable(spec: Spec, before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether any placements lay the elements of ``after`` where ``spec`` has them: by trying all."""
    if not after.ndim or len(before.unique()) != before.numel():
        return False
    held = [set(spec.take(before, coordinate).flatten().tolist()) for coordinate in coordinates(spec.mesh.shape)]
    choices = [
        [own]
        if isinstance(own, Replicate)
        else [cut for dim, size in enumerate(after.shape) for cut in cuts(dim, size, n)]
        for own, n in zip(spec.placements, spec.mesh.shape, strict=True)
    ]
    wanted = [{at for at, element in enumerate(after.flatten().tolist()) if element in part} for part in held]
    positions = torch.arange(after.numel()).view(after.shape)
    for placements in product(*choices):
        other = spec_of(spec.mesh, placements, tuple(after.shape))
        parts = (set(other.take(positions, place).flatten().tolist()) for place in coordinates(spec.mesh.shape))
        if all(part == want for part, want in zip(parts, wanted, strict=True)):
            return not uneven_steps(spec, before, after)
    return False


def uneven_steps(spec: Spec, before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether some rank would have to skip over memory by steps that differ: then it has no such view of its own."""
    for coordinate in coordinates(spec.mesh.shape):
        local = spec.take(before, coordinate)
        kept = torch.isin(local, after.flatten())
        for dim in range(local.ndim):
            others = [at for at in range(local.ndim) if at != dim]
            places = (kept.any(others) if others else kept).nonzero().flatten()
            if len(set((places[1:] - places[:-1]).tolist())) > 1:
                return True
    return False


def test_another_dtype_of_what_is_pending_is_refused() -> None:
    x = torch.arange(8.0)

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        pending = DTensor.from_local(x / 2, mesh, [Partial()])
        with pytest.raises(ViewError, match="never communicates"):
            pending.view(torch.int32)
        assert torch.equal(torch.view_copy(pending, dtype=torch.int32).full_tensor(), x.view(torch.int32))
        assert pending.view(torch.float32).placements == (Partial(),)

    sim.run(body, 2)


def test_a_rank_without_a_part_views_it_as_the_same_dtype() -> None:
    def body() -> None:
        x = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (3,)), [Shard(0)])
        viewed = x.view(torch.float64)
        assert viewed.to_local().dtype is torch.float64
        assert torch.equal(viewed.full_tensor(), torch.arange(4.0).view(torch.float64))

    sim.run(body, 3)


class _Marked(torch.autograd.Function):
    """The identity; its gradient is marked through a view."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        own = gradient * 2
        own.diagonal().fill_(7)
        own.diagonal()[1:].add_(1)
        return own


def test_what_a_backward_pass_writes_to_a_view_that_had_to_move_is_written_to_the_tensor() -> None:
    dense = torch.randn(5, 5, requires_grad=True)
    (_Marked.apply(dense) * dense.detach()).sum().backward()

    def body():
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(dense.detach(), mesh, [Shard(1), Shard(0)]).requires_grad_()
        (_Marked.apply(x) * x.detach()).sum().backward()
        return x.grad.full_tensor(), current_world().memory["stand-ins"]

    for gradient, remembered in sim.run(body, 4):
        torch.testing.assert_close(gradient, dense.grad)
        assert not remembered


@pytest.mark.parametrize(
    ("text", "shape", "placement"),
    [
        ("torch.view_as_complex(x.movedim(2, 0))", (3, 2, 1), Shard(2)),
        ("torch.view_as_complex(x)", (1, 3, 2), Shard(0)),
    ],
)
def test_a_view_of_a_part_without_elements_does_not_depend_on_its_strides(text, shape, placement) -> None:
    whole = torch.arange(6.0).view(shape)
    _, run = named(text)

    def body():
        x = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [placement]).requires_grad_()
        y = run(x)
        if y.is_complex():
            torch.view_as_real(y).sum().backward()
            assert torch.equal(x.grad.full_tensor(), torch.ones(shape))
        return y.detach().full_tensor()

    for found in sim.run(body, 2):
        torch.testing.assert_close(found, run(whole))


def test_another_dtype_of_a_part_without_elements_does_not_depend_on_its_strides() -> None:
    whole = torch.arange(6.0).view(3, 2)

    def body():
        mesh = init_device_mesh("cpu", (2,))
        part = whole if mesh.get_local_rank() == 0 else torch.empty_strided((0, 2), (1, 1))
        x = DTensor.from_local(part, mesh, [RaggedShard(0, (3, 0))])
        return x.view(torch.float64).full_tensor()

    for found in sim.run(body, 2):
        torch.testing.assert_close(found, whole.view(torch.float64))


REFUSED = {
    (6, 8): [
        "x.view(4, 12)",
        "x.unfold(0, 2, 1)",
        "x.unfold(1, 3, 2)",
        "x.diagonal()",
        "x.as_strided((2, 3), (1, 7))",
        "x.as_strided((4, 6), (12, 2), 1)",
        "torch.ops.aten._reshape_alias(x, [16, 3], [3, 1])",
    ],
    (8, 2): ["torch.view_as_complex(x)", "x.view(torch.float64)", "x.view(2, 8)"],
    (7, 5): [
        "x[::3]",
        "x.split([1, 5, 1])",
        "x.tensor_split([1, 6])",
        "x.tensor_split(3)",
        "x.hsplit([2, 3])",
        "x.view(torch.int16)",
    ],
}
MESHES = {
    (4,): [
        [Shard(0)],
        [Shard(1)],
        [StridedShard(0, 2)],
        [RaggedShard(1, (1, 1, 0, 3))],
        [RaggedShard(0, (3, 1, 2, 1))],
    ],
    (2, 2): [
        [Shard(0), Shard(0)],
        [Shard(1), Shard(1)],
        [Shard(1), Shard(0)],
        [StridedShard(0, 2), StridedShard(0, 2)],
        [Partial(), StridedShard(1, 2)],
        [RaggedShard(1, (3, 2)), Shard(1)],
    ],
    (2, 2, 2): [[Shard(0), Shard(0), Shard(0)], [StridedShard(1, 3), Shard(1), Partial()]],
}


@pytest.mark.parametrize("shape", REFUSED)
def test_what_a_refusal_says_to_do_makes_the_view_possible(shape) -> None:
    for text in REFUSED[shape]:
        refused = 0
        for mesh_shape, placements in ((mesh_shape, own) for mesh_shape, layouts in MESHES.items() for own in layouts):
            with use_world(dry_world(0, prod(mesh_shape))):
                spec = spec_of(init_device_mesh("cpu", mesh_shape), placements, shape)
                refusal = _refusal(named(text)[1], spec)
                if refusal is not None:
                    refused += 1
                    assert f"first .redistribute(placements={list(refusal.placements)})" in str(refusal)
                    assert _refusal(named(text)[1], spec.with_placements(refusal.placements)) is None
        assert refused, text


def _refusal(view: Callable[[torch.Tensor], object], spec: Spec) -> ViewError | None:
    try:
        view(DTensor._wrap(torch.zeros(spec.local_shape(spec.mesh.get_coordinate())), spec))
    except ViewError as refusal:
        return refusal
    return None


def test_a_slice_of_a_dim_that_two_axes_cut_is_refused_only_where_no_placements_describe_it() -> None:
    with use_world(dry_world(0, 4)):
        mesh = init_device_mesh("cpu", (2, 2))
    for first, size in product([Shard(0), StridedShard(0, 2)], range(4, 8)):
        spec, whole = spec_of(mesh, [first, Shard(0)], (size,)), torch.arange(size)
        for start, stop in combinations(range(size + 1), 2):
            with use_world(dry_world(0, 4)):
                if _refusal(lambda x, start=start, stop=stop: x[start:stop], spec) is None:
                    continue
            wanted = [spec.take(whole, place) for place in coordinates((2, 2))]
            wanted = [part[(part >= start) & (part < stop)].tolist() for part in wanted]
            for placements in product(any_cuts(stop - start), repeat=2):
                other = spec_of(mesh, placements, (stop - start,))
                parts = [other.take(whole[start:stop], place).tolist() for place in coordinates((2, 2))]
                assert parts != wanted or any(misfits(other)), (spec, start, stop, placements)


def any_cuts(size: int) -> list:
    sizes = [pair for pair in product(range(size + 1), repeat=2) if 0 < sum(pair) <= size]
    return [Shard(0), *(StridedShard(0, n) for n in range(2, size + 1)), *(RaggedShard(0, pair) for pair in sizes)]


def test_blocks_that_one_rank_holds_all_of_are_no_cut() -> None:
    with use_world(dry_world(0, 2)):
        spec = spec_of(init_device_mesh("cpu", (1, 2)), [StridedShard(0, 2), Replicate()], (4,))
        for view in (lambda x: x.unfold(0, 2, 1), lambda x: x[1:3], lambda x: x.view(2, 2).diagonal()):
            assert _refusal(view, spec) is None
