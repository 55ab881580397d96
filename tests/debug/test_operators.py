"""The page about operators is what the rules say, and says what becomes of every operator that is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rules import trials
from shardwise.debug import operators
from shardwise.debug.refused import REFUSED

PAGE = Path(__file__).parents[2] / "docs/operators.md"


@pytest.fixture(scope="module")
def page() -> str:
    return operators.page()


def test_the_page_is_up_to_date(page: str) -> None:
    assert page == PAGE.read_text(), "write it anew: shardwise operators > docs/operators.md"


def test_costs_follow_from_the_equations(page: str) -> None:
    cells = [line.split("|") for line in page.splitlines() if "|" in line]
    rows = {row[1].partition(",")[0].strip(): row[-2].strip() for row in cells}
    assert rows["`mm`"] == "`m`, `n` free; `k` free, and leaves a pending sum; sums pass"
    assert rows["`_softmax`"] == "`d0`, `d1` free; `d2` gathered"
    assert rows["`amax`"].startswith("`d0`, `d1` free; `d2` free, and leaves a pending max")
    assert rows["`nonzero`"] == "everything is gathered"
    assert "borders" in rows["`convolution`"]


def test_every_refusal_of_the_database_has_its_reason() -> None:
    refused = {name for name, found in trials.listed().items() if "refused" in found}
    assert set(REFUSED) == refused
