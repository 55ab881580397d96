"""What a process has one of and each simulated rank must have its own of; it changes hands with the turn."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed import distributed_c10d as c10d

T = TypeVar("T")


class Possession(Protocol[T]):
    """One thing that ranks must not share: ``take`` it from who leaves, ``give`` it to who comes."""

    def take(self) -> T: ...

    def give(self, kept: T) -> None: ...


class TorchDistributed:
    """The groups that `torch.distributed` knows."""

    def take(self) -> c10d._World:
        return c10d._world

    def give(self, kept: c10d._World) -> None:
        c10d._world = kept


class TorchRandom:
    """The state of torch's generator of random numbers on the CPU."""

    def take(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def give(self, kept: torch.Tensor) -> None:
        torch.default_generator.set_state(kept)


class PythonRandom:
    """The state of the module `random`."""

    def take(self) -> tuple[object, ...]:
        return random.getstate()

    def give(self, kept: tuple[object, ...]) -> None:
        random.setstate(kept)


class BitGenerator(Protocol):
    """What NumPy draws its random bits from."""

    state: object

    def __init__(self, seed: int) -> None: ...


class NumpyRandomModule(Protocol):
    """What is needed of the module `numpy.random`."""

    def get_bit_generator(self) -> BitGenerator: ...

    def set_bit_generator(self, bit_generator: BitGenerator | None) -> None: ...


class NumpyRandom:
    """NumPy's global generator, if a program uses NumPy's: each rank gets a copy the first time that it comes.

    Copying the state takes long, so the generators themselves change hands.
    """

    def __init__(self) -> None:
        self._origin = self.take()

    def take(self) -> BitGenerator | None:
        module = self._module()
        return None if module is None else module.get_bit_generator()

    def give(self, kept: BitGenerator | None) -> None:
        module = self._module()
        if module is not None:
            module.set_bit_generator(_copy(kept or module.get_bit_generator()) if kept is self._origin else kept)

    def _module(self) -> NumpyRandomModule | None:
        module: Any = sys.modules.get("numpy.random")
        return module if hasattr(module, "set_bit_generator") else None


def _copy(bit_generator: BitGenerator) -> BitGenerator:
    copy = type(bit_generator)(0)
    copy.state = bit_generator.state
    return copy


class Environment:
    """Environment variables; the value kept is what the rank finds in them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def take(self) -> Mapping[str, str | None]:
        return {name: os.environ.get(name) for name in self.names}

    def give(self, kept: Mapping[str, str | None]) -> None:
        for name, text in kept.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


class MainModule:
    """The module ``__main__``: the script that the rank runs."""

    def take(self) -> ModuleType:
        return sys.modules["__main__"]

    def give(self, kept: ModuleType) -> None:
        sys.modules["__main__"] = kept
