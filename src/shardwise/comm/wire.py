"""The wire: collectives on plain tensors, and the one list of those who watch them.

Each verb starts a collective over a `Group` through torch's native ``_c10d_functional`` operators and returns a result
that has not arrived yet: `wait` for it before it is read. Tensors are plain, autograd is not looked at, dim 0 is the
one that is gathered, scattered and exchanged. A group of one rank sends nothing: the input itself is the result, and
nobody is told.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import prod
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor
from torch._C._distributed_c10d import PythonCallbackWork, _register_work
from torch._ops import OpOverload

from shardwise._value import value
from shardwise.mesh.world import Group, World, current_world

_native = torch.ops._c10d_functional


@value
class Transmission:
    """What one rank hands to the wire in one collective.

    ``shape`` is that of the local input; ``bytes`` is what this rank sends in the ideal ring algorithm (to the whole
    group for an exchange; the message itself for a broadcast); ``axis`` is the mesh axis, or "" if there is none.
    """

    op: str
    axis: str
    ranks: tuple[int, ...]
    group_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    reduce_op: str
    bytes: int
    backward: bool = False


Observer = Callable[[Transmission], None]
_observers: dict[World, tuple[Observer, ...]] = {}


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call ``observer`` with each `Transmission` of the current world, just before it starts.

    >>> import torch
    >>> from shardwise.comm import wire
    >>> from shardwise.mesh.world import dry_world, use_world
    >>> with use_world(dry_world(0, 4)) as world, wire.observing(lambda sent: print(sent.op, sent.bytes)):
    ...     _ = wire.wait(wire.all_reduce(torch.ones(8), "sum", world.group(range(4))))
    all_reduce 48
    """
    world = current_world()
    _observers[world] = (*_observers.get(world, ()), observer)
    try:
        yield
    finally:
        _forget(world, observer)


def _forget(world: World, observer: Observer) -> None:
    left = list(_observers[world])
    left.reverse()
    left.remove(observer)
    left.reverse()
    if left:
        _observers[world] = tuple(left)
    else:
        del _observers[world]


def _tell(op: str, x: Tensor, group: Group, axis: str, reduce_op: str, sent: int) -> None:
    watching = _observers.get(current_world())
    if watching:
        backward = torch._C._current_graph_task_id() != -1
        ranks, name = group.ranks, group.name
        transmission = Transmission(op, axis, ranks, name, tuple(x.shape), x.dtype, reduce_op, sent, backward)
        for observer in watching:
            observer(transmission)


def all_reduce(x: Tensor, reduce_op: str, group: Group, *, axis: str = "") -> Tensor:
    """Combine the ``x`` of all ranks element by element; every rank gets the whole result, of the shape of ``x``."""
    if group.size == 1:
        return x
    if _observers:
        _tell("all_reduce", x, group, axis, reduce_op, 2 * (group.size - 1) * x.nbytes // group.size)
    return _call(_native.all_reduce.default, _plain(x), reduce_op, group.name)


def all_gather(x: Tensor, group: Group, *, axis: str = "") -> Tensor:
    """Join the equally large ``x`` of all ranks along dim 0; a scalar gives a vector."""
    if group.size == 1:
        return x if x.ndim else x.view(1)
    if _observers:
        _tell("all_gather", x, group, axis, "", (group.size - 1) * x.nbytes)
    sent = _carried(_plain(x) if x.ndim else _plain(x).view(1))
    return _restored(_call(_native.all_gather_into_tensor.default, sent, group.size, group.name), x.dtype)


def reduce_scatter(x: Tensor, reduce_op: str, group: Group, *, axis: str = "") -> Tensor:
    """Combine the ``x`` of all ranks and give each its part of dim 0, which the group's size must divide."""
    if group.size == 1:
        return x
    if _observers:
        _tell("reduce_scatter", x, group, axis, reduce_op, (group.size - 1) * x.nbytes // group.size)
    return _call(_native.reduce_scatter_tensor.default, _plain(x), reduce_op, group.size, group.name)


def all_to_all(
    x: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: Group, *, axis: str = ""
) -> Tensor:
    """Send ``input_splits[i]`` rows of dim 0 to rank ``i`` of the group, and receive ``output_splits[i]`` from it."""
    if group.size == 1:
        return x
    if _observers:
        rows = sum(input_splits) - input_splits[group.index]
        _tell("all_to_all", x, group, axis, "", rows * prod(x.shape[1:]) * x.element_size())
    sent = _carried(_plain(x))
    return _restored(_call(_native.all_to_all_single.default, sent, output_splits, input_splits, group.name), x.dtype)


def broadcast(x: Tensor, source: int, group: Group, *, axis: str = "") -> Tensor:
    """Give every rank the ``x`` of the rank with index ``source`` in the group; all pass the same shape and dtype."""
    if group.size == 1:
        return x
    if _observers:
        _tell("broadcast", x, group, axis, "", x.nbytes)
    return _restored(_call(_native.broadcast.default, _carried(_plain(x)), source, group.name), x.dtype)


def wait(x: Tensor) -> Tensor:
    """Wait until ``x``, the result of a verb, has arrived, and return it; nothing happens if it already has."""
    return _call(_native.wait_tensor.default, x)


def _call(native: OpOverload[..., Tensor], *args: object) -> Tensor:
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


def user_frame() -> FrameType | None:
    """The innermost frame of this thread that is the user's: outside shardwise, torch and Python's own plumbing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_line() -> str:
    """Where the user's code stands, as ``file:line``, or ``""`` if nothing of it is on this thread's stack."""
    frame = user_frame()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


@cache
def _ours(filename: str) -> bool:
    packages = (Path(__file__).parents[1], Path(torch.__file__).parent)
    plumbing = (contextlib.__file__, sys.modules["threading"].__file__, sys.modules["functools"].__file__)
    if filename.startswith(("<eval_with_key>", "<frozen ", "<@")) or filename in plumbing:
        return True
    return any(package in Path(filename).parents for package in packages)
