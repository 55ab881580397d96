"""Cross-entropy of logits whose classes are cut, without gathering them.

Within `loss_parallel` the operators that make up cross-entropy run on the ranks' own classes wherever the class dim is
cut: the softmax needs a maximum and a sum over the ranks for each token, the negative log likelihood a sum over the
ranks of what each finds among its classes. Everything else, and outside the block everything, goes by the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.sharding.placement import Cut, Partial, Placement, Replicate, Shard
from shardwise.sharding.spec import Spec, TensorMeta
from shardwise.tensor.dtensor import DTensor

__all__ = ["loss_parallel"]

aten = torch.ops.aten
NONE, MEAN, SUM = range(3)  # torch's numbers for reduction=
HALVES = (torch.float16, torch.bfloat16)
Run = Callable[..., object]


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Let cross-entropy of logits cut by class communicate a few numbers a token, and not the logits.

    Within the block the target, and the class weights, may be plain tensors, the same on every rank. Forward and
    backward give the same values within the block and without.

    >>> import torch, shardwise, shardwise.sim
    >>> from shardwise.parallel import loss_parallel
    >>> def body():
    ...     mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     logits = shardwise.zeros(3, 4, device_mesh=mesh, placements=[shardwise.Shard(1)])
    ...     with loss_parallel():
    ...         return torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 3])).exp().item()
    >>> [round(perplexity, 4) for perplexity in shardwise.sim.run(body, 2)]
    [4.0, 4.0]
    """
    with _ByClass():
        yield


