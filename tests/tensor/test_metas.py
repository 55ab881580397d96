"""The quick laws of output shapes say what torch's own meta kernels say."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

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
