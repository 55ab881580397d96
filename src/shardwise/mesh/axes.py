"""The axes of a mesh: their sizes, their names, and how they are looked up by either."""

from __future__ import annotations

from shardwise._value import derived
from shardwise.errors import AxisError
from shardwise.mesh.layout import Layout


class Axes:
    """What a value with a layout and names for its axes can be asked about them."""

    __slots__ = ()

    layout: Layout
    mesh_dim_names: tuple[str, ...] | None

    @derived
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return self.layout.shape

    @derived
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.layout.axes)

    @derived
    def axis_names(self) -> tuple[str, ...]:
        """The axis names, or ``"0"``, ``"1"``, ... if there are none."""
        return tuple(map(str, range(self.ndim))) if self.mesh_dim_names is None else self.mesh_dim_names

    @derived
    def _axes(self) -> dict[object, int]:
        return {**self._named, **{axis: axis % self.ndim for axis in range(-self.ndim, self.ndim)}}

    @derived
    def _named(self) -> dict[object, int]:
        return {name: axis for axis, name in enumerate(self.mesh_dim_names or ())}

    def axis(self, name_or_index: int | str) -> int:
        """The index of an axis, from its name or a possibly negative index.

        Raises:
            AxisError: there is no such axis.
        """
        found = self._axes.get(name_or_index)
        if found is None:
            raise self._no_axis(name_or_index)
        return found

    def _no_axis(self, name: object) -> AxisError:
        raise NotImplementedError
