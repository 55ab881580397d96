"""Cutting a mesh: which axes may be taken out together and in which order, how one is split, what a part is called."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardwise.errors import AxisError, AxisNameError, MeshError, message
from shardwise.mesh.layout import Layout
from shardwise.mesh.seat import Part


def check_slice(
    mesh: str, axes: Mapping[object, int], layout: Layout, names: Sequence[str], parts: Sequence[Part]
) -> None:
    """Raise unless ``parts``, called ``names``, are distinct axes in the order of the mesh with ``layout``.

    ``axes`` has the index of the axes that the mesh itself has names for.

    Raises:
        AxisError: none is asked for, or one twice, or they overlap, or the order is another.
    """
    asked = f"{mesh}[{', '.join(map(repr, names))}]"
    if not names:
        raise AxisError(message("a slice needs at least one axis", asked=asked))
    if len(set(names)) < len(names):
        raise AxisError(message("an axis is named twice", asked=asked))
    if any(part.layout.overlaps(before.layout) for i, part in enumerate(parts) for before in parts[:i]):
        raise AxisError(message("axes overlap: they go through the same ranks", asked=asked))
    places = [_place(axes, layout, name, part) for name, part in zip(names, parts, strict=True)]
    if places != sorted(places):
        ordered = [name for _, name in sorted(zip(places, names, strict=True))]
        raise AxisError(
            message(
                "axes are named in another order than the mesh has",
                asked=asked,
                got=f"the order {tuple(axes)}",
                do=f"mesh[{', '.join(map(repr, ordered))}]",
            )
        )


def _place(axes: Mapping[object, int], layout: Layout, name: str, part: Part) -> int:
    if name in axes:
        return axes[name]
    return next((i for i, axis in enumerate(layout.axes) if axis.overlaps(part.layout)), len(layout.axes))


def split(name: str, axis: Layout, sizes: tuple[int, ...], mesh: str) -> list[Layout]:
    """The axis called ``name`` as several, the last of them fastest.

    Raises:
        MeshError: the product of the sizes is not that of the axis.
    """
    product = math.prod(sizes)
    try:
        if product == axis.size:
            return [axis.compose(piece).coalesce() for piece in Layout.row_major(sizes).axes]
        reason = f"the product of the sizes is {product}, the axis has {axis.size}"
    except MeshError:
        reason = f"the axis was flattened from axes of other sizes ({axis})"
    raise MeshError(message(f"axis {name!r} cannot be split so", asked=f"{mesh} to sizes {sizes}", got=reason))


def check_free(name: str, meaning: str | None, asked: str) -> None:
    """Raise if a name already has a meaning.

    Raises:
        AxisNameError: it has.
    """
    if meaning is not None:
        raise AxisNameError(
            message(
                f"the name {name!r} is taken",
                asked=asked,
                got=f"{name!r} already means {meaning}",
                do="choose another name",
            )
        )
