"""The wire: collectives on plain tensors, and the one list of those who watch them.

Each verb starts a collective over a `Group` through torch's native ``_c10d_functional`` operators and returns a result
that has not arrived yet: `wait` for it before it is read. Tensors are plain, autograd is not looked at, dim 0 is the
one that is gathered, scattered and exchanged. A group of one rank sends nothing: the input itself is the result, and
nobody is told. The ``_coalesced`` verbs send several tensors of one dtype at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import PythonCallbackWork, _register_work
from torch._ops import OpOverload

from shardwise.comm.guard import Guard, is_wanted
from shardwise.comm.transmission import Transmission, user_frame, user_line
from shardwise.mesh.world import Group, World, current_world

__all__ = [
    "Observer", "Transmission", "all_gather", "all_gather_coalesced", "all_reduce", "all_reduce_coalesced",
    "all_to_all", "broadcast", "is_traced", "observing", "reduce_scatter", "reduce_scatter_coalesced", "unpacking",
    "user_frame", "user_line", "wait", "watch",
]  # fmt: skip

T = TypeVar("T")

_native = torch.ops._c10d_functional

Observer = Callable[[Transmission], None]
_observers: dict[World | None, tuple[Observer, ...]] = {None: (Guard(),)} if is_wanted() else {}  # None: of all worlds


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call ``observer`` with each `Transmission` of the current world, just before it starts.

    Not with those of a compiled region, which go to the wire without Python.

    >>> import torch
    >>> from shardwise.comm import wire
    >>> from shardwise.mesh.world import dry_world, use_world
    >>> with use_world(dry_world(0, 4)) as world, wire.observing(lambda sent: print(sent.op, sent.bytes)):
    ...     _ = wire.wait(wire.all_reduce(torch.ones(8), "sum", world.group(range(4))))
    all_reduce 48
    """
    stop = watch(observer)
    try:
        yield
    finally:
        stop()


def watch(observer: Observer) -> Callable[[], None]:
    """Call ``observer`` as `observing` does, from now on until the function that is returned is called."""
    world = current_world()
    _observers[world] = (*_observers.get(world, ()), observer)
    return partial(_forget, world, observer)


def _forget(world: World, observer: Observer) -> None:
    left = [*_observers.get(world, ())]
    if observer in left:
        del left[len(left) - 1 - left[::-1].index(observer)]
    if left:
        _observers[world] = tuple(left)
    else:
        _observers.pop(world, None)


def _tell(
    op: str,
    xs: Sequence[Tensor],
    group: Group,
    axis: str,
    reduce_op: str,
    sent: int,
    *,
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    terms: tuple[object, ...] = (),
) -> None:
    watching = (*_observers.get(current_world(), ()), *_observers.get(None, ()))
    if not watching or torch.compiler.is_compiling():
        return
    shapes = tuple(tuple(x.shape) for x in xs)
    shape = (sum(map(prod, shapes)),) if op.endswith("_coalesced") else shapes[0]
    backward = torch._C._current_graph_task_id() != -1
    told = Transmission(
        op, axis, group.ranks, group.name, shape, xs[0].dtype, reduce_op, sent, backward, user_line(), splits,
        terms or (shapes if op.endswith("_coalesced") else ()),
    )  # fmt: skip
    for observer in watching:
        observer(told)


