"""Which sizes the meaning of a call was told from, so that it need not be asked again where only others changed.

A meaning that is a function is asked once more with sizes that note when they are looked at. Sizes 0 and 1 do not:
calls that differ there are different calls. So to see that another size is neither is no look.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

from shardwise.errors import ShardwiseError
from shardwise.rules.rule import Call, Rule, resolve
from shardwise.sharding.spec import TensorMeta

Place = tuple[int, int]
STRIDES = -1  # in place of a dim: the strides, which no place of a size stands for


class Noted:
    """A size of two or more that writes down its place when it is looked at."""

    __slots__ = ("_looked", "_place", "_value")

    def __init__(self, value: int, place: Place, looked: set[Place]) -> None:
        self._value, self._place, self._looked = value, place, looked

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int

    def __index__(self) -> int:
        self._looked.add(self._place)
        return self._value

    __int__ = __index__
    __hash__ = None  # type: ignore[assignment]  # nothing made from it is ever remembered

    def __bool__(self) -> bool:
        return bool(self._value)

    def __repr__(self) -> str:
        return repr(self.__index__())

    def __format__(self, how: str) -> str:
        return format(self.__index__(), how)


def _looking(act: Callable[..., object], turned: bool = False) -> Callable[[Noted, object], object]:
    def look(self: Noted, other: object) -> object:
        own = self.__index__()
        value = other.__index__() if type(other) is Noted else other
        return act(value, own) if turned else act(own, value)

    return look


def _comparing(act: Callable[..., object], few: tuple[int, ...]) -> Callable[[Noted, object], object]:
    look = _looking(act)

    def compare(self: Noted, other: object) -> object:
        return act(self._value, other) if type(other) is int and other in few else look(self, other)

    return compare


def _of_itself(act: Callable[..., object]) -> Callable[[Noted], object]:
    return lambda self: act(self.__index__())


for _name in ("eq", "ne", "gt", "ge", "lt", "le"):
    setattr(Noted, f"__{_name}__", _comparing(getattr(operator, _name), (-1, 0, 1)))
for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"):
    setattr(Noted, f"__{_name}__", _looking(getattr(operator, _name)))
    setattr(Noted, f"__r{_name}__", _looking(getattr(operator, _name), turned=True))
for _name in ("neg", "pos", "abs"):
    setattr(Noted, f"__{_name}__", _of_itself(getattr(operator, _name)))


def told_from(rule: Rule, call: Call, meaning: object) -> tuple[Place, ...] | None:
    """The (tensor, dim) of the sizes that ``rule`` looked at to say ``meaning`` of ``call``; None if that is not known.

    Tensors are counted as they stand among the arguments.
    """
    if not callable(rule.meaning):
        return ()
    looked: set[Place] = set()
    count = iter(range(len(call.operands)))
    noted = Call(call.op, tuple(_noted(call.args, count, looked)), call.operands, call.outputs, call.fixed)
    try:
        answer = resolve(rule, noted)[1]
    except (ShardwiseError, TypeError, ValueError, LookupError, AttributeError, RuntimeError):
        return None
    known = answer == meaning and not any(dim == STRIDES for _, dim in looked)
    return tuple(sorted(looked)) if known else None


def _noted(args: tuple[object, ...] | list[object], count: Iterator[int], looked: set[Place]) -> Iterator[object]:
    for argument in args:
        if isinstance(argument, TensorMeta):
            yield _meta(argument, next(count), looked)
        elif isinstance(argument, (list, tuple)):
            items = list(_noted(argument, count, looked))
            yield items if isinstance(argument, list) else tuple(items)
        else:
            yield argument


def _meta(meta: TensorMeta, tensor: int, looked: set[Place]) -> TensorMeta:
    made: TensorMeta = object.__new__(TensorMeta)  # no value: it equals nothing
    fields = {
        "shape": tuple(size if size < 2 else Noted(size, (tensor, dim), looked) for dim, size in enumerate(meta.shape)),
        "stride": tuple(Noted(step, (tensor, STRIDES), looked) for step in meta.stride),
        "dtype": meta.dtype,
    }
    for name, given in fields.items():
        object.__setattr__(made, name, given)
    return made
