"""Values: frozen, slotted, interned classes whose equality is identity.

Two equal values are the same object, so a value is as cheap a dictionary key as an integer, and what is derived from it
(`derived`) is computed once for everybody. The law: for any value ``v``,
``pickle.loads(pickle.dumps(v)) is v``, ``copy.deepcopy(v) is v`` and ``type(v)(*fields) is v``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar, Generic, TypeVar, cast, overload

from torch.utils import _pytree as pytree
from typing_extensions import dataclass_transform

T = TypeVar("T")

_pool: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Interned(type):
    """Makes a call of the class return the one object that has these fields.

    A class of few and small values may set ``_recent`` to a dict, where they are kept by their arguments: its values
    live for ever, and are found at once.
    """

    _recent: dict[Any, Any] | None
    _arity: int  # how many fields, if arguments are taken as they come; 0 if they are normalised first

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls._arity == len(args) and args:
            key = (cls, args)
            found = _pool.get(key)
            return _enter(key, type.__call__(cls, *args)) if found is None else found
        recent = cls._recent
        if recent is None or kwargs:
            return cls._make(args, kwargs)
        found = recent.get(args)
        if found is None:
            found = recent[args] = cls._make(args, kwargs)
        return found

    def _make(cls, args: Any, kwargs: Any) -> Any:
        candidate = type.__call__(cls, *args, **kwargs)
        key = (cls, cls._key(candidate))  # type: ignore[attr-defined]
        found = _pool.get(key)
        return _enter(key, candidate) if found is None else found


def _enter(key: Hashable, candidate: Any) -> Any:
    with _lock:
        return _pool.setdefault(key, candidate)


class derived(Generic[T]):
    """A property computed at its first use and kept: `functools.cached_property` that torch.compile can trace."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> derived[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> derived[T] | T:
        if instance is None:
            return self
        kept = instance.__dict__[self.name] = self.compute(instance)
        return kept


class Value(metaclass=Interned):
    """What all values share; derived attributes live in the instance's dict, the fields in slots."""

    __slots__ = ("__dict__", "__weakref__")
    _recent: ClassVar[dict[Any, Any] | None] = None
    _arity: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __copy__(self: T) -> T:
        return self

    def __deepcopy__(self: T, memo: object) -> T:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]


@dataclass_transform(frozen_default=True, eq_default=False)
def value(cls: type[T]) -> type[T]:
    """Turn a class with annotated fields into an interned value.

    The fields must be hashable once ``__post_init__`` has run. The class is made anew, so its methods cannot use
    ``super()`` without arguments. The pool holds the fields while the value lives: a class whose fields remember
    values made from them must say in ``_key`` what to compare instead, or these are never freed.
    """
    bases = tuple(base for base in cls.__bases__ if base is not object)
    if not any(issubclass(base, Value) for base in bases):
        bases = (*bases, Value)
    body = {name: item for name, item in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}
    rebuilt = Interned(cls.__name__, bases, body)
    made = cast(Any, dataclass(frozen=True, slots=True, eq=False, repr="__repr__" not in body)(rebuilt))
    names = [field.name for field in fields(made)]
    if "_key" not in body:
        made._key = attrgetter(*names) if names else (lambda self: ())
        taken = len(names) > 1 and made._recent is None and not hasattr(made, "__post_init__")
        made._arity = len(names) if taken else 0
    pytree.register_constant(made)
    return cast("type[T]", made)
