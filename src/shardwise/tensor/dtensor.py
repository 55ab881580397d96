"""`DTensor`: a tensor that lies over the ranks of a mesh and behaves like the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch.compiler import is_dynamo_compiling

from shardwise.errors import PlacementError, RedistributeError, RuleError, message
from shardwise.mesh.mesh import DeviceMesh, current_mesh
from shardwise.mesh.world import current_world
from shardwise.redistribute import execute
from shardwise.redistribute.planner import plan
from shardwise.redistribute.transfer import transfer
from shardwise.sharding.placement import Cut, Partial, Placement, RaggedShard, Replicate
from shardwise.sharding.spec import Spec, TensorMeta, check_sizes, dense, normalize
from shardwise.tensor import agree, dispatch
from shardwise.tensor.roads import MARKED

Placements = Sequence[Placement]
GRAD = cast(Any, torch._C.TensorBase.grad)
KEPT = GRAD.__get__
MAKE: Callable[..., DTensor] = torch.Tensor._make_wrapper_subclass
STRIDED = torch.strided
PARTS = 16384  # of how many parts it is remembered what they are parts of


class DTensor(torch.Tensor):
    """A tensor distributed over a `DeviceMesh`: every rank holds a part, every operator works on the whole.

    ``shape``, ``stride`` and ``dtype`` are those of the global tensor. It is made by `distribute_tensor`,
    `DTensor.from_local` or the factories (`zeros`, `rand`, ...), never by calling the class.

    >>> import shardwise
    >>> def body(rank):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    ...     x = shardwise.distribute_tensor(torch.arange(6.0), mesh, [shardwise.Shard(0)])
    ...     return x.to_local().tolist(), x.sum().item()
    >>> import shardwise.sim, torch
    >>> shardwise.sim.run(lambda: body(0), 2)
    [([0.0, 1.0, 2.0], 15.0), ([3.0, 4.0, 5.0], 15.0)]
    """

    __slots__ = ("_local_tensor", "_spec")
    _local_tensor: torch.Tensor
    _spec: Spec

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, *args: object, **kwargs: object) -> DTensor:
        raise TypeError(
            message(
                "a DTensor is not made by calling its class",
                do="distribute_tensor(tensor, mesh, placements) or DTensor.from_local(part, mesh, placements)",
            )
        )

    @staticmethod
    def _wrap(local: torch.Tensor, spec: Spec, requires_grad: bool = False) -> DTensor:
        meta = spec.meta
        made = MAKE(  # by position, in the order of torch's signature, which takes a third less time than by name
            DTensor,
            meta.shape,
            None if meta.is_packed else meta.stride,
            None,
            None,
            meta.dtype,
            STRIDED,
            local.device,
            False,
            requires_grad,
            None,
            False,
            False,
            MARKED,
        )
        made._local_tensor = local
        made._spec = spec
        return made

    @staticmethod
    def __torch_dispatch__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return dispatch.run(DTensor, func, args, kwargs)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that the tensor lies on."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """How the tensor lies on each axis of the mesh."""
        return self._spec.placements

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Placements | None = None,
        *,
        run_check: bool = False,
        shape: torch.Size | Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Placements | None = None,
    ) -> DTensor:
        """Make a DTensor of what each rank holds; differentiable, and without communication unless ``run_check``.

        The global shape is inferred as local size times ranks for each sharded dim, unless ``shape`` and ``stride``
        are given (as they must be for uneven shards). With ``run_check`` every rank is asked: the shape is the one that
        the parts make up, parts of sizes that follow no rule make a `RaggedShard`, and shapes, dtypes and, over
        replicated axes, contents must agree. The gradient arrives with ``grad_placements``, by default the placements
        themselves with pending ones replicated. Raises `PlacementError` if the placements do not fit, or, with
        ``run_check``, naming the rank that differs.
        """
        if is_dynamo_compiling():
            mesh = mesh_or_current(device_mesh)
            return _from_local_in_graph(local_tensor, mesh, run_check, (shape, stride), placements, grad_placements)
        mesh = mesh_or_current(device_mesh)
        own = tuple(placements or [Replicate()] * mesh.ndim)
        if run_check:
            spec = agree.agreed(local_tensor, mesh, own, shape, stride, grad_placements)
        else:
            if local_tensor.__class__ is not torch.Tensor:
                agree.check_plain(local_tensor)
            own = normalize(own, mesh, local_tensor.ndim)
            whole = None if shape is None else tuple(shape), None if stride is None else tuple(stride)
            spec = _spec_of_part(TensorMeta.of(local_tensor), mesh, own, *whole, mesh.get_coordinate())
        return _of_part(local_tensor, spec, grad_placements)

    def to_local(self, *, grad_placements: Placements | None = None) -> torch.Tensor:
        """This rank's part, as a plain tensor; differentiable.

        ``grad_placements`` says how the gradients of the parts make up the global one: by default like the placements,
        with pending ones replicated.
        """
        if not (torch.is_grad_enabled() and self.requires_grad):
            return self._local_tensor
        spec = self._spec
        back = spec.gradient_placements if grad_placements is None else normalize(grad_placements, spec.mesh, spec.ndim)
        return cast(torch.Tensor, _ToLocal.apply(self, back))  # type: ignore[no-untyped-call]

    def full_tensor(self, *, grad_placements: Placements | None = None) -> torch.Tensor:
        """The whole tensor, as a plain tensor on every rank; differentiable. It communicates unless replicated.

        ``grad_placements`` as in `to_local`: by default every rank is taken to hold the same gradient.
        """
        whole = self.redistribute(placements=[Replicate()] * self._spec.mesh.ndim)
        return _arrived(whole.to_local(grad_placements=grad_placements))

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Placements | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same tensor lying otherwise, maybe on another mesh, moved by the cheapest steps; differentiable.

        ``forward_dtype`` is cast to before the tensor moves, ``backward_dtype`` before its gradient moves. The gradient
        comes back to this mesh with the placements of this tensor, pending ones replicated. With ``async_op`` the
        result waits at its first use, and until then this tensor must not be written to. To another mesh, all ranks of
        both call it, and what is pending is reduced on this mesh first; ranks in neither take part in nothing. Raises
        `PlacementError` or `RedistributeError` if it cannot lie so.
        """
        spec = self._spec
        if placements is None:
            raise RedistributeError(
                message("redistribute needs placements", asked=f"{spec}.redistribute()", do="give one for each axis")
            )
        mesh = device_mesh or spec.mesh
        target = normalize(placements, mesh, spec.ndim)
        goal = Spec(mesh, target, spec.meta)
        check_sizes(goal)
        if mesh is spec.mesh:
            _check_pending(spec, target)
        source = self if forward_dtype is None else self._cast(forward_dtype)
        if source is not self:
            goal = Spec(mesh, target, source._spec.meta)
        differentiable = torch.is_grad_enabled() and source.requires_grad
        if goal is source._spec and backward_dtype is None:
            return _placed_back(source) if differentiable and not is_dynamo_compiling() else source
        if not differentiable:
            return _moved(source, goal, async_op)
        applied = _Redistribute.apply(source, goal, async_op, backward_dtype or self.dtype)  # type: ignore[no-untyped-call]
        return cast(DTensor, applied)

    def _cast(self, dtype: torch.dtype) -> DTensor:
        return self if self.dtype == dtype else cast(DTensor, self.to(dtype))

    @property
    def data(self) -> DTensor:
        """The same tensor without its history; to set it takes a DTensor of the same mesh, placements and meta."""
        return cast(DTensor, self.detach())

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, DTensor) or other._spec is not self._spec:
            got = other._spec if isinstance(other, DTensor) else TensorMeta.of(other)
            raise PlacementError(
                message(
                    "the data of a DTensor can only be set to a tensor that lies like it",
                    asked=f"{self._spec}.data = {got}",
                    do="use .copy_(other), or make a new parameter of it",
                )
            )
        self._local_tensor = other._local_tensor

    @property
    def grad(self) -> DTensor | None:
        """The gradient, a DTensor; one that a formula of torch has made plain is the same on every rank."""
        found = KEPT(self)
        if found is None or isinstance(found, DTensor):
            return found
        with torch.no_grad():
            made = _distributed(found, self._spec.mesh).redistribute(placements=self._spec.gradient_placements)
        GRAD.__set__(self, made)
        return made

    @grad.setter
    def grad(self, other: torch.Tensor | None) -> None:
        GRAD.__set__(self, other)

    @grad.deleter
    def grad(self) -> None:
        GRAD.__delete__(self)

    def share_memory_(self) -> DTensor:
        """Move this rank's part to memory that other processes of its machine can see; returns the tensor itself."""
        self._local_tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether this rank's part is in shared memory."""
        return bool(self._local_tensor.is_shared())

    def apply_(self, *args: Any) -> DTensor:
        """Refused: a Python function of each element would see a part only by accident."""
        raise _element_by_element("apply_", self._spec)

    def map_(self, *args: Any) -> DTensor:
        """Refused, like `apply_`."""
        raise _element_by_element("map_", self._spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        places = ", ".join(str(placement) for placement in self._spec.placements)
        return (
            f"DTensor({self._spec}, local={self._local_tensor}, device_mesh={self._spec.mesh}, placements=({places}))"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Spec, bool, int]]:
        # What is compiled for a rank is not for another one: they may be threads of one process.
        return ["_local_tensor"], (self._spec, self.requires_grad, current_world().rank)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: tuple[Spec, bool, int], size: Any, stride: Any
    ) -> DTensor:
        spec, requires_grad, _ = context
        return DTensor._wrap(inner["_local_tensor"], spec, requires_grad)

    def __coerce_tangent_metadata__(self) -> DTensor:
        return self.redistribute(placements=self._spec.gradient_placements)

    def __coerce_same_metadata_as_tangent__(
        self, context: tuple[Spec, bool, int], expected_type: Any = None
    ) -> DTensor:
        return self.redistribute(placements=context[0].placements)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) in memo:
            return cast(DTensor, memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError(f"only leaf DTensors can be deep-copied, and {self._spec} has a gradient function")
        made = DTensor._wrap(copy.deepcopy(_arrived(self._local_tensor).detach(), memo), self._spec, self.requires_grad)
        memo[id(self)] = made
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        for name, item in vars(self).items():
            setattr(made, name, copy.deepcopy(item, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        local = _arrived(self._local_tensor).detach()
        return _rebuild, (local, self._spec, self.requires_grad, dict(vars(self)))

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if self.ndim == 0 and format_spec else repr(self)


def _element_by_element(name: str, spec: Spec) -> RuleError:
    return RuleError(message(f"{name} has no sharding rule", asked=f"{spec}.{name}(...)", do="use tensor operators"))


def _rebuild(local: torch.Tensor, spec: Spec, requires_grad: bool, attributes: dict[str, Any]) -> DTensor:
    made = DTensor._wrap(local, spec, requires_grad)
    for name, item in attributes.items():
        setattr(made, name, item)
    return made


def mesh_or_current(mesh: DeviceMesh | None) -> DeviceMesh:
    found = mesh or current_mesh()
    if found is None:
        raise RedistributeError(message("no mesh was given", do="pass device_mesh, or call it within `with mesh:`"))
    return found


def _of_part(local: torch.Tensor, spec: Spec, grad_placements: Placements | None) -> DTensor:
    if grad_placements is None:
        back = spec.gradient_placements
    else:
        back = normalize(grad_placements, spec.mesh, spec.ndim)
        agree.check_gradient(spec, back)
    part = spec.meta.lay_out(local.resolve_conj().resolve_neg())
    if not (torch.is_grad_enabled() and local.requires_grad):
        return DTensor._wrap(part.detach() if part.requires_grad else part, spec)
    return cast(DTensor, _FromLocal.apply(part, spec, back))  # type: ignore[no-untyped-call]


@lru_cache(maxsize=PARTS)
def _spec_of_part(
    part: TensorMeta,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...] | None,
    stride: tuple[int, ...] | None,
    coordinate: tuple[int, ...] | None,
) -> Spec:
    """The spec of a tensor of which the rank at ``coordinate`` holds ``part``."""
    spec = Spec(mesh, placements, _global_meta(part, mesh, placements, shape, stride))
    check_sizes(spec)
    agree.check_local_shape(part.shape, spec, coordinate)
    return spec


def _global_meta(
    own: TensorMeta,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> TensorMeta:
    if shape is not None and stride is not None:
        return TensorMeta(tuple(shape), tuple(stride), own.dtype)
    if shape is not None:
        return TensorMeta.contiguous(tuple(shape), own.dtype)
    sizes, strides = list(own.shape), list(own.stride)
    ragged = {cut.dim: sum(cut.sizes) for cut in placements if isinstance(cut, RaggedShard)}
    if ragged:
        sizes = [ragged.get(dim, size) for dim, size in enumerate(sizes)]
    for placement, parts in zip(placements, mesh.shape, strict=True):
        if isinstance(placement, Cut) and placement.dim not in ragged:
            grown = strides[placement.dim]
            strides = [step * parts if step > grown else step for step in strides]
            sizes[placement.dim] *= parts
    return TensorMeta(tuple(sizes), dense(sizes, strides) if ragged else tuple(strides), own.dtype)


def _distributed(gradient: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A gradient as a DTensor: formulas of torch make plain zeros at times, the same on every rank."""
    if isinstance(gradient, DTensor):
        return gradient
    return DTensor._wrap(gradient, Spec(mesh, (Replicate(),) * mesh.ndim, TensorMeta.of(gradient)))


def _arrived(local: torch.Tensor) -> torch.Tensor:
    waiting = getattr(local, "wait", None)
    return local if waiting is None else waiting()


def _check_pending(source: Spec, target: tuple[Placement, ...]) -> None:
    for axis, (own, wanted) in enumerate(zip(source.placements, target, strict=True)):
        if isinstance(wanted, Partial) and own is not wanted:
            raise RedistributeError(
                message(
                    f"redistribute makes nothing pending: {own} cannot become {wanted}",
                    asked=f"{source} to {list(target)}, on axis {source.mesh.axis_names[axis]}",
                    do="redistribute to Replicate() or Shard(dim); DTensor.from_local can take pending parts",
                )
            )


def _placed_back(source: DTensor) -> DTensor:
    """``source`` itself, to which its gradient comes placed as it is."""
    made = cast(DTensor, torch.ops.aten.alias.default(source))
    mesh, back = source._spec.mesh, source._spec.gradient_placements
    made.register_hook(lambda gradient: _distributed(gradient, mesh).redistribute(placements=back))  # type: ignore[no-untyped-call]
    return made


def _moved(source: DTensor, goal: Spec, async_op: bool = False) -> DTensor:
    spec, local = source._spec, source._local_tensor
    if spec.meta.dtype.is_complex:
        local = local.resolve_conj()
    if goal is spec:
        return DTensor._wrap(local, spec)
    if goal.mesh is not spec.mesh:
        return DTensor._wrap(transfer(local, spec, goal, async_op=async_op), goal)
    run = execute.run_async if async_op else execute.run
    return DTensor._wrap(run(local, spec, plan(spec, goal)), goal)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Spec, back: tuple[Placement, ...]) -> DTensor:
        ctx.mesh, ctx.back = spec.mesh, back
        return DTensor._wrap(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _distributed(gradient, ctx.mesh).redistribute(placements=ctx.back).to_local(), None, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: DTensor, back: tuple[Placement, ...]) -> torch.Tensor:
        ctx.spec, ctx.back = whole._spec, back
        return whole._local_tensor.view_as(whole._local_tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        spec = ctx.spec
        stride = TensorMeta.contiguous(spec.shape, gradient.dtype).stride
        return DTensor.from_local(gradient.contiguous(), spec.mesh, ctx.back, shape=spec.shape, stride=stride), None


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: DTensor, goal: Spec, async_op: bool, dtype: torch.dtype) -> DTensor:
        spec = source._spec
        ctx.mesh, ctx.back, ctx.dtype, ctx.source_dtype = spec.mesh, spec.gradient_placements, dtype, source.dtype
        ctx.goal_mesh = goal.mesh
        return _moved(source, goal, async_op)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        back = _distributed(gradient, ctx.goal_mesh)._cast(ctx.dtype).redistribute(ctx.mesh, ctx.back)
        return back._cast(ctx.source_dtype), None, None, None


def _from_local_in_graph(
    local: torch.Tensor,
    mesh: DeviceMesh,
    run_check: bool,
    sizes: tuple[Sequence[int] | None, Sequence[int] | None],
    placements: Placements | None,
    grad_placements: Placements | None,
) -> DTensor:
    """Let torch.compile put the call in the graph as it is: it cannot trace how a DTensor is made."""
    counts = [None if each is None else len(each) for each in sizes]
    key = _keep_call(mesh, run_check, *counts, _spelled(placements), _spelled(grad_placements))
    return cast(DTensor, getattr(mesh, key)(local, *[size for each in sizes if each is not None for size in each]))


def _spelled(placements: Placements | None) -> list[tuple[Any, ...]] | None:
    # A placement that is made while torch.compile traces is only known by its fields.
    if placements is None:
        return None
    spelled = []
    for one in placements:
        names: tuple[str, ...] = one.__match_args__
        spelled.append((type(one), *[_fixed(getattr(one, name)) for name in names]))
    return spelled


def _fixed(field: Any) -> Any:
    # torch.compile may take a number for a variable, except in a range.
    if isinstance(field, tuple):
        return tuple([_fixed(one) for one in field])
    return range(field) if isinstance(field, int) else field


def _read(field: Any) -> Any:
    if isinstance(field, tuple):
        return tuple(map(_read, field))
    return field.stop if isinstance(field, range) else field


def _keep_call(mesh: DeviceMesh, run_check: bool, shape: int | None, stride: int | None, *spelled: Any) -> str:
    own, back = (each and [kind(*map(_read, fields)) for kind, *fields in each] for each in spelled)

    def from_local(local: torch.Tensor, *sizes: int) -> DTensor:
        # what a DTensor knows of sizes are numbers: a region that takes it is compiled anew for others
        size, step, asked = (tuple(map(int, each)) for each in (local.shape, local.stride(), sizes))
        asked_shape = None if shape is None else asked[:shape]
        asked_stride = None if stride is None else asked[len(asked) - stride :]
        placed = tuple(own or [Replicate()] * mesh.ndim)
        if run_check:
            spec = agree.agreed(local, mesh, placed, asked_shape, asked_stride, back)
        else:
            part, placed = TensorMeta(size, step, local.dtype), normalize(placed, mesh, local.ndim)
            spec = _spec_of_part(part, mesh, placed, asked_shape, asked_stride, mesh.get_coordinate())
        return _of_part(local, spec, back)

    key = f"traced from_local {own} {back} {shape} {stride} {run_check}"
    mesh.__dict__.setdefault(key, torch.compiler.allow_in_graph(from_local))  # an attribute, which a guard can name
    return key


_keep_call._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run while torch.compile traces
