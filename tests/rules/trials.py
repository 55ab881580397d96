"""Trials of torch's operator database: tensors lie at random on the ranks of a mesh, and the answer is the dense one.

Run as a script it writes what `test_coverage` holds: ``python tests/rules/trials.py > tests/rules/coverage.txt``.
"""

from __future__ import annotations

import random
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import prod
from pathlib import Path

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardwiseError,
    distribute_tensor,
    init_device_mesh,
    sim,
)

LINE = (3,)  # the mesh of what is listed
LISTED = Path(__file__).with_name("coverage.txt")
WORST = ["none", "right", "refused", "crashed", "wrong"]
# What is drawn, and what is unique only up to signs, is compared by shape alone.
FREE = re.compile(
    r"dropout|rand|bernoulli|multinomial|normal|empty|uniform|exponential|cauchy|geometric|svd|eig|qr|pca"
)

Call = Callable[[], list[torch.Tensor]]


def operators() -> list[OpInfo]:
    return [info for info in op_db if torch.float32 in info.supported_dtypes("cpu")]


def verdicts(info: OpInfo) -> tuple[str, str]:
    """What becomes of the first sample of an operator, forward and with gradients, and of its gradients' own sample."""
    forward, backward = (tried(info, grad)[0] for grad in (False, True))
    return forward, backward


def tried(info: OpInfo, grad: bool, shape: tuple[int, ...] = LINE) -> tuple[str, str]:
    """What becomes of a sample on a mesh of ``shape``, on the rank where it goes worst, and why."""
    return worst(sim.run(ranks_verdict, prod(shape), info, grad, shape))


def worst(found: Sequence[tuple[str, str]]) -> tuple[str, str]:
    return max(found, key=lambda verdict: WORST.index(verdict[0]))


def ranks_verdict(info: OpInfo, grad: bool, shape: tuple[int, ...]) -> tuple[str, str]:
    """``none`` if the operator itself does not run, else how it went, and why."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        sample = first_sample(info, grad)
        if sample is None:
            return "none", "no sample"
        mesh, draw = init_device_mesh("cpu", shape), random.Random(zlib.crc32(info.full_name.encode()))
        dense = tree_map_only(torch.Tensor, lambda x: copied(x, grad), sample)
        try:
            expected = results(info, dense, grad)
        except Exception as error:
            return "none", str(error)
        try:
            given = tree_map_only(torch.Tensor, lambda x: laid(x, mesh, draw, grad), sample)
            found = results(info, given, grad)
        except ShardwiseError as error:
            return "refused", str(error).replace("\n", " ")
        except Exception as error:
            return "crashed", f"{type(error).__name__}: {error}"
        return compared(found, expected, bool(FREE.search(info.full_name)))


def first_sample(info: OpInfo, grad: bool) -> tuple[tuple, dict] | None:
    try:
        samples = info.sample_inputs_func(info, "cpu", torch.float32, requires_grad=grad)
        found = list(islice((one for one in samples if isinstance(one.input, (torch.Tensor, list, tuple))), 2))
    except Exception:
        return None
    return ((found[-1].input, *found[-1].args), dict(found[-1].kwargs)) if found else None


def copied(x: torch.Tensor, grad: bool) -> torch.Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad and grad)


def laid(x: torch.Tensor, mesh: DeviceMesh, draw: random.Random, grad: bool) -> DTensor:
    """``x`` lying at random: cut along a dim more often than whole, now and then a pending sum, on each axis."""
    drawn = [drawn_placement(x, draw) for _ in range(mesh.ndim)]
    whole = [Replicate() if place.is_partial() else place for place in drawn]
    made = distribute_tensor(x.detach().clone(), mesh, whole)
    if whole != drawn:
        part, own = made.to_local(), [mesh.get_local_rank(axis) for axis in range(mesh.ndim)]
        adds = all(index == 0 for index, place in zip(own, drawn, strict=True) if place.is_partial())
        part = part if adds else torch.zeros_like(part)
        made = DTensor.from_local(part, mesh, drawn, shape=x.shape, stride=x.stride())
    return made.detach().requires_grad_() if x.requires_grad and grad else made


def drawn_placement(x: torch.Tensor, draw: random.Random) -> Placement:
    if x.is_floating_point() and draw.random() < 0.15:
        return Partial()
    return draw.choice([Replicate(), *(Shard(dim) for dim in range(x.ndim) for _ in range(2))])


def results(info: OpInfo, given: tuple[tuple, dict], grad: bool) -> list[object]:
    """What the operator returns, and the gradients of all that require one."""
    torch.manual_seed(1)
    args, options = given
    found = tree_leaves(info(*args, **options))
    if grad:
        graded = [x for x in found if isinstance(x, torch.Tensor) and x.requires_grad]
        if graded:
            sum(x.abs().sum() for x in graded).backward()
        found += [x.grad for x in tree_leaves(given) if isinstance(x, torch.Tensor) and x.requires_grad]
    return [x.full_tensor().detach() if isinstance(x, DTensor) else x for x in found]


def compared(found: Sequence[object], expected: Sequence[object], free: bool) -> tuple[str, str]:
    if len(found) != len(expected):
        return "wrong", f"{len(found)} results in place of {len(expected)}"
    for part, wanted in zip(found, expected, strict=True):
        if not isinstance(wanted, torch.Tensor):
            if not isinstance(part, torch.Tensor) and part != wanted and wanted == wanted:
                return "wrong", f"{part} in place of {wanted}"
        elif not isinstance(part, torch.Tensor) or part.shape != wanted.shape or part.dtype != wanted.dtype:
            return "wrong", f"{getattr(part, 'shape', part)} in place of {wanted.shape} {wanted.dtype}"
        elif not free and not torch.allclose(wide(part), wide(wanted), rtol=2e-4, atol=1e-4, equal_nan=True):
            return "wrong", "values"
    return "right", ""


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)


def listed() -> dict[str, tuple[str, str]]:
    """What each operator was found to be: forward, and with gradients."""
    lines = (line.split() for line in LISTED.read_text().splitlines())
    return {name: (forward, backward) for name, forward, backward in lines}


def lines() -> Iterator[str]:
    for info in sorted(operators(), key=lambda info: info.full_name):
        yield " ".join([info.full_name, *verdicts(info)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in lines():
        print(line)
        sys.stdout.flush()
