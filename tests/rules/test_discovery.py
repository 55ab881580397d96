"""No rule misses a correct way to run its operator, but for those listed in ``missed.txt``: that list only shrinks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from rules import discovery
from shardwise.rules import checker
from shardwise.rules.equation import Strategy
from shardwise.rules.rule import Rule

ROOT = Path(__file__).parents[2]


def test_what_rules_miss_is_listed() -> None:
    # In a process of its own: kernels are called with parts that do not fit each other.
    command = [sys.executable, discovery.__file__]
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found, listed = set(done.stdout.splitlines()), set(discovery.LISTED.read_text().splitlines())
    assert not found - listed, "rules miss more than before; let them offer these ways"
    assert not listed - found, "rules miss less than before: python tests/rules/discovery.py > tests/rules/missed.txt"


def test_a_way_that_is_not_offered_is_found() -> None:
    made = [
        checker.trial(
            torch.ops.aten.mm.default, (torch.randn(4, 6), torch.randn(6, 8)), {}, Rule("f(m [k], [k] n) -> m n")
        )
        for _ in range(2)
    ]
    offered = {way.inputs for way in discovery._offered(made[0])}
    found = {str(Strategy(way, roles)) for way in discovery._ways(made[0]) if (roles := discovery._results(made, way))}
    missed = {line for line in found if not any(line.startswith(f"{way[0]} {way[1]} ->") for way in offered)}
    assert missed == {"S(1) S(0) -> P(sum)", "P(sum) R -> P(sum)", "R P(sum) -> P(sum)"}
