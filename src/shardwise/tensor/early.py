"""Operators that are met before autograd and before torch's own code for them.

Torch writes a composite operator in terms of others above autograd, where no tensor class is asked. Most may do so
unseen; a few read the memory of a tensor there, which a distributed one does not have, make plain tensors of their own
beside the distributed ones, or take views that nobody sees. And the gradient of some operator is a plain tensor. These
are met at the key of `roads`, which comes before autograd and which only distributed tensors have: a call on others
never passes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch._C import DispatchKey, DispatchKeySet

from shardwise.mesh.world import saying
from shardwise.sharding.placement import Replicate
from shardwise.tensor.dispatch import VIEWS_MAY_MOVE, redistributed
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.roads import KEY

ONE_GRADIENT = DispatchKeySet(DispatchKey.AutogradNestedTensor)

aten = torch.ops.aten
Op = torch._ops.OpOverload
Met = Callable[..., object]
AFTER = torch._C._dispatch_keyset_full_after(torch._C._dispatch_key_parse(KEY))


def reading(op: Op, name: str) -> Met:
    """``op``, which reads the memory of the argument ``name``, with all of that argument on every rank."""
    place = [argument.name for argument in op._schema.arguments].index(name)

    def met(keys: DispatchKeySet, *args: object, **kwargs: object) -> object:
        read = args[place]
        if not isinstance(read, DTensor):
            return op.redispatch(keys & AFTER, *args, **kwargs)
        whole = redistributed(op, read, [Replicate()] * read.device_mesh.ndim).to_local()
        result: object = op(*args[:place], whole, *args[place + 1 :], **kwargs)
        return result

    return met


def making(op: Op) -> Met:
    """``op``, which makes plain tensors by itself: they are the same on every rank."""

    def met(keys: DispatchKeySet, *args: object, **kwargs: object) -> object:
        given = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
        if not all(isinstance(item, DTensor) or item.numel() == 1 for item in given):
            return op.redispatch(keys & AFTER, *args, **kwargs)
        with saying("implicit replication"):
            return op.redispatch(keys & AFTER, *args, **kwargs)

    return met


def viewing(op: Op) -> Met:
    """``op``, whose result is no view, though torch takes views on the way: what they are of may move first."""

    def met(keys: DispatchKeySet, *args: object, **kwargs: object) -> object:
        with saying(VIEWS_MAY_MOVE):
            return op.redispatch(keys & AFTER, *args, **kwargs)

    return met


def real(op: Op, other: Op) -> Met:
    """``op``, or on real numbers ``other``, which is the same there, and whose gradient is like its result."""

    def met(keys: DispatchKeySet, *args: object, **kwargs: object) -> object:
        x = args[0]
        assert isinstance(x, torch.Tensor), op
        if x.is_complex() or not isinstance(x, DTensor):
            return op.redispatch(keys & AFTER, *args, **kwargs)
        result: object = other(*args, **kwargs)
        return result

    return met


def layer(op: Op) -> Met:
    """A linear layer, which torch makes of views and products, as the one operator that it is.

    Autograd knows a gradient of it, which is one operator as well, though torch only uses it for nested tensors.
    """

    def met(keys: DispatchKeySet, *args: object, **kwargs: object) -> object:
        x, matrix, bias = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
        after = keys & AFTER
        if isinstance(x, DTensor) and isinstance(matrix, DTensor) and _is_one_operator(x, matrix, bias):
            after = after | ONE_GRADIENT
        return op.redispatch(after, *args, **kwargs)

    return met


def _is_one_operator(x: DTensor, matrix: DTensor, bias: object) -> bool:
    """Whether a layer can be one operator: a matrix of real numbers, and for a gradient both tensors must be kept.

    Whoever looks on, counting or keeping products, sees the products.
    """
    if not x.ndim or matrix.ndim != 2 or not x.is_floating_point() or torch._C._len_torch_dispatch_stack():
        return False
    if bias is not None and not (isinstance(bias, DTensor) and bias.shape == matrix.shape[:1]):
        return False
    if not torch.is_grad_enabled():
        return True
    kept = x.requires_grad and matrix.requires_grad
    return kept or not (x.requires_grad or matrix.requires_grad or (bias is not None and bias.requires_grad))


VIEWING = """
    trapz.x trapz.dx trapezoid.x trapezoid.dx cumulative_trapezoid.x cumulative_trapezoid.dx instance_norm
    repeat_interleave.self_int repeat_interleave.self_Tensor stft stft.center istft fft_hfft2 fft_hfftn fft_ihfft2
    fft_ihfftn linalg_tensorsolve linalg_tensorinv
"""


def _viewing() -> Iterator[Op]:
    for name in VIEWING.split():
        packet, _, overload = name.partition(".")
        yield getattr(getattr(aten, packet), overload or "default")


MAKING = (aten._scaled_dot_product_attention_math.default, aten.quantile.default, aten.quantile.scalar)


MET: Mapping[Op, Met] = {
    aten.tensor_split.tensor_indices_or_sections: reading(
        aten.tensor_split.tensor_indices_or_sections, "tensor_indices_or_sections"
    ),
    **{op: making(op) for op in MAKING},
    aten.sgn.default: real(aten.sgn.default, aten.sign.default),
    aten.sgn_.default: real(aten.sgn_.default, aten.sign_.default),
    aten.linear.default: layer(aten.linear.default),
    **{op: viewing(op) for op in _viewing()},
}


def _registered() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for op, met in MET.items():
        library.impl(op, met, KEY, with_keyset=True)
    return library


LIBRARY: Final = _registered()  # what it registers lasts as long as it does
