"""Correct ways to run an operator on one axis that its rule does not offer.

Every operand of a call is whole, cut along a dim, or a pending sum; the operator runs on the parts of two ranks and of
three. A way is found where some placement of the results gives the whole answer, for all data that was tried. Run as a
script it writes what `test_discovery` holds: ``python tests/rules/discovery.py > tests/rules/missed.txt``.
"""

from __future__ import annotations

import math
import random
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path

import numpy
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from rules.test_brute_force import Recording, signature
from shardwise.debug.example import by_kind
from shardwise.errors import ShardwiseError
from shardwise.rules import checker
from shardwise.rules.checker import Trial
from shardwise.rules.equation import Strategy
from shardwise.rules.rule import choices
from shardwise.rules.table import is_variant
from shardwise.sharding.placement import Partial, Placement, Replicate, Shard
from shardwise.sharding.spec import TensorMeta
from shardwise.tensor.metas import output_metas

LISTED = Path(__file__).with_name("missed.txt")
SAMPLES = 6  # of an operator
CALLS = 2  # with different arguments, of an aten operator
SEEDS = (0, 1, 2)
WAYS = 80  # to lay out the operands of a call, drawn where there are more

Way = tuple[Placement | None, ...]


def missed(infos: Sequence[OpInfo]) -> Iterator[str]:
    """A line for each way that is right and not offered, in the calls that these operators make."""
    for made in _calls(infos):
        offered = {strategy.inputs for strategy in _offered(made[0])}
        _seed(0, str(made[0].op))
        for way in _ways(made[0]) if offered else ():
            if way not in offered:
                results = _results(made, way)
                if results is not None:
                    yield f"{made[0].op}{checker.shown(made[0].call)}: {Strategy(way, results)}"


def _calls(infos: Sequence[OpInfo]) -> Iterator[list[Trial]]:
    """Calls of operators, each with several data."""
    found: dict[object, list[Trial]] = defaultdict(list)
    kinds: Counter[torch._ops.OpOverload] = Counter()
    for seed, info in product(SEEDS, infos):
        _seed(seed, info.name)
        for op, args, kwargs in _recorded(info):
            key = op, signature(args), signature(sorted(kwargs.items()))
            if len(found[key]) != seed or (seed == 0 and kinds[op] >= CALLS):
                continue
            made = None if is_variant(op) or _trusts_positions(op, args) else checker.trial(op, args, kwargs)
            if made is not None and checker._tolerance(made.call) < math.inf and _is_large(made):
                kinds[op] += seed == 0
                found[key].append(made)
    yield from (trials for trials in found.values() if len(trials) == len(SEEDS) and _tells(*trials[:2]))


def _seed(seed: int, name: str) -> None:
    """Let what is drawn for one operator not hang on what is drawn for others."""
    own = seed + zlib.crc32(name.encode())
    torch.manual_seed(own)
    numpy.random.seed(own)
    random.seed(own)


def _is_large(made: Trial) -> bool:
    """Whether an answer can hardly be right by chance."""
    counts = [math.prod(meta.shape) for meta in made.call.operands if meta is not None]
    return bool(made.results) and 0 not in counts and max(counts, default=0) > 3


def _tells(one: Trial, other: Trial) -> bool:
    """Whether other data have another answer."""
    pairs = zip(one.results, other.results, strict=True)
    alike = (
        mine is None
        or its is None
        or mine.shape != its.shape
        or checker._differs(mine, its, "reduced", checker._tolerance(one.call)) is None
        for mine, its in pairs
    )
    return not all(alike)


def _trusts_positions(op: torch._ops.OpOverload, args: Sequence[object]) -> bool:
    """Whether a kernel writes where another operator has told it to, without a look at how far that is."""
    told = (isinstance(item, torch.Tensor) and not item.dtype.is_floating_point for item in args)
    return "backward" in op._schema.name and any(told)


