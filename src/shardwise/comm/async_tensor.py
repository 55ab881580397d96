"""A tensor that is still on the wire: it waits when it is first read, and not before.

An `AsyncCollectiveTensor` wraps the result of a collective together with its `Arrival`, which all views of it share:
views and ``detach`` do not wait, the first operator that reads or writes the data waits for all of them at once.
Whatever an operator returns is a plain tensor.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from threading import get_ident
from typing import Any, SupportsIndex, TypeVar, cast

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch

from shardwise.comm import wire
from shardwise.mesh.world import current_world

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Arrival:
    """That a tensor comes in: waited for once, by whoever needs it first."""

    __slots__ = ("__weakref__", "_settle")

    def __init__(self, sent: Tensor) -> None:
        # A result that nobody reads is waited for when it dies or the program ends, so that the wire is left clean.
        self._settle = weakref.finalize(self, _settle, sent, get_ident())

    @property
    def done(self) -> bool:
        """Whether the wait is over."""
        return not self._settle.alive

    def wait(self) -> None:
        """Wait, unless that was done before."""
        waiting = self._settle.detach()
        if waiting is not None:
            wire.wait(waiting[2][0])


def _settle(sent: Tensor, thread: int) -> None:
    if thread != get_ident() and current_world().kind == "simulated":
        return  # the garbage of one rank, collected in the thread of another, which cannot wait for it
    try:
        wire.wait(sent)
    except (
        BaseException
    ):  # nobody is left to tell: the collective failed, or the run that it belonged to was broken off
        _log.debug("a collective that nobody read did not end well", exc_info=True)


class AsyncCollectiveTensor(Tensor):
    """The result of a collective that may not have arrived; every way to read it waits.

    ``elem`` is the plain tensor inside, which must not be read before `wait` or `trigger_wait`.

    >>> import torch
    >>> from shardwise.comm.functional import all_reduce
    >>> from shardwise.mesh.world import dry_world, use_world
    >>> with use_world(dry_world(0, 2)):
    ...     total = all_reduce(torch.ones(2, 3), "sum", None)
    >>> row = total.t()[0]
    >>> row.completed
    False
    >>> row + 1
    tensor([2., 2.])
    >>> total.completed
    True
    """

    __slots__ = ("_arrival", "elem")

    elem: Tensor
    _arrival: Arrival | None  # None while a graph is traced: there is nothing to remember, and the graph is to wait

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, elem: Tensor, arrival: Arrival | None = None) -> AsyncCollectiveTensor:
        return _wrap(elem, Arrival(elem) if arrival is None else arrival)

    @property
    def completed(self) -> bool:
        """Whether it has arrived and been waited for."""
        return self._arrival is not None and self._arrival.done

    def trigger_wait(self) -> Tensor:
        """Wait, and return the plain tensor, which autograd does not know."""
        if self._arrival is None:
            self.elem = wire.wait(self.elem)
        else:
            self._arrival.wait()
        return self.elem

    def wait(self) -> Tensor:
        """Wait, and return the plain tensor; gradients pass."""
        if self.requires_grad and torch.is_grad_enabled():
            return cast(Tensor, _Wait.apply(self))  # type: ignore[no-untyped-call]
        return self.trigger_wait()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["elem"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], meta: None, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> AsyncCollectiveTensor:
        return _wrap(inner["elem"], None)

    def __coerce_same_metadata_as_tangent__(
        self, expected_metadata: object, expected_type: type | None = None
    ) -> Tensor | None:
        return self.trigger_wait() if expected_type is Tensor else None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if _is_view(func):
            return _view(func, args, kwargs)
        result = func(*_arrived(args), **{name: _arrived(item) for name, item in kwargs.items()})
        return _mutated(func, args, kwargs, result) if func._schema.is_mutable else result

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"AsyncCollectiveTensor({self.wait()!r})"

    def __format__(self, form: str) -> str:
        return format(self.wait(), form)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return cast("tuple[object, ...]", self._copied().__reduce_ex__(protocol))

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        return cast(Tensor, self._copied().__deepcopy__(memo))

    def _copied(self) -> Tensor:
        return self.trigger_wait().detach().requires_grad_(self.requires_grad) if self.is_leaf else self.wait()

    def __array__(self, *args: object, **kwargs: object) -> object:
        return self.wait().__array__(*args, **kwargs)

    def __dlpack__(self, **kwargs: object) -> object:
        return self.wait().__dlpack__(**kwargs)  # type: ignore[arg-type]

    def tolist(self) -> object:  # type: ignore[override]
        """The values as a list."""
        return self.wait().tolist()

    def numpy(self, *, force: bool = False) -> object:  # type: ignore[override]
        """The values as a numpy array."""
        return self.wait().numpy(force=force)

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self.wait().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The bytes."""
        if self._arrival is None or TracingContext.try_get() is not None:
            return super().untyped_storage()  # a compiler that looks at its inputs; the graph is to wait
        return self.trigger_wait().untyped_storage()

    def apply_(self, function: Callable[..., object]) -> AsyncCollectiveTensor:
        """Change each value by a function; a CPU tensor only."""
        self.trigger_wait().apply_(function)
        return self

    def map_(self, other: Tensor, function: Callable[..., object]) -> AsyncCollectiveTensor:
        """Change each value by a function of it and that of another tensor; a CPU tensor only."""
        self.trigger_wait().map_(_arrived(other), function)
        return self


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: AsyncCollectiveTensor) -> Tensor:
        return pending.trigger_wait().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _wrap(elem: Tensor, arrival: Arrival | None) -> AsyncCollectiveTensor:
    made: AsyncCollectiveTensor = Tensor._make_wrapper_subclass(
        AsyncCollectiveTensor,
        elem.size(),
        strides=elem.stride(),
        storage_offset=elem.storage_offset(),
        dtype=elem.dtype,
        layout=elem.layout,
        device=elem.device,
    )
    # C++ that takes the address and passes the dispatcher by is refused, for it would read nothing.
    torch._C._set_throw_on_mutable_data_ptr(made)
    made.elem, made._arrival = elem, arrival
    return made


