"""No operator that was right becomes anything else: `coverage.txt` lists what each was found to be."""

from __future__ import annotations

import zlib

import pytest

from rules import trials

CHUNKS = 8
SAMPLED = 12  # one operator in so many is tried on the other meshes


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.filterwarnings("ignore")
def test_what_was_right_stays_right(chunk: int, grad: bool) -> None:
    listed, worse = trials.listed(), []
    for info in sorted(trials.operators(), key=lambda info: info.full_name)[chunk::CHUNKS]:
        was = listed.get(info.full_name, ("none", "none"))[grad]
        verdict, why = trials.tried(info, grad)
        if verdict in ("wrong", "crashed") or (was == "right" and verdict != "right"):
            worse.append(f"{info.full_name}: {verdict} (was {was}) {why[:300]}")
    assert not worse, "\n".join(worse)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_wrong_on_other_meshes(shape: tuple[int, ...]) -> None:
    wrong = []
    for info in trials.operators():
        if zlib.crc32(f"{info.full_name} on {shape}".encode()) % SAMPLED:
            continue
        verdict, why = trials.tried(info, True, shape)
        if verdict in ("wrong", "crashed"):
            wrong.append(f"{info.full_name}: {verdict} {why[:300]}")
    assert not wrong, "\n".join(wrong)


def test_every_operator_is_listed() -> None:
    assert set(trials.listed()) == {info.full_name for info in trials.operators()}
