"""No operator that was right becomes anything else: `coverage.txt` lists what each was found to be."""

from __future__ import annotations

import pytest

from rules import trials
from shardwise import sim

CHUNKS = 8


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.filterwarnings("ignore")
def test_what_was_right_stays_right(chunk: int, grad: bool) -> None:
    listed, worse = trials.listed(), []
    for info in sorted(trials.operators(), key=lambda info: info.full_name)[chunk::CHUNKS]:
        was = listed.get(info.full_name, ("none", "none"))[grad]
        verdict, why = trials.worst(sim.run(trials.ranks_verdict, trials.RANKS, info, grad))
        if verdict in ("wrong", "crashed") or (was == "right" and verdict != "right"):
            worse.append(f"{info.full_name}: {verdict} (was {was}) {why[:300]}")
    assert not worse, "\n".join(worse)


def test_every_operator_is_listed() -> None:
    assert set(trials.listed()) == {info.full_name for info in trials.operators()}