@cache
def _is_view(func: OpOverload[..., object]) -> bool:
    # Composite operators reach us undecomposed in inference mode, and may copy: `to`, `reshape`, `contiguous`.
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func._name, "CompositeImplicitAutograd")
    return func.is_view and not composite


def _view(func: OpOverload[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    base = args[0]
    assert isinstance(base, AsyncCollectiveTensor), base
    seen = func(base.elem, *args[1:], **kwargs)
    if isinstance(seen, Tensor):
        return _wrap(seen, base._arrival)
    return [_wrap(one, base._arrival) for one in cast("Sequence[Tensor]", seen)]


def _arrived(item: T) -> T:
    if isinstance(item, AsyncCollectiveTensor):
        return cast(T, item.trigger_wait())
    if isinstance(item, list | tuple):
        return cast(T, type(item)(_arrived(one) for one in item))
    return item


def _mutated(
    func: OpOverload[..., object], args: tuple[object, ...], kwargs: dict[str, object], result: object
) -> object:
    """In-place operators return the very tensors that they were given."""
    if torch.Tag.inplace_view in func.tags and isinstance(args[0], AsyncCollectiveTensor):
        _relabel(func, args, kwargs)
    given = {id(item.elem): item for item in _pending((args, tuple(kwargs.values())))}
    if isinstance(result, list | tuple):
        return type(result)(given.get(id(one), one) for one in result)
    return given.get(id(result), result)


def _relabel(func: OpOverload[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Let the wrapper's own sizes follow those of the tensor inside."""
    before = torch._C._meta_in_tls_dispatch_include()
    torch._C._set_meta_in_tls_dispatch_include(True)
    try:
        with no_dispatch():
            func(*args, **kwargs)
    finally:
        torch._C._set_meta_in_tls_dispatch_include(before)


def _pending(item: object) -> list[AsyncCollectiveTensor]:
    if isinstance(item, AsyncCollectiveTensor):
        return [item]
    return [one for part in item for one in _pending(part)] if isinstance(item, list | tuple) else []
