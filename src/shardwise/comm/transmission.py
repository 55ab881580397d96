"""What observers of the wire are told, and where in the user's program it comes from."""

from __future__ import annotations

import contextlib
import sys
from functools import cache
from pathlib import Path
from types import FrameType

import torch

from shardwise._value import value


@value
class Transmission:
    """What one rank hands to the wire in one collective.

    ``shape`` is that of the local input (of several tensors sent at once: their number of elements together); ``bytes``
    is what this rank sends in the ideal ring algorithm (to the whole group for an exchange; the message itself for a
    broadcast); ``axis`` is the mesh axis, or "" if there is none; ``line`` is the user's, as ``file:line``. ``splits``
    are the rows that an exchange sends to each rank and receives from each; ``terms`` is what else the ranks of the
    group have to agree on: the source of a broadcast, or the shapes of several tensors.
    """

    op: str
    axis: str
    ranks: tuple[int, ...]
    group_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    reduce_op: str
    bytes: int
    backward: bool = False
    line: str = ""
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    terms: tuple[object, ...] = ()


def user_frame() -> FrameType | None:
    """The innermost frame of this thread that is the user's: outside shardwise, torch and Python's own plumbing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_line() -> str:
    """Where the user's code stands, as ``file:line``, or ``""`` if nothing of it is on this thread's stack."""
    frame = user_frame()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


@cache
def _ours(filename: str) -> bool:
    packages = (Path(__file__).parents[1], Path(torch.__file__).parent)
    plumbing = (contextlib.__file__, sys.modules["threading"].__file__, sys.modules["functools"].__file__)
    if filename.startswith(("<eval_with_key>", "<frozen ", "<@")) or filename in plumbing:
        return True
    return any(package in Path(filename).parents for package in packages)