class _ByClass(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        run = BY_CLASS.get(func)
        given = args if run is None else _distributed(args)
        if run is not None and isinstance(given[0], DTensor) and not kwargs and _is_ours(func, given):
            return run(*given)
        return func(*given, **(kwargs or {}))


def _distributed(args: Sequence[object]) -> Sequence[object]:
    """The arguments of a loss, plain tensors made replicated ones if any is distributed."""
    meshes = [argument.device_mesh for argument in args if isinstance(argument, DTensor)]
    if not meshes:
        return args
    whole = [Replicate()] * meshes[0].ndim
    return [
        DTensor.from_local(argument, meshes[0], whole)
        if isinstance(argument, torch.Tensor) and not isinstance(argument, DTensor)
        else argument
        for argument in args
    ]


def _is_ours(func: torch._ops.OpOverload, args: Sequence[object]) -> bool:
    scores = args[1] if func in BACKWARDS else args[0]
    if not isinstance(scores, DTensor):
        return False
    spec = scores._spec
    dim = args[2 if func in BACKWARDS else 1] if func in SOFTMAXES else 1
    if spec.ndim < 2 or not isinstance(dim, int):
        return False
    dim %= spec.ndim
    simple = all(placement.is_replicate() or placement.is_shard() for placement in spec.placements)
    return simple and any(isinstance(placement, Cut) and placement.dim == dim for placement in spec.placements)


def _log_softmax(x: DTensor, dim: int, half_to_float: bool) -> torch.Tensor:
    spec, local = x._spec, x._local_tensor
    exact = local.to(torch.float32) if local.dtype in HALVES else local
    peaks = exact.amax(dim, True) if exact.shape[dim] else exact.sum(dim, True) - torch.inf
    shifted = exact - _over_classes(peaks, spec, dim, "max")
    scores = shifted - _over_classes(shifted.exp().sum(dim, True), spec, dim, "sum").log()
    return _like(scores if half_to_float else scores.to(local.dtype), spec)


def _log_softmax_backward(grad: DTensor, output: DTensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    spec, scores = output._spec, output._local_tensor
    exact = torch.float32 if scores.dtype in HALVES else scores.dtype
    laid = grad.redistribute(placements=spec.placements)._local_tensor.to(exact)
    total = _over_classes(laid.sum(dim, True), spec, dim, "sum")
    return _like((laid - scores.to(exact).exp() * total).to(dtype), spec)


def _over_classes(local: torch.Tensor, spec: Spec, dim: int, reduce_op: str) -> torch.Tensor:
    """The reduction over all classes, one number a token, from that over the classes of each rank."""
    dim %= spec.ndim
    shape = (*spec.shape[:dim], 1, *spec.shape[dim + 1 :])
    cuts = [placement.is_shard(dim) for placement in spec.placements]
    here = [Partial(reduce_op) if cut else placement for cut, placement in zip(cuts, spec.placements, strict=True)]
    done = [Replicate() if cut else placement for cut, placement in zip(cuts, spec.placements, strict=True)]
    pending = DTensor._wrap(local, Spec(spec.mesh, tuple(here), TensorMeta.contiguous(shape, local.dtype)))
    return pending.redistribute(placements=done)._local_tensor


def _like(local: torch.Tensor, spec: Spec) -> DTensor:
    meta = TensorMeta.contiguous(spec.shape, local.dtype)
    return DTensor._wrap(local.contiguous(), Spec(spec.mesh, spec.placements, meta))


class _Classes:
    """The classes and tokens of one rank, and the places that its targets have among the classes."""

    def __init__(self, scores: DTensor, target: DTensor, weight: DTensor | None, ignored: int) -> None:
        spec = self.spec = scores._spec
        self.tokens = tuple(map(_token_placement, spec.placements))
        self.terms = tuple(_term_placement(placement, cut_by_class=True) for placement in spec.placements)
        self.counts = tuple(_term_placement(placement, cut_by_class=False) for placement in spec.placements)
        own = target.redistribute(placements=self.tokens)._local_tensor
        coordinate = spec.mesh.get_coordinate() or (0,) * spec.mesh.ndim
        start, stop = next(iter(spec.intervals(1, coordinate)), (0, 0))
        self.size = scores._local_tensor.shape[1]
        counted = own != ignored
        self.held = counted & (own >= start) & (own < stop)
        self.place = torch.where(self.held, own - start, 0).unsqueeze(1)
        self.weight = counted.to(scores.dtype)
        if weight is not None:
            every = weight.redistribute(placements=[Replicate()] * spec.mesh.ndim)._local_tensor
            self.weight = self.weight * every[torch.where(counted, own, 0)]

    def wrap(self, local: torch.Tensor, shape: Sequence[int], placements: tuple[Placement, ...]) -> DTensor:
        return DTensor._wrap(local, Spec(self.spec.mesh, placements, TensorMeta.contiguous(shape, local.dtype)))


def _token_placement(placement: Placement) -> Placement:
    """How the tokens lie, which have no class dim, where the scores lie so."""
    if not isinstance(placement, Shard) or placement.dim == 1:
        return Replicate()
    return Shard(placement.dim - (placement.dim > 1))


def _term_placement(placement: Placement, *, cut_by_class: bool) -> Placement:
    """How a sum over tokens lies: pending where tokens are cut, and with ``cut_by_class`` where classes are."""
    cut = isinstance(placement, Shard) and (cut_by_class or placement.dim != 1)
    return Partial() if cut else Replicate()


def _nll(
    scores: DTensor, target: DTensor, weight: DTensor | None, reduction: int, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    classes = _Classes(scores, target, weight, ignored)
    local = scores._local_tensor
    found = local.gather(1, classes.place).squeeze(1) if classes.size else torch.zeros_like(classes.weight)
    losses = torch.where(classes.held, -found * classes.weight, 0)
    if reduction == NONE:
        shape = (*scores.shape[:1], *scores.shape[2:])
        pending = zip(classes.tokens, classes.spec.placements, strict=True)
        placements = tuple(Partial() if placement.is_shard(1) else token for token, placement in pending)
        none = classes.wrap(local.new_zeros(()), (), (Replicate(),) * classes.spec.mesh.ndim)
        return classes.wrap(losses, shape, placements), none
    total = classes.wrap(classes.weight.sum(), (), classes.counts)
    total = total.redistribute(placements=[Replicate()] * classes.spec.mesh.ndim)
    loss = classes.wrap(losses.sum(), (), classes.terms)
    return (loss / total if reduction == MEAN else loss), total


def _nll_backward(
    grad: DTensor,
    scores: DTensor,
    target: DTensor,
    weight: DTensor | None,
    reduction: int,
    ignored: int,
    total: DTensor,
) -> torch.Tensor:
    classes = _Classes(scores, target, weight, ignored)
    every = classes.tokens if reduction == NONE else (Replicate(),) * classes.spec.mesh.ndim
    share = grad.redistribute(placements=every)._local_tensor
    if reduction == MEAN:
        share = share / total.redistribute(placements=every)._local_tensor
    values = torch.where(classes.held, -share * classes.weight, 0)
    made = torch.zeros_like(scores._local_tensor)
    if classes.size:
        made.scatter_(1, classes.place, values.unsqueeze(1))
    return _like(made, classes.spec)


BY_CLASS: Mapping[torch._ops.OpOverload, Run] = {
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.nll_loss_forward.default: _nll,
    aten.nll_loss2d_forward.default: _nll,
    aten.nll_loss_backward.default: _nll_backward,
    aten.nll_loss2d_backward.default: _nll_backward,
}
SOFTMAXES = (aten._log_softmax.default, aten._log_softmax_backward_data.default)
BACKWARDS = (
    aten._log_softmax_backward_data.default,
    aten.nll_loss_backward.default,
    aten.nll_loss2d_backward.default,
)
