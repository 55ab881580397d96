"""Plans: which module of a model runs in which parallel style."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatch

from torch import nn

from shardwise.errors import ParallelPlanError, message
from shardwise.mesh.mesh import DeviceMesh, current_mesh
from shardwise.parallel.styles import ParallelStyle
from shardwise.tensor.dtensor import DTensor

__all__ = ["parallelize_module"]

Plan = ParallelStyle | Mapping[str, ParallelStyle]
Sites = list[tuple[nn.Module, str]]


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | dict[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Run a module in parallel over a mesh axis, in place, by a style or a plan ``{name: style}``, and return it.

    A name is the path of a submodule, such as ``"layers.*.mlp.up"``; each part of it is matched as by `fnmatch`, and
    ``""`` is the module itself. Parameters that are tied stay tied. ``src_data_rank`` is the rank of the axis whose
    parameters count; with None each rank takes its part of its own.

    Raises `ParallelPlanError`, before anything is changed, if a name matches no module, the mesh has several axes, or a
    plan holds something else than styles.

    >>> import torch, shardwise, shardwise.sim
    >>> from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    >>> def body():
    ...     mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    ...     parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ...     return [tuple(parameter.to_local().shape) for parameter in mlp.parameters()]
    >>> shardwise.sim.run(body, 2)
    [[(4, 4), (4,), (4, 4), (4,)], [(4, 4), (4,), (4, 4), (4,)]]
    """
    mesh = _one_axis(device_mesh)
    if parallelize_plan is None:
        warnings.warn("parallelize_module was given no plan: nothing is parallelized", stacklevel=2)
        return module
    ties = list(_ties(module))
    for path, target, style in list(_targets(module, parallelize_plan)):
        style.src_data_rank = src_data_rank
        changed = style._apply(target, mesh)
        if path == "":
            module = changed
        elif changed is not target:
            module.set_submodule(path, changed)
        for sites in ties:
            _tie(sites)
    return module


def _one_axis(mesh: DeviceMesh | None) -> DeviceMesh:
    found = mesh or current_mesh()
    if found is None:
        raise ParallelPlanError(message("no mesh was given", do="pass device_mesh, or call it within `with mesh:`"))
    if found.ndim == 1:
        return found
    example = f'mesh["{found.mesh_dim_names[-1]}"]' if found.mesh_dim_names else "a mesh with named axes, by name"
    raise ParallelPlanError(
        message(
            f"parallelize_module takes a mesh of one axis, not {found.ndim}",
            got=str(found),
            do=f"pass one axis of it: {example}",
        )
    )


def _targets(module: nn.Module, plan: Plan) -> Iterator[tuple[str, nn.Module, ParallelStyle]]:
    """The path, module and style of each application, in the order of the plan; a shared module comes once a key."""
    if isinstance(plan, ParallelStyle):
        yield "", module, plan
        return
    if not isinstance(plan, Mapping):
        raise ParallelPlanError(message(f"a plan is a style or a dict of styles, not {type(plan).__name__}"))
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            what = f"a plan holds styles, not {type(style).__name__}"
            raise ParallelPlanError(message(what, asked=f"{pattern!r}: {style!r}"))
        matched: dict[int, tuple[str, nn.Module]] = {}
        for path, target in _matches(module, pattern):
            matched.setdefault(id(target), (path, target))
        if not matched:
            raise _no_match(module, pattern)
        yield from ((path, target, style) for path, target in matched.values())


def _matches(module: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    tokens = pattern.split(".") if pattern else []
    for path, part in module.named_modules(remove_duplicate=False):
        names = path.split(".") if path else []
        if len(names) == len(tokens) and all(map(fnmatch, names, tokens)):
            yield path, part


def _no_match(module: nn.Module, pattern: str) -> ParallelPlanError:
    names = [path for path, _ in module.named_modules() if path]
    close = get_close_matches(pattern, names, n=3, cutoff=0.4)
    closest = f"the closest are {', '.join(close)}" if close else f"there are {', '.join(names[:8]) or 'none'}"
    return ParallelPlanError(
        message(
            f"no module matches {pattern!r}",
            asked=f"a plan for {type(module).__name__} with the key {pattern!r}",
            got=f"of its {len(names)} modules {closest}",
            do="mend the key; every part between dots is matched on its own, so layers.0.* does not match layers.0.a.b",
        )
    )


def _ties(module: nn.Module) -> Iterator[Sites]:
    """Where each parameter stands that stands in several places."""
    places: dict[int, Sites] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((part, name))
    return (sites for sites in places.values() if len(sites) > 1)


def _tie(sites: Sites) -> None:
    standing = [part._parameters[name] for part, name in sites]
    placed = [parameter for parameter in standing if isinstance(parameter, DTensor)]
    if not placed or all(parameter is placed[0] for parameter in standing):
        return
    for part, name in sites:
        part.register_parameter(name, placed[0])
