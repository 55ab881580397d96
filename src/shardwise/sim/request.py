"""What one rank asks of a group: the call, its buffers, and the line of the user's program that it stands in."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch

PACKAGE = str(Path(__file__).parents[1]) + os.sep
_HIDDEN = (PACKAGE, str(Path(torch.__file__).parent) + os.sep, contextlib.__file__, functools.__file__, "<frozen")

Terms = tuple[object, ...]


class Request:
    """One rank's part in a collective.

    ``reduce_op`` and ``root`` (a rank of the world) are what the call was made with, and ``terms`` what the ranks of
    the group must agree on besides. ``inputs`` are read and ``outputs`` written when all ranks have come.
    """

    __slots__ = ("inputs", "op", "outputs", "place", "rank", "reduce_op", "root", "splits", "terms")

    def __init__(
        self,
        rank: int,
        op: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        terms: Terms = (),
        reduce_op: str = "",
        root: int | None = None,
        splits: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        self.rank = rank
        self.op = op
        self.inputs = inputs
        self.outputs = outputs
        self.terms = (op, reduce_op, root, *terms)
        self.reduce_op = reduce_op
        self.root = root
        self.splits = splits
        self.place = user_place(sys._getframe(1))

    def __str__(self) -> str:
        option = ", ".join(filter(None, [self.reduce_op, "" if self.root is None else f"root {self.root}"]))
        tensors = ", ".join(map(tensor_text, self.inputs or self.outputs))
        splits = f" sending {list(self.splits[0])} receiving {list(self.splits[1])}" if self.splits else ""
        return f"{self.op}{f'({option})' if option else ''}{' of ' if tensors else ''}{tensors}{splits}"

    @property
    def line(self) -> str:
        return place_text(self.place)


def shapes(tensors: Sequence[torch.Tensor]) -> Terms:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


def tensor_text(tensor: torch.Tensor) -> str:
    """The text form of a plain tensor.

    >>> import torch
    >>> tensor_text(torch.zeros(8, 4))
    'f32[8, 4]'
    """
    return f"{dtype_text(tensor.dtype)}[{', '.join(map(str, tensor.shape))}]"


def dtype_text(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


Place = tuple[str, int]


def user_place(frame: FrameType | None) -> Place:
    """The file and line of the innermost frame outside shardwise and torch."""
    while frame is not None and frame.f_code.co_filename.startswith(_HIDDEN):
        frame = frame.f_back
    return ("unknown", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def place_text(place: Place) -> str:
    file, line = place
    near = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{near if len(near) < len(file) else file}:{line}"
