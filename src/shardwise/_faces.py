"""Faces: the modules that users import, which name things and define none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType


def expose(face: str, namespace: Mapping[str, object], names: Sequence[str]) -> None:
    """Let the classes and functions among ``names`` show ``face`` as their module.

    Where two faces export the same thing, it shows the outer one, in whatever order they are imported. A face ends with
    ``expose(__name__, globals(), __all__)``.
    """
    for name in names:
        item = namespace[name]
        if isinstance(item, type | FunctionType) and not face.startswith(f"{item.__module__}."):
            item.__module__ = face
