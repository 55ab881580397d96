"""The GPT of the examples: the same losses and parameters alone, simulated and on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from gloo import free_port, run_gloo
from gpt import Config, batches
from shardwise import init_device_mesh, sim
from train_gpt import main, train_alone, train_on_mesh

STEPS = 5
CONFIG = Config(layers=2, width=32, heads=4, context=16)
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
TEXT = b"the quick brown fox jumps over the lazy dog, and the lazy dog sleeps on. " * 20
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}

Outcome = tuple[list[float], list[torch.Tensor]]


def quietly(step: int, loss: float) -> None:
    pass


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def on_mesh(shape: tuple[int, int], tied: bool = True) -> Outcome:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model, losses, _ = train_on_mesh(config(tied), mesh, data(), 0, 1e-3, quietly)
    return losses, [parameter.full_tensor().detach() for parameter in model.parameters()]


def on_processes(shape: tuple[int, int], dtype: torch.dtype) -> Outcome:
    with default(dtype):
        return on_mesh(shape)


@cache
def alone(dtype: torch.dtype, tied: bool) -> Outcome:
    with default(dtype):
        model, losses = train_alone(config(tied), data(), 0, 1e-3, quietly)
    return losses, [parameter.detach() for parameter in model.parameters()]


def config(tied: bool) -> Config:
    return Config(CONFIG.layers, CONFIG.width, CONFIG.heads, CONFIG.context, tied)


def data():
    return batches(TEXT, CONFIG, 4, STEPS, 0)


def assert_agree(outcome: Outcome, expected: Outcome, tolerance: float) -> None:
    torch.testing.assert_close(outcome[0], expected[0], rtol=tolerance, atol=0)
    assert len(outcome[1]) == len(expected[1])
    for one, other in zip(outcome[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * other.abs().max().item())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 2), (2, 4)], ids=str)
def test_simulated_meshes_train_like_one_rank(shape, dtype) -> None:
    with default(dtype):
        outcomes = sim.run(on_mesh, shape[0] * shape[1], shape)
    for outcome in outcomes:
        assert_agree(outcome, alone(dtype, True), TOLERANCE[dtype])


def test_an_untied_head_trains_like_one_rank() -> None:
    with default(torch.float64):
        outcomes = sim.run(on_mesh, 4, (2, 2), False)
    for outcome in outcomes:
        assert_agree(outcome, alone(torch.float64, False), 1e-9)


@pytest.mark.gloo
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=str)
def test_real_processes_train_like_one_rank(shape, dtype) -> None:
    for outcome in run_gloo(on_processes, shape[0] * shape[1], shape, dtype, timeout=120):
        assert_agree(outcome, alone(dtype, True), TOLERANCE[dtype])


REFUSALS = {
    "ranks": (["--mesh", "dp=2,tp=4"], "needs 8 ranks, and there are 1"),
    "axis": (["--mesh", "dp=1,pp=1"], "there is no axis 'pp'"),
    "size": (["--mesh", "dp=x"], "must be a positive number"),
    "heads": (["--heads", "5"], "5 heads do not divide a width of 128"),
    "missing text": (["--text", "/nowhere/at/all"], "cannot read /nowhere/at/all"),
    "empty text": (["--text", os.devnull], "too few for sequences of 64"),
    "long context": (["--context", "100000000"], "too few for sequences of 100000000"),
    "rate": (["--rate", "nan"], "--rate must be a positive number"),
    "seed": (["--seed", "9" * 30], "--seed must be from 0"),
    "png": (["--png", "/nowhere/at/all.png"], "is not a .png file in a folder that exists"),
    "axis twice": (["--mesh", "dp=1,dp=1"], "gives the size of dp twice"),
    "steps": (["--steps", "0"], "--steps must be at least 1"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_gives_one_sentence_and_exit_code_2(name, capsys) -> None:
    arguments, sentence = REFUSALS[name]
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not said.out


def test_heads_that_the_ranks_cannot_share_are_refused(capsys) -> None:
    assert sim.run(main, 4, ["--mesh", "tp=4", "--heads", "2", "--width", "32"]) == [2] * 4
    assert "2 heads cannot be shared equally by tp=4 ranks" in capsys.readouterr().err


SMALL = ["--steps", "3", "--layers", "1", "--width", "32", "--context", "16", "--batch", "4", "--check"]


def run_script(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        [*command, str(EXAMPLE), *SMALL], cwd=folder, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses_in(output: str) -> list[str]:
    rows = [[cell.strip() for cell in line.split("│")] for line in output.splitlines() if line.count("│") == 5]
    return [row[2] for row in rows if row[1].isdecimal()]


@pytest.mark.gloo
def test_the_script_gives_the_same_losses_however_it_is_started(tmp_path) -> None:
    """Alone, simulated and under torchrun: the same seed, the same curve, a table of what was sent and a PNG."""
    python = [sys.executable]
    plain = run_script(python, tmp_path)
    assert (tmp_path / "train_gpt.png").read_bytes().startswith(b"\x89PNG")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", str(free_port())]
    simulated = run_script([*python, "-m", "shardwise", "sim", "-n", "4"], tmp_path)
    real = run_script([*python, *torchrun], tmp_path)
    for output in (plain, simulated, real):
        assert "the curves agree" in output
    assert losses_in(plain)[:2]
    for one, other in ((plain, simulated), (plain, real)):
        for left, right in zip(losses_in(one), losses_in(other), strict=True):
            assert float(left) == pytest.approx(float(right), rel=1e-4)
    assert "all_reduce" in simulated
    assert "nothing was sent" in plain
