"""The quick laws of output shapes say what torch's own meta kernels say."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise import Replicate, Shard, distribute_tensor, init_device_mesh, sim
from shardwise.sharding.spec import TensorMeta
from shardwise.tensor.metas import LAWS, ask_torch, output_metas

CHUNKS = 4
NAMES = [
    op.full_name
    for op in op_db
    if torch.float32 in op.supported_dtypes("cpu") and not op.full_name.startswith("jiterator")
]


class Calls(TorchDispatchMode):
    """Every operator that runs, with its arguments as metas."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        metas, named = tree_map_only(torch.Tensor, TensorMeta.of, (args, kwargs or {}))
        lawful = func in LAWS or torch.Tag.pointwise in func.tags
        if lawful and not any(getattr(argument.alias_info, "is_write", False) for argument in func._schema.arguments):
            self.seen.setdefault((func, str(metas), str(named)), (func, metas, named))
        return func(*args, **(kwargs or {}))


def calls_of(name: str):
    op = next(op for op in op_db if op.full_name == name)
    torch.manual_seed(0)
    calls = Calls()
    for sample in list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))[:2]:
        with calls:
            try:
                result = op(sample.input, *sample.args, **sample.kwargs)
                if isinstance(result, torch.Tensor) and result.requires_grad:
                    result.sum().backward()
            except (RuntimeError, ValueError, IndexError, NotImplementedError):
                continue
    return calls.seen.values()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_laws_agree_with_torch(chunk) -> None:
    compared = 0
    for name in NAMES[chunk::CHUNKS]:
        for func, args, kwargs in calls_of(name):
            try:
                expected = ask_torch(func, args, kwargs)
            except (RuntimeError, NotImplementedError, ValueError):
                continue
            assert output_metas(func, args, kwargs) == expected, (name, func, args, kwargs)
            compared += 1
    assert compared > 100


LAST = {"memory_format": torch.channels_last}
KEPT = {
    "convolution": (F.conv2d, [(2, 4, 5, 6), (6, 4, 3, 3)]),
    "grouped convolution": (partial(F.conv2d, groups=2), [(2, 4, 5, 6), (6, 2, 3, 3)]),
    "transposed convolution": (F.conv_transpose2d, [(2, 4, 5, 6), (4, 6, 3, 3)]),
    "roll": (partial(torch.roll, shifts=1, dims=-1), [(2, 4, 5, 6)]),
    "flat roll": (partial(torch.roll, shifts=1), [(2, 4, 5, 6)]),
    "reflection": (partial(F.pad, pad=(1, 1, 1, 1), mode="reflect"), [(2, 4, 5, 6)]),
    "replication": (partial(F.pad, pad=(1, 1, 1, 1), mode="replicate"), [(2, 4, 5, 6)]),
    "pixel shuffle": (partial(F.pixel_shuffle, upscale_factor=2), [(2, 8, 5, 6)]),
    "channel shuffle": (partial(F.channel_shuffle, groups=2), [(2, 8, 5, 6)]),
    "copysign": (torch.copysign, [(2, 4, 5, 6), (4, 1, 6)]),
    "floor division": (torch.floor_divide, [(2, 4, 5, 6), (6,)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KEPT)
def test_results_lie_in_memory_as_kernels_leave_them(name: str, dtype: torch.dtype) -> None:
    function, shapes = KEPT[name]
    whole = [torch.randn(shape, dtype=dtype) for shape in shapes]
    formats = [(lambda x: x), (lambda x: x.contiguous(**LAST) if x.ndim == 4 else x), (lambda x: x.mT.contiguous().mT)]

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for number in range(len(formats) ** len(shapes)):
            ways = [formats[number // len(formats) ** at % len(formats)] for at in range(len(shapes))]
            parts = [way(x) if x.ndim > 1 else x for x, way in zip(whole, ways, strict=True)]
            placements = [[Shard(0)], *[[Replicate()]] * (len(parts) - 1)]
            given = [distribute_tensor(x, mesh, own) for x, own in zip(parts, placements, strict=True)]
            assert [x.stride() for x in given] == [x.stride() for x in parts]
            assert function(*given).stride() == function(*parts).stride(), number

    sim.run(body, 2)


@pytest.mark.parametrize("function", [torch.nansum, torch.nanmean])
@pytest.mark.parametrize("keeps", [False, True])
def test_no_dims_are_all_dims(function, keeps: bool) -> None:
    whole = torch.arange(6.0).view(2, 3)
    whole[1, 1] = torch.nan
    dense = [function(item, [], keepdim=keeps) for item in (whole, whole.T)]

    def body() -> None:
        x = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(1)])
        for item, want in zip((x, x.T), dense, strict=True):
            for none in ([], ()):
                found = function(item, none, keepdim=keeps)
                assert found.shape == want.shape
                torch.testing.assert_close(found.full_tensor(), want)

    sim.run(body, 2)


@pytest.mark.parametrize("op", [torch.ops.aten.threshold_backward.default, torch.ops.aten.add.Tensor])
def test_one_element_spread_over_all_has_no_order(op) -> None:
    x = torch.randn(3, 4)
    for spread in (torch.ones(()).expand(3, 4), torch.ones(1, 1).expand(3, 4), torch.ones(1, 4).expand(3, 4)):
        for args in ((spread, x, 1), (x, spread, 1), (spread, x[:1], 1)):
            given = args if op is torch.ops.aten.threshold_backward.default else args[:2]
            metas = tree_map_only(torch.Tensor, TensorMeta.of, given)
            assert output_metas(op, metas, {}) == (TensorMeta.of(op(*given)),), (given, op)
