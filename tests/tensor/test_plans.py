"""Plans never lie: one call after the other with other arguments against a warm cache, each held against plain torch.

An operator is called again and again with other static arguments, optional tensors there or not, other dtypes, memory
formats, sizes and placements, numbers in place of tensors, in random order. What a plan was made for must never be
taken for something else: values, dtype, shape and strides are those of one rank.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise import DTensor, Partial, Replicate, Shard, ShardwiseError, distribute_tensor, init_device_mesh, sim

SIZES = (1, 1, 2, 3, 4, 4, 5, 6, 0)
FLOATS = (torch.float32, torch.float32, torch.float64)
DTYPES = (*FLOATS, torch.int64, torch.bool, torch.bfloat16, torch.complex64)


class Draw(random.Random):
    """What arguments are drawn from: the same on every rank."""

    def sizes(self, ndim: int | None = None) -> list[int]:
        return [self.choice(SIZES) for _ in range(self.randrange(5) if ndim is None else ndim)]

    def tensor(self, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self.choice(FLOATS)
        generator = torch.Generator().manual_seed(self.randrange(2**31))
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)
        return torch.randint(0, 2 if dtype is torch.bool else 9, sizes, generator=generator).to(dtype)

    def any(self, ndim: int | None = None) -> torch.Tensor:
        return self.tensor(*self.sizes(ndim), dtype=self.choice(DTYPES))

    def real(self, ndim: int | None = None) -> torch.Tensor:
        return self.tensor(*self.sizes(ndim))

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """What broadcasts with ``x``."""
        sizes = [self.choice((size, size, 1)) for size in x.shape[self.choice((0, 0, 0, 1)) :]]
        return self.tensor(*sizes, dtype=self.choice((x.dtype, x.dtype, *DTYPES)))

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        return self.tensor(*self.like(x).shape, dtype=torch.bool)

    def number(self) -> object:
        return self.choice((2, 0, 1, 1.0, -1, 0.5, 2.5, True, float("inf"), torch.tensor(2), torch.tensor(2.0)))

    def operand(self, x: torch.Tensor) -> object:
        return self.choice((self.like, self.like, lambda _: self.number()))(x)

    def maybe(self, item: object) -> object:
        return self.choice((None, item))

    def dim(self, x: torch.Tensor) -> int:
        return self.randrange(-x.ndim, x.ndim) if x.ndim else self.choice((0, -1))

    def dims(self, x: torch.Tensor) -> list[int]:
        return self.sample(range(x.ndim), self.randint(0, x.ndim))

    def flag(self) -> bool:
        return self.choice((True, False))

    def index(self, size: int, *sizes: int) -> torch.Tensor:
        return self.tensor(*sizes, dtype=torch.int64) % max(size, 1)


def one(function: Callable, *options: Callable) -> Callable:
    """A call on one tensor of any kind, with options each drawn by a function of the draw and the tensor."""

    def made(d: Draw) -> tuple:
        x = d.any()
        return function, [x, *(option(d, x) for option in options)]

    return made


def real(function: Callable, *options: Callable, ndim: int | None = None) -> Callable:
    def made(d: Draw) -> tuple:
        x = d.real(ndim)
        return function, [x, *(option(d, x) for option in options)]

    return made


def pick(*items: object) -> Callable:
    return lambda d, _: d.choice(items)


DIM, DIMS, FLAG, OPERAND, NUMBER = Draw.dim, Draw.dims, lambda d, _: d.flag(), Draw.operand, lambda d, _: d.number()
LIKE = Draw.like
FORMAT = pick(torch.contiguous_format, torch.preserve_format)


def conv2d(d: Draw) -> tuple:
    groups, size = d.choice((1, 1, 2)), d.choice((1, 3))
    x, weight = d.tensor(d.choice((1, 3, 4)), 4, 5, 6, dtype=torch.float32), (6, 4 // groups, size, size)
    bias = d.maybe(d.tensor(6, dtype=torch.float32))
    options = d.choice((1, 2)), d.choice((0, 1)), d.choice((1, 1, 2)), groups
    return F.conv2d, [x, d.tensor(*weight, dtype=torch.float32), bias, *options]


def attention(d: Draw) -> tuple:
    shape = [d.choice((1, 2, 3)), d.choice((2, 4)), d.choice((3, 5)), 4]
    q, k, v = (d.tensor(*shape, dtype=torch.float32) for _ in range(3))
    mask = d.choice((None, d.tensor(shape[2], shape[2], dtype=torch.float32)))
    return F.scaled_dot_product_attention, [q, k, v, mask, 0.0, mask is None and d.flag()]


def layer_norm(d: Draw) -> tuple:
    x = d.tensor(d.choice((1, 3, 4)), d.choice((2, 5)), 4, dtype=torch.float32)
    shape = d.choice(([4], list(x.shape[1:])))
    weight, bias = d.maybe(d.tensor(*shape, dtype=torch.float32)), d.maybe(d.tensor(*shape, dtype=torch.float32))
    return F.layer_norm, [x, shape, weight, bias, d.choice((1e-5, 0.1))]


def cross_entropy(d: Draw) -> tuple:
    rest = d.sizes(d.choice((0, 1)))
    x = d.tensor(4, 5, *rest, dtype=torch.float32)
    weight, ignored = d.maybe(d.tensor(5, dtype=torch.float32).abs()), d.choice((-100, 1))
    reduction, smoothing = d.choice(("mean", "sum", "none")), d.choice((0.0, 0.0, 0.2))
    return (lambda x, y, w: F.cross_entropy(x, y, w, None, ignored, None, reduction, smoothing)), [
        x,
        d.index(5, 4, *rest),
        weight,
    ]


def products(function: Callable, *shapes: tuple[str, ...]) -> Callable:
    """A product of tensors whose sizes have names."""

    def made(d: Draw) -> tuple:
        size = {name: d.choice((1, 2, 4, 5, 6)) for name in "bmkn"}
        dtype = d.choice((torch.float32, torch.float64, torch.complex64))
        return function, [d.tensor(*(size[name] for name in shape), dtype=dtype) for shape in d.choice(shapes)]

    return made


def scaled(d: Draw) -> tuple:
    _, (x, a, b) = products(torch.addmm, ("mn", "mk", "kn"), ("n", "mk", "kn"))(d)
    beta, alpha = d.choice((1, 0, 2, 0.5)), d.choice((1, 2, -0.5))
    return (lambda x, a, b: torch.addmm(x, a, b, beta=beta, alpha=alpha)), [x, a, b]


def joined(d: Draw) -> tuple:
    x = d.any(d.choice((1, 2, 3)))
    dim, dtype = d.dim(x), d.choice((x.dtype, torch.float64))
    others = [d.tensor(*(d.choice(SIZES) if at == dim % x.ndim else n for at, n in enumerate(x.shape)), dtype=dtype)]
    return (lambda *items: torch.cat(items, dim)), [x, *others * d.choice((1, 2))]


def gathered(d: Draw) -> tuple:
    x = d.real(d.choice((1, 2, 3)))
    dim = d.dim(x)
    sizes = [d.choice((1, 3)) if at == dim % x.ndim else size for at, size in enumerate(x.shape)]
    return torch.gather, [x, dim, d.index(x.shape[dim], *(sizes if x.shape[dim] else [0] * x.ndim))]


def selected(d: Draw) -> tuple:
    x = d.any(d.choice((2, 3)))
    rows, columns = (d.index(size, 3 if 0 not in x.shape else 0) for size in x.shape[:2])
    return d.choice(
        (
            (lambda x, i: x[i], [x, rows]),
            (lambda x, i: x[:, i], [x, columns]),
            (lambda x, i, j: x[i, j], [x, rows, columns]),
            (lambda x: x[..., None, ::2], [x]),
            (lambda x: x[-1:], [x]),
        )
    )


def embedded(d: Draw) -> tuple:
    weight = d.tensor(7, d.choice((1, 4)), dtype=torch.float32)
    return F.embedding, [d.index(7, *d.sizes(d.choice((1, 2)))), weight, d.choice((None, 0, 3))]


def reshaped(d: Draw) -> tuple:
    a, b, c = d.choice((1, 2, 4)), d.choice((2, 3, 6)), d.choice((1, 4))
    shape = d.choice(([a * b, c], [a, b * c], [a, b, c], [-1], [c, b, a]))
    return torch.reshape, [d.tensor(a, b, c), shape]


def chosen(d: Draw) -> tuple:
    x = d.any()
    return torch.where, [d.mask(x), d.operand(x), x]


def group_norm(d: Draw) -> tuple:
    x = d.tensor(d.choice((1, 3, 4)), 4, *d.sizes(d.choice((1, 2))), dtype=torch.float32)
    weight, bias = d.maybe(d.tensor(4, dtype=torch.float32)), d.maybe(d.tensor(4, dtype=torch.float32))
    return F.group_norm, [x, d.choice((1, 2, 4)), weight, bias]


def batch_norm(d: Draw) -> tuple:
    x = d.tensor(d.choice((3, 4)), 4, 2, 3, dtype=torch.float32)
    weight, bias = d.maybe(d.tensor(4, dtype=torch.float32)), d.maybe(d.tensor(4, dtype=torch.float32))
    mean, var = d.tensor(4, dtype=torch.float32), d.tensor(4, dtype=torch.float32).abs() + 1
    return F.batch_norm, [x, mean, var, weight, bias, d.flag(), d.choice((0.1, 0.5))]


def scattered(d: Draw) -> tuple:
    x = d.tensor(4, d.choice((1, 3)), dtype=torch.float32)
    index = d.index(4, d.choice((2, 4)), x.shape[1])
    source, reduce = d.tensor(*index.shape, dtype=torch.float32), d.choice(("sum", "amax", "prod"))
    return d.choice(
        (
            (lambda x, i, s: x.scatter_add(0, i, s), [x, index, source]),
            (lambda x, i, s: x.scatter_reduce(0, i, s, reduce), [x, index, source]),
            (lambda x, i, v: x.index_fill(0, i, v), [x, index[:, 0], d.choice((0, 2.0))]),
        )
    )


def resized(d: Draw) -> tuple:
    mode = d.choice(("nearest", "bilinear", "bicubic"))
    corners = None if mode == "nearest" else d.flag()
    return (lambda x, scale: F.interpolate(x, scale_factor=scale, mode=mode, align_corners=corners)), [
        d.tensor(d.choice((1, 3)), 2, 4, 5),
        d.choice((2, 0.5)),
    ]


def pooled(function: Callable) -> Callable:
    return lambda d: (
        function,
        [d.tensor(d.choice((1, 3)), 4, 6, 5), d.choice((2, 3)), d.choice((None, 1, 2)), d.choice((0, 1))],
    )


CALLS: dict[str, Callable[[Draw], tuple]] = {
    "relu": real(torch.relu),
    "neg": one(torch.neg),
    "abs": one(torch.abs),
    "exp": one(torch.exp),
    "sigmoid": one(torch.sigmoid),
    "gelu": real(lambda x, how: F.gelu(x, approximate=how), pick("none", "tanh")),
    "leaky_relu": real(F.leaky_relu, pick(0.01, 0.5, 0, -1.0)),
    "softplus": real(F.softplus, pick(1, 2.0, -1), pick(20, 0.5)),
    "add": one(lambda x, y, alpha: torch.add(x, y, alpha=alpha), OPERAND, pick(1, 1, 2, -1)),
    "sub": one(torch.sub, OPERAND),
    "rsub": one(torch.rsub, OPERAND),
    "mul": one(torch.mul, OPERAND),
    "div": one(lambda x, y, how: torch.div(x, y, rounding_mode=how), OPERAND, pick(None, None, "floor", "trunc")),
    "pow": one(torch.pow, NUMBER),
    "remainder": real(torch.remainder, OPERAND),
    "maximum": real(torch.maximum, LIKE),
    "lt": one(torch.lt, OPERAND),
    "eq": one(torch.eq, OPERAND),
    "clamp": real(torch.clamp, pick(None, -1, 0.0), pick(0, 1.5)),
    "clamp by tensors": real(torch.clamp, LIKE, LIKE),
    "lerp": real(lambda x, y, w: torch.lerp(x, y.to(x.dtype), w), LIKE, pick(0, 0.5, 1.0)),
    "where": chosen,
    "masked_fill": one(lambda x, m, v: x.masked_fill(m, v), Draw.mask, pick(0, 1, True, torch.tensor(1))),
    "to": one(lambda x, dtype, copy: x.to(dtype, copy=copy), pick(*DTYPES), FLAG),
    "clone": one(lambda x, form: x.clone(memory_format=form), FORMAT),
    "zeros_like": one(
        lambda x, dtype, form: torch.zeros_like(x, dtype=dtype, memory_format=form), pick(None, *DTYPES), FORMAT
    ),
    "full_like": one(torch.full_like, pick(0, 2, True, 0.5)),
    "new_ones": one(lambda x, size: x.new_ones(size), lambda d, x: d.choice((list(x.shape), [3], [4, 5]))),
    "sum": one(lambda x, dim, keep, dtype: x.sum(dim, keep, dtype=dtype), DIMS, FLAG, pick(None, None, torch.float64)),
    "sum of all": one(torch.sum),
    "mean": real(torch.mean, DIMS, FLAG),
    "prod": one(torch.prod, DIM, FLAG),
    "amax": real(torch.amax, DIMS, FLAG),
    "var": real(lambda x, dim, c, keep: torch.var(x, dim, correction=c, keepdim=keep), DIMS, pick(0, 1, 2), FLAG),
    "norm": real(torch.linalg.vector_norm, pick(2, 1, 0, float("inf"), 3), DIMS, FLAG),
    "argmax": real(torch.argmax, pick(None, 0, -1), FLAG),
    "max": real(torch.max, DIM, FLAG),
    "any": one(torch.any, DIM, FLAG),
    "logsumexp": real(torch.logsumexp, DIM, FLAG),
    "cumsum": one(lambda x, dim, dtype: torch.cumsum(x, dim, dtype=dtype), DIM, pick(None, torch.float64)),
    "cummax": real(torch.cummax, DIM),
    "transpose": one(torch.transpose, DIM, DIM),
    "permute": one(torch.permute, lambda d, x: d.sample(range(x.ndim), x.ndim)),
    "reshape": reshaped,
    "unsqueeze": one(torch.unsqueeze, pick(0, -1)),
    "squeeze": one(torch.squeeze, DIMS),
    "expand": one(lambda x, n: x.expand(n, *x.shape), pick(1, 2, 3)),
    "narrow": one(lambda x, dim: x.narrow(dim, x.shape[dim] // 2, x.shape[dim] - x.shape[dim] // 2), DIM),
    "select": one(torch.select, DIM, pick(0, -1)),
    "flip": one(torch.flip, DIMS),
    "roll": one(torch.roll, pick(1, -2, 0), DIM),
    "repeat": one(lambda x, n: x.repeat(n, *[1] * x.ndim), pick(1, 2)),
    "tril": real(torch.tril, pick(0, 1, -1), ndim=2),
    "pad": real(lambda x, pad, value: F.pad(x, pad, value=value), pick((1, 0), (0, 2), (-1, 1)), pick(0, 2.0), ndim=2),
    "cat": joined,
    "stack": one(lambda x, dim: torch.stack([x, x], dim), pick(0, -1)),
    "split": one(torch.split, pick(1, 2, 4), DIM),
    "chunk": one(torch.chunk, pick(1, 2, 3), DIM),
    "index": selected,
    "gather": gathered,
    "embedding": embedded,
    "topk": real(lambda x, dim, big: torch.topk(x, min(2, x.shape[dim]) if x.ndim else 1, dim, big), DIM, FLAG),
    "sort": real(torch.sort, DIM, FLAG),
    "mm": products(torch.mm, ("mk", "kn")),
    "matmul": products(torch.matmul, ("mk", "kn"), ("bmk", "kn"), ("bmk", "bkn"), ("k", "kn"), ("mk", "k"), ("k", "k")),
    "einsum": products(lambda a, b: torch.einsum("bmk,bnk->bmn", a, b), ("bmk", "bnk")),
    "linear": products(F.linear, ("mk", "nk"), ("mk", "nk", "n"), ("bmk", "nk", "n")),
    "addmm": scaled,
    "softmax": one(lambda x, dim, dtype: torch.softmax(x, dim, dtype), DIM, pick(None, torch.float64)),
    "layer_norm": layer_norm,
    "conv2d": conv2d,
    "max_pool2d": pooled(F.max_pool2d),
    "avg_pool2d": pooled(F.avg_pool2d),
    "attention": attention,
    "group_norm": group_norm,
    "batch_norm": batch_norm,
    "scatter": scattered,
    "interpolate": resized,
    "addcmul": real(
        lambda x, y, z, v: torch.addcmul(x, y.to(x.dtype), z.to(x.dtype), value=v), LIKE, LIKE, pick(1, 2, 0.5)
    ),
    "round": real(lambda x, n: torch.round(x, decimals=n), pick(0, 1, 2)),
    "nan_to_num": real(lambda x, nan: torch.nan_to_num(x / x, nan=nan), pick(None, 0.0, 2.0)),
    "diff": one(torch.diff, pick(1, 2), DIM),
    "normalize": real(F.normalize, pick(2.0, 1.0), DIM),
    "median": real(torch.median, DIM, FLAG),
    "cdist": real(
        lambda x, y, p: torch.cdist(x, y.to(x.dtype), p), lambda d, x: d.tensor(3, x.shape[1]), pick(2.0, 1.0), ndim=2
    ),
    "bitwise_and": one(torch.bitwise_and, LIKE),
    "view as another dtype": real(lambda x, dtype: x.view(dtype), pick(torch.int32, torch.float64, torch.uint8)),
    "cross_entropy": cross_entropy,
    "mse_loss": real(
        lambda x, y, how: F.mse_loss(x, y.to(x.dtype), reduction=how), lambda d, x: x + 1, pick("mean", "sum", "none")
    ),
}
FORMATS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x,
    lambda x: x,
    lambda x: x.transpose(-1, 0).contiguous().transpose(-1, 0) if x.ndim > 1 else x,
    lambda x: x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x,
)


def laid(x: torch.Tensor, mesh, d: Draw) -> DTensor:
    """``x`` with placements drawn at random: cut, whole, or a pending sum."""
    places = [Replicate(), *(Shard(dim) for dim in range(x.ndim) for _ in range(2))]
    if x.dtype in FLOATS:
        places.append(Partial())
    placements = [d.choice(places) for _ in range(mesh.ndim)]
    whole = [Replicate() if isinstance(placement, Partial) else placement for placement in placements]
    local = distribute_tensor(x, mesh, whole).to_local()
    for placement, at in zip(placements, mesh.get_coordinate(), strict=True):
        if isinstance(placement, Partial):
            local = local * (2, -1, 0)[at]  # adds up to one
    return DTensor.from_local(local, mesh, placements, shape=x.shape, stride=x.stride())


def fuzzed(shape: tuple[int, ...], steps: int, seed: int) -> tuple[Counter, list[str]]:
    """How the calls went, and what was wrong."""
    d, mesh, went, wrong = Draw(seed), init_device_mesh("cpu", shape), Counter(), []
    for _ in range(steps):
        name = d.choice(list(CALLS))
        function, args = CALLS[name](d)
        formats = [d.choice(FORMATS) for _ in args]
        verdict = tried(function, args, formats, mesh, d)
        went[verdict.partition(" ")[0], name] += 1
        if verdict.partition(" ")[0] not in ("right", "refused", "invalid"):
            wrong.append(f"{name}({', '.join(map(text, args))}): {verdict}")
    return went, wrong


def text(item: object) -> str:
    return f"{item.dtype}{list(item.shape)}" if isinstance(item, torch.Tensor) and item.ndim else repr(item)


def tried(function: Callable, args: list, formats: list[Callable], mesh, d: Draw) -> str:
    plain = [form(x) if isinstance(x, torch.Tensor) else x for x, form in zip(args, formats, strict=True)]
    given = [
        form(laid(x, mesh, d)) if isinstance(x, torch.Tensor) and (x.ndim or d.flag()) else x
        for x, form in zip(args, formats, strict=True)
    ]
    lying = [str(x._spec) for x in given if isinstance(x, DTensor)]
    if not lying:
        return "invalid"
    try:
        expected = function(*plain)
    except Exception:  # torch's own refusal: not every kernel refuses a part without elements
        return "invalid"
    try:
        found = function(*given)
        whole = tree_map_only(DTensor, lambda x: x.full_tensor(), found)
    except ShardwiseError as error:
        return f"refused {lying} {error}"
    except Exception as error:
        return f"crashed {lying} {type(error).__name__}: {error}"
    return compared(tree_leaves(found), tree_leaves(whole), tree_leaves(expected), lying)


def steps(x: torch.Tensor) -> list[int]:
    """The strides of dims along which there is a step."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def compared(found: list, whole: list, expected: list, lying: list[str]) -> str:
    for mine, full, wanted in zip(found, whole, expected, strict=True):
        if (mine.shape, mine.dtype) != (wanted.shape, wanted.dtype):
            return f"shape or dtype {lying}: {mine.dtype}{list(mine.shape)} for {wanted.dtype}{list(wanted.shape)}"
        if wanted.numel() and steps(mine) != steps(wanted):  # what has no elements lies nowhere
            return f"stride {lying}: {mine.stride()} for {wanted.stride()} of {list(mine.shape)}"
        close = 2e-2 if torch.bfloat16 in (wanted.dtype,) else 1e-4
        if not torch.allclose(full.to(torch.complex128), wanted.to(torch.complex128), close, close, equal_nan=True):
            return f"values {lying}: {full.flatten()[:4].tolist()} for {wanted.flatten()[:4].tolist()}"
    return "right"


@pytest.mark.parametrize(("shape", "steps"), [((3,), 900), ((2, 2), 300)])
def test_plans_never_lie(shape: tuple[int, ...], steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        went, wrong = sim.run(fuzzed, math.prod(shape), shape, steps, 0)[0]
    assert not wrong, "\n".join([f"{len(wrong)} of {steps}", *wrong[:20]])
    counts = Counter(verdict for verdict, _ in went.elements())
    assert counts["right"] > 0.95 * (steps - counts["invalid"]), counts
    assert len({name for verdict, name in went if verdict == "right"}) > 0.9 * len(CALLS)