def all_reduce(x: Tensor, reduce_op: str, group: Group, *, axis: str = "") -> Tensor:
    """Combine the ``x`` of all ranks element by element; every rank gets the whole result, of the shape of ``x``."""
    if group.size == 1:
        return x
    if _observers:
        _tell("all_reduce", [x], group, axis, reduce_op, 2 * (group.size - 1) * x.nbytes // group.size)
    reduced: Tensor = _call(_native.all_reduce.default, _plain(x), reduce_op, group.name)
    return reduced


def all_reduce_coalesced(xs: Sequence[Tensor], reduce_op: str, group: Group, *, axis: str = "") -> list[Tensor]:
    """`all_reduce` of several tensors of one dtype."""
    if group.size == 1:
        return list(xs)
    if _observers:
        sent = 2 * (group.size - 1) * sum(x.nbytes for x in xs) // group.size
        _tell("all_reduce_coalesced", xs, group, axis, reduce_op, sent)
    return _call(_native.all_reduce_coalesced.default, [_plain(x) for x in xs], reduce_op, group.name)


def all_gather(x: Tensor, group: Group, *, axis: str = "") -> Tensor:
    """Join the equally large ``x`` of all ranks along dim 0; a scalar gives a vector."""
    x = x if x.ndim else x.view(1)
    if group.size == 1:
        return x
    if _observers:
        _tell("all_gather", [x], group, axis, "", (group.size - 1) * x.nbytes)
    sent = _carried(_plain(x))
    return _restored(_call(_native.all_gather_into_tensor.default, sent, group.size, group.name), x.dtype)


def all_gather_coalesced(xs: Sequence[Tensor], group: Group, *, axis: str = "") -> list[Tensor]:
    """`all_gather` of several tensors of one dtype."""
    xs = [x if x.ndim else x.view(1) for x in xs]
    if group.size == 1:
        return xs
    if _observers:
        _tell("all_gather_coalesced", xs, group, axis, "", (group.size - 1) * sum(x.nbytes for x in xs))
    sent = [_carried(_plain(x)) for x in xs]
    gathered = _call(_native.all_gather_into_tensor_coalesced.default, sent, group.size, group.name)
    return [_restored(one, xs[0].dtype) for one in gathered]


def reduce_scatter(x: Tensor, reduce_op: str, group: Group, *, axis: str = "") -> Tensor:
    """Combine the ``x`` of all ranks and give each its part of dim 0, which the group's size must divide."""
    if group.size == 1:
        return x
    if _observers:
        _tell("reduce_scatter", [x], group, axis, reduce_op, (group.size - 1) * x.nbytes // group.size)
    part: Tensor = _call(_native.reduce_scatter_tensor.default, _plain(x), reduce_op, group.size, group.name)
    return part


def reduce_scatter_coalesced(xs: Sequence[Tensor], reduce_op: str, group: Group, *, axis: str = "") -> list[Tensor]:
    """`reduce_scatter` of several tensors of one dtype."""
    if group.size == 1:
        return list(xs)
    if _observers:
        sent = (group.size - 1) * sum(x.nbytes for x in xs) // group.size
        _tell("reduce_scatter_coalesced", xs, group, axis, reduce_op, sent)
    native = _native.reduce_scatter_tensor_coalesced.default
    return _call(native, [_plain(x) for x in xs], reduce_op, group.size, group.name)


def all_to_all(
    x: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: Group, *, axis: str = ""
) -> Tensor:
    """Send ``input_splits[i]`` rows of dim 0 to rank ``i`` of the group, and receive ``output_splits[i]`` from it."""
    if group.size == 1:
        return x
    if _observers:
        rows = sum(input_splits) - input_splits[group.index]
        splits = tuple(input_splits), tuple(output_splits)
        _tell("all_to_all", [x], group, axis, "", rows * prod(x.shape[1:]) * x.element_size(), splits=splits)
    sent = _carried(_plain(x))
    return _restored(_call(_native.all_to_all_single.default, sent, output_splits, input_splits, group.name), x.dtype)


def broadcast(x: Tensor, source: int, group: Group, *, axis: str = "") -> Tensor:
    """Give every rank the ``x`` of the rank with index ``source`` in the group; all pass the same shape and dtype."""
    if group.size == 1:
        return x
    if _observers:
        _tell("broadcast", [x], group, axis, "", x.nbytes, terms=(source,))
    return _restored(_call(_native.broadcast.default, _carried(_plain(x)), source, group.name), x.dtype)


def wait(x: Tensor) -> Tensor:
    """Wait until ``x``, the result of a verb, has arrived, and return it; nothing happens if it already has."""
    arrived: Tensor = _call(_native.wait_tensor.default, x)
    return arrived


def _call(native: OpOverload[..., T], *args: object) -> T:
    if torch.compiler.is_compiling():
        return native(*args)
    with torch._C._AutoDispatchBelowAutograd():  # these operators' own gradient is slow to pass by, and not ours
        return native(*args)


def unpacking(result: Tensor, sent: Tensor, unpack: Callable[[], object]) -> None:
    """Let waiting for ``result`` mean: wait for ``sent``, then ``unpack`` it into ``result``."""

    def arrive(timeout: object) -> bool:
        wait(sent)
        unpack()
        return True

    _register_work(result, PythonCallbackWork(arrive))


_MODES = torch._C._TorchDispatchModeKey


def is_traced() -> bool:
    """Whether a graph is being traced in this thread: then nothing may be left to wait for."""
    if torch.compiler.is_compiling():
        return True
    get = torch._C._get_dispatch_mode
    return any(get(mode) is not None for mode in (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL))


def _plain(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().contiguous()


# What every backend moves; anything else travels as bytes, with a dim for the bytes of an element.
_CARRIED = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.uint8}
    | {torch.bool}
)


def _carried(x: Tensor) -> Tensor:
    return x if x.dtype in _CARRIED else x.unsqueeze(-1).view(torch.uint8)


def _restored(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if dtype in _CARRIED else x.view(dtype).squeeze(-1)
