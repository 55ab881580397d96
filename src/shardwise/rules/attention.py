"""Scaled dot product attention: batch and heads are cut; queries as well where no position masks another.

Grouped heads: ``(h r)`` query heads share ``h`` heads of keys and values, so heads are cut in whole groups.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwise.rules.empty import zeros
from shardwise.rules.rule import Call, Placing, Rule
from shardwise.sharding.spec import TensorMeta

Run = Callable[..., object]
MaybeMeta = TensorMeta | None


class Dims:
    """The dims of one call as text: ``q`` (also of its gradient), ``k``, ``v``, ``out``, ``lse`` and the mask's."""

    def __init__(self, query: TensorMeta, key: TensorMeta, *, queries: bool) -> None:
        grouped = query.shape[1] != key.shape[1]
        heads, length = "(h [r])" if grouped else "h", "l" if queries else "[l]"
        self.q = f"b {heads} {length} [e]"
        self.k = "b h [s] [e]"
        self.v = "b h [s] [v]"
        self.out = f"b {heads} {length} [v]"
        self.lse = f"b {heads} {length}"
        self.sizes = (*query.shape[:3], key.shape[2])
        self.parts = ("b", heads, length, "[s]")

    def mask(self, mask: MaybeMeta) -> str:
        """A mask is aligned right, and broadcasts where it has size one."""
        if mask is None:
            return "..."
        ndim = len(mask.shape)
        aligned = zip(mask.shape, self.sizes[4 - ndim :], self.parts[4 - ndim :], strict=True)
        return " ".join("1" if own == 1 != size else part for own, size, part in aligned)


def cpu(
    query: TensorMeta,
    key: TensorMeta,
    value: TensorMeta,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: MaybeMeta = None,
    scale: float | None = None,
) -> str:
    d = Dims(query, key, queries=not is_causal)
    return f"f({d.q}, {d.k}, {d.v}, {d.mask(attn_mask)}) -> {d.out}, {d.lse}"


def cpu_backward(
    grad: TensorMeta,
    query: TensorMeta,
    key: TensorMeta,
    value: TensorMeta,
    out: TensorMeta,
    logsumexp: TensorMeta,
    dropout_p: float,
    is_causal: bool,
    attn_mask: MaybeMeta = None,
    scale: float | None = None,
) -> str:
    d = Dims(query, key, queries=not is_causal)
    left = [d.out, d.q, d.k, d.v, d.out, d.lse, d.mask(attn_mask)]
    return f"{' / '.join(left)} -> {d.q}, {d.k}, {d.v}"


# --- the kernels of accelerators: their random numbers are drawn inside, so dropout keeps everything whole


def _whole(operands: int, outputs: int) -> str:
    return f"f({', '.join(['_'] * operands)}) -> {', '.join(['_'] * outputs)}"


def flash(query: TensorMeta, key: TensorMeta, value: TensorMeta, dropout_p: float = 0.0, *_: object) -> str:
    if dropout_p:
        return _whole(3, 7)
    d = Dims(query, key, queries=False)
    return f"f({d.q}, {d.k}, {d.v}) -> {d.out}, {d.lse}, _, _, _, _, _"


def flash_backward(
    grad: TensorMeta,
    query: TensorMeta,
    key: TensorMeta,
    value: TensorMeta,
    out: TensorMeta,
    logsumexp: TensorMeta,
    cum_seq_q: MaybeMeta,
    cum_seq_k: MaybeMeta,
    max_q: int,
    max_k: int,
    dropout_p: float,
    *_: object,
) -> str:
    if dropout_p:
        return _whole(10, 3)
    d = Dims(query, key, queries=False)
    return f"{d.out} / {d.q} / {d.k} / {d.v} / {d.out} / {d.lse} / _ / _ / _ / _ -> {d.q}, {d.k}, {d.v}"


def biased(
    query: TensorMeta,
    key: TensorMeta,
    value: TensorMeta,
    attn_bias: MaybeMeta,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    *_: object,
) -> str:
    return _biased(query, key, attn_bias, dropout_p, "b {heads} [lse]", 2)


def cudnn(
    query: TensorMeta,
    key: TensorMeta,
    value: TensorMeta,
    attn_bias: MaybeMeta,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    *_: object,
) -> str:
    return _biased(query, key, attn_bias, dropout_p, "b {heads} [lse] [one]" if compute_log_sumexp else "_", 5)


def _biased(query: TensorMeta, key: TensorMeta, bias: MaybeMeta, dropout_p: float, lse: str, apart: int) -> str:
    if dropout_p:
        return _whole(4, 2 + apart)
    d = Dims(query, key, queries=False)
    rest = ", ".join(["_"] * apart)
    return f"f({d.q}, {d.k}, {d.v}, {d.mask(bias)}) -> {d.out}, {lse.format(heads=d.parts[1])}, {rest}"


def efficient_backward(
    grad: TensorMeta,
    query: TensorMeta,
    key: TensorMeta,
    value: TensorMeta,
    attn_bias: MaybeMeta,
    out: TensorMeta,
    logsumexp: TensorMeta,
    philox_seed: MaybeMeta,
    philox_offset: MaybeMeta,
    dropout_p: float,
    *_: object,
) -> str:
    if dropout_p:
        return _whole(9, 4)
    d = Dims(query, key, queries=False)
    mask = d.mask(attn_bias)
    left = [d.out, d.q, d.k, d.v, mask, d.out, f"b {d.parts[1]} [lse]", "_", "_"]
    return f"{' / '.join(left)} -> {d.q}, {d.k}, {d.v}, {mask}"


def cudnn_backward(
    grad: TensorMeta,
    query: TensorMeta,
    key: TensorMeta,
    value: TensorMeta,
    out: TensorMeta,
    logsumexp: TensorMeta,
    philox_seed: MaybeMeta,
    philox_offset: MaybeMeta,
    attn_bias: MaybeMeta,
    cum_seq_q: MaybeMeta,
    cum_seq_k: MaybeMeta,
    max_q: int,
    max_k: int,
    dropout_p: float,
    *_: object,
) -> str:
    if dropout_p:
        return _whole(11, 3)
    d = Dims(query, key, queries=False)
    left = [d.out, d.q, d.k, d.v, d.out, f"b {d.parts[1]} [lse] [one]", "_", "_", d.mask(attn_bias), "_", "_"]
    return f"{' / '.join(left)} -> {d.q}, {d.k}, {d.v}"


def _local(call: Call, placing: Placing) -> Run:
    """A rank without queries has results without elements, and nothing to add to the gradients of keys and values."""
    inputs = [placing.input_shape(at) for at, spec in enumerate(placing.inputs) if spec is not None]
    if all(0 not in shape for shape in inputs[:3]):
        return call.op
    return zeros(call, placing)


NAME = "_scaled_dot_product"

RULES = {
    f"{NAME}_flash_attention_for_cpu": Rule(cpu, local=_local),
    f"{NAME}_flash_attention_for_cpu_backward": Rule(cpu_backward, local=_local),
    f"{NAME}_flash_attention": Rule(flash),
    f"{NAME}_flash_attention_backward": Rule(flash_backward, local=_local),
    f"{NAME}_efficient_attention": Rule(biased, local=_local),
    f"{NAME}_efficient_attention_backward": Rule(efficient_backward, local=_local),
    f"{NAME}_cudnn_attention": Rule(cudnn),
    f"{NAME}_cudnn_attention_backward": Rule(cudnn_backward, local=_local),
}