def _recorded(info: OpInfo) -> Iterator[tuple]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in islice(info.sample_inputs_func(info, "cpu", torch.float64, requires_grad=False), SAMPLES):
            with Recording() as recording:
                try:
                    info(sample.input, *sample.args, **sample.kwargs)
                except Exception:  # of a sample, not of ours
                    continue
            yield from recording.calls


def _offered(made: Trial) -> Iterator[Strategy]:
    """What the rule claims: nothing, if it only writes the operator in terms of others."""
    for parts in (2, 3):
        try:
            yield from (strategy for strategy, _ in checker._claims(made, parts))
            yield from (way for label, way in choices(made.rule, made.call).listed.items() if "exchange" in label)
        except ShardwiseError:
            return


def _ways(made: Trial) -> list[Way]:
    """Ways to lay out the operands, without the one in which all are whole."""
    pends = any(meta is not None and meta.dtype.is_floating_point for meta in made.call.outputs)
    roles = [_roles(meta, place in made.call.fixed, pends) for place, meta in enumerate(made.call.operands)]
    if math.prod(map(len, roles)) <= WAYS:
        ways = list(product(*roles))
    else:
        ways = list(dict.fromkeys(tuple(map(random.choice, roles)) for _ in range(WAYS)))
    return [way for way in ways if any(not isinstance(role, (Replicate, type(None))) for role in way)]


def _roles(meta, fixed: bool = False, pends: bool = True) -> list[Placement | None]:
    if meta is None or fixed:
        return [None if meta is None else Replicate()]
    cuts = [Shard(dim) for dim, size in enumerate(meta.shape) if size > 1]
    return [Replicate(), *cuts, *([Partial()] if pends and meta.dtype.is_floating_point else [])]


def _results(trials: Sequence[Trial], way: Way) -> Way | None:
    """The placements of the results for which the way is right, if there are any."""
    outputs = [None if meta is None else _roles(meta) for meta in trials[0].call.outputs]
    left = [[None] if roles is None else roles for roles in outputs]
    for made in trials:
        for parts in (2, 3):
            if any(_is_short(meta, role, parts) for meta, role in zip(made.call.operands, way, strict=True)):
                continue
            left = _right(made, way, left, parts)
            if not all(left):
                return None
    return tuple(roles[0] for roles in left)


def _is_short(meta, role: Placement | None, parts: int) -> bool:
    return isinstance(role, Shard) and meta.shape[role.dim] < parts


def _right(made: Trial, way: Way, left: list[list[Placement | None]], parts: int) -> list[list[Placement | None]]:
    shares = [
        checker._shares(item, role, parts) for item, role in zip(checker.operands(made.args, made.op), way, strict=True)
    ]
    found = []
    for index in range(parts):
        items = [share[index] for share in shares if share is not None]
        try:
            output_metas(made.op, *by_kind(made.op, checker._with(made.args, list(map(_meta, items)), made.op)))
            run = checker.called(made.op)
            found.append(list(checker.flatten(run(*checker._with(made.args, items, made.op)))))
        except Exception:
            return [[]]
    if any(len(results) != len(made.results) for results in found):
        return [[]]
    return [
        [role for role in roles if _holds(made, place, role, [results[place] for results in found])]
        for place, roles in enumerate(left)
    ]


def _meta(item: object) -> object:
    return TensorMeta.of(item) if isinstance(item, torch.Tensor) else item


def _holds(made: Trial, place: int, role: Placement | None, parts: list) -> bool:
    whole = made.results[place]
    if whole is None or role is None or any(part is None for part in parts):
        return whole is None
    return checker._judge_one(whole, role, parts, checker._tolerance(made.call)) is None


def lines() -> list[str]:
    infos = sorted(op_db, key=lambda info: (info.name, info.variant_test_name))
    return sorted(set(missed([info for info in infos if torch.float64 in info.dtypes])))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("\n".join(lines()))
