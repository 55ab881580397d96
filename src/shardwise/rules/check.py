"""`check_rule`: the judge of rules, for rules of users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardwise.errors import ArgumentError, RuleError, WrongRuleError, message
from shardwise.rules import checker
from shardwise.rules.rule import resolve
from shardwise.rules.table import lookup

Op = torch._ops.OpOverload
Packet = torch._ops.OpOverloadPacket

SHOWN = 3  # how many of the wrong strategies a message lists
MOST = 17  # ranks, however long the dims of a sample are


def check_rule(op: str | Op | Packet, *samples: Sequence[object], seed: int = 0) -> int:
    """Try every strategy that the rule of ``op`` claims for the samples; return how many were tried.

    ``op`` is an operator, or its name as in `register_rule`. Each sample is a tuple of its arguments, with plain
    tensors, and with a dict of the keyword arguments at the end if there are any. The operands are cut, or split into
    parts that reduce to them, as the strategy says: for 2 ranks, for 3, and for so many that some have nothing. The
    operator runs on the parts, and what comes out is held against what one rank computes. Choose samples with dims of 4
    or more, so that shards are even and uneven, and one for each kind of arguments on which the rule depends. What is
    drawn to split pending operands follows from ``seed``.

    Raises `WrongRuleError` for a strategy that gives another answer, with the shapes and the first output that differs;
    `RuleError` if there is no rule, or it refuses a sample; and what the operator itself raises.

    >>> import torch, shardwise
    >>> from shardwise.testing import check_rule
    >>> check_rule("aten::mm", (torch.randn(4, 6), torch.randn(6, 5)))
    55
    >>> shardwise.register_rule("mean.dim", "d0 d1 -> d0")
    >>> check_rule("mean.dim", (torch.ones(4, 6), [1]))
    Traceback (most recent call last):
    ...
    shardwise.WrongRuleError: aten.mean.dim: the rule claims what gives another answer
      asked  mean.dim(f32[4, 6], [1], False, None) on 2 ranks by S(1) -> P(sum)
      got    reduced: [2.0, 2.0, 2.0, 2.0] in place of [1.0, 1.0, 1.0, 1.0]
    ...
    >>> shardwise.unregister_rule("mean.dim")
    """
    overload = _overload(op)
    if lookup(overload) is None:
        raise RuleError(message(f"{overload} has no rule to check", do="shardwise.register_rule(...) for it first"))
    tried = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for sample in samples:
            tried += _check(overload, sample)
    return tried


def _overload(op: str | Op | Packet) -> Op:
    if isinstance(op, torch._ops.OpOverload):
        return op
    space, _, rest = (op if isinstance(op, str) else str(op._qualified_op_name)).rpartition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, space or "aten"), name, None)
    if packet is None:
        raise ArgumentError(message(f"there is no operator {op}", do="torch.library.custom_op or define it first"))
    overloads = packet.overloads()
    wanted = overload or ("default" if "default" in overloads or len(overloads) > 1 else overloads[0])
    if wanted not in overloads:
        raise ArgumentError(
            message(
                f"the operator {op} has several forms", got=", ".join(overloads), do=f"say which: {op}.{overloads[0]}"
            )
        )
    found: Op = getattr(packet, wanted)
    return found


def _check(op: Op, sample: Sequence[object]) -> int:
    if not isinstance(sample, (tuple, list)):
        raise ArgumentError(message("a sample is a tuple of the operator's arguments", got=type(sample).__name__))
    last = sample[-1] if sample else None
    args, named = (sample[:-1], last) if isinstance(last, Mapping) else (sample, {})
    made = checker.trial(op, args, named)
    if made is None:
        op(*args, **named)  # raises what is wrong with the sample
        raise RuleError(message(f"{op} cannot be checked on this sample", asked=f"{args} {named}"))
    resolve(made.rule, made.call)
    wrong, tried = [], 0
    expanded = checker.check_expanded(made)
    if expanded:
        wrong.append((f"{checker.shown(made.call)} in terms of other operators", expanded))
    for parts in _ranks(made):
        for strategy in checker.tried(made, parts):
            tried += 1
            found = checker.check_trial(made, strategy, parts)
            if found:
                wrong.append((f"{checker.shown(made.call)} on {parts} ranks by {strategy}", found))
    if wrong:
        raise _wrong(op, wrong)
    return tried


def _ranks(made: checker.Trial) -> list[int]:
    """Two, three, and one more than each dim has entries."""
    sizes = {size + 1 for meta in made.call.operands if meta is not None for size in meta.shape}
    return sorted({2, 3} | {size for size in sizes if 1 < size <= MOST})


def _wrong(op: Op, wrong: list[tuple[str, str]]) -> WrongRuleError:
    name = op._schema.name.removeprefix("aten::")
    overload = f".{op._schema.overload_name}" if op._schema.overload_name else ""
    asked, got = wrong[0]
    more = [f"also {call}: {found}" for call, found in wrong[1 : SHOWN + 1]]
    left = len(wrong) - 1 - len(more)
    return WrongRuleError(
        message(
            f"{op}: the rule claims what gives another answer",
            asked=f"{name}{overload}{asked}",
            got="\n".join([got, *more, *([f"and {left} more"] if left > 0 else [])]),
            do="write [d] for a dim d that the operator needs whole, or a function that lists what is right",
        )
    )
