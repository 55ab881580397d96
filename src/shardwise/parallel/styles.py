"""Parallel styles: how the parameters of one module lie on a mesh axis, and how its inputs and outputs do.

A style is applied by `parallelize_module`. The module's parameters become distributed; hooks around its forward make
distributed tensors of plain inputs, lay them as the module needs them, and lay the outputs as they are asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import nn

from shardwise.errors import ParallelPlanError, message
from shardwise.mesh.mesh import DeviceMesh
from shardwise.parallel.boundary import Boundary, Layouts, carry_in, leave, place_each, place_named
from shardwise.parallel.parameters import distribute_parameters
from shardwise.sharding.placement import Placement, Replicate, Shard
from shardwise.tensor.dtensor import DTensor

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
]


class ParallelStyle(ABC):
    """How one module runs in parallel; the base of all styles.

    A style of your own overrides ``_apply(module, device_mesh)``, which changes the module in place and returns it.
    ``src_data_rank`` is the rank of the axis whose parameters count: `parallelize_module` sets it.
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module: ...

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in vars(self).items() if name != "src_data_rank")
        return f"{type(self).__name__}({given})"


class ColwiseParallel(ParallelStyle):
    """Cut a `torch.nn.Linear` by output features, or a `torch.nn.Embedding` by embedding dim.

    Args:
        input_layouts: how a plain input lies; replicated by default.
        output_layouts: how the output is to lie; cut along the last dim by default.
        use_local_output: whether the output is this rank's part, a plain tensor, or else a `DTensor`.

    >>> import torch, shardwise, shardwise.sim
    >>> from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    >>> def body():
    ...     mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    ...     parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ...     return tuple(mlp[0](torch.ones(3, 4)).shape), tuple(mlp(torch.ones(3, 4)).shape)
    >>> shardwise.sim.run(body, 2)
    [((3, 4), (3, 4)), ((3, 4), (3, 4))]
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = (input_layouts or Replicate(),)
        self.output_layouts = (output_layouts or Shard(-1),)
        self.desired_input_layouts = (Replicate(),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_kind(self, module)
        cut = Shard(0) if isinstance(module, nn.Linear) else Shard(1)
        distribute_parameters(module, device_mesh, {"weight": cut, "bias": cut}, self.src_data_rank)
        flow = Flow(device_mesh, self.input_layouts[0], Replicate(), self.output_layouts[0], self.use_local_output)
        return _hooked(module, flow)


class RowwiseParallel(ParallelStyle):
    """Cut a `torch.nn.Linear` by input features, or a `torch.nn.Embedding` by vocabulary.

    Every rank computes a term of the output, or looks up the rows that it holds; the terms are summed by an all_reduce
    (output replicated) or a reduce_scatter (output cut).

    Args:
        input_layouts: how a plain input lies; cut along the last dim by default. A Linear knows its input features, so
            they need not divide by the ranks.
        output_layouts: how the output is to lie; replicated by default.
        use_local_output: whether the output is this rank's part, a plain tensor, or else a `DTensor`.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = (input_layouts or Shard(-1),)
        self.output_layouts = (output_layouts or Replicate(),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_kind(self, module)
        cut, needed = (Shard(1), Shard(-1)) if isinstance(module, nn.Linear) else (Shard(0), Replicate())
        distribute_parameters(module, device_mesh, {"weight": cut}, self.src_data_rank)
        flow = Flow(device_mesh, self.input_layouts[0], needed, self.output_layouts[0], self.use_local_output)
        return _hooked(module, flow)


class SequenceParallel(ParallelStyle):
    """Run a module that treats every position alike (LayerNorm, RMSNorm, Dropout) on a part of the sequence.

    The parameters are replicated: they are those of one rank, which sends them to the others.

    Args:
        sequence_dim: the dim of the input along which it is cut; 1 for (batch, sequence, features).
        use_local_output: whether the output is this rank's part, a plain tensor; by default it is a `DTensor`.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh, {}, self.src_data_rank)
        cut = self.sequence_sharding[0]
        return _hooked(module, Flow(device_mesh, cut, cut, None, self.use_local_output))


class PrepareModuleInput(ParallelStyle):
    """Lay the inputs of a module as it needs them.

    Args:
        input_layouts: how each positional input lies if it is a plain tensor; None leaves an input alone.
        desired_input_layouts: how each positional input is to lie; None leaves it as it comes.
        input_kwarg_layouts: the same as ``input_layouts`` for keyword inputs, by name.
        desired_input_kwarg_layouts: the same as ``desired_input_layouts`` for keyword inputs.
        use_local_output: whether the module gets this rank's parts, plain tensors, or else `DTensor`.

    Raises `ParallelPlanError` if the two lists, or the two dicts, do not match.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _listed(input_layouts)
        self.desired_input_layouts = _listed(desired_input_layouts)
        self.input_kwarg_layouts = input_kwarg_layouts or {}
        self.desired_input_kwarg_layouts = desired_input_kwarg_layouts or {}
        self.use_local_output = use_local_output
        _check_pairs("input_layouts", self.input_layouts, self.desired_input_layouts)
        _check_pairs(
            "input_kwarg_layouts", tuple(self.input_kwarg_layouts), tuple(self.desired_input_kwarg_layouts), named=True
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        positional = Boundary(device_mesh, self.input_layouts, self.desired_input_layouts, self.use_local_output)

        def before(
            module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
        ) -> tuple[tuple[object, ...], dict[str, object]]:
            named = place_named(
                kwargs, device_mesh, self.input_kwarg_layouts, self.desired_input_kwarg_layouts, self.use_local_output
            )
            return place_each(args, positional, f"{type(module).__name__} got inputs"), named

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


class PrepareModuleOutput(ParallelStyle):
    """Lay the outputs of a module as they are asked for.

    Args:
        output_layouts: how each output lies if it is a plain tensor; None leaves an output alone.
        desired_output_layouts: how each output is to lie; None leaves it as it comes.
        use_local_output: whether the outputs are this rank's parts, plain tensors, or else `DTensor`.

    Raises `ParallelPlanError` if the two lists do not match.
    """

    def __init__(
        self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True
    ) -> None:
        self.output_layouts = _listed(output_layouts)
        self.desired_output_layouts = _listed(desired_output_layouts)
        self.use_local_output = use_local_output
        _check_pairs("output_layouts", self.output_layouts, self.desired_output_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        boundary = Boundary(device_mesh, self.output_layouts, self.desired_output_layouts, self.use_local_output)

        def after(module: nn.Module, args: tuple[object, ...], outputs: object) -> object:
            what = f"{type(module).__name__} gave outputs"
            if isinstance(outputs, (tuple, list)):
                placed = place_each(tuple(outputs), boundary, what)
                return type(outputs)(placed) if type(outputs) in (tuple, list) else placed
            return place_each((outputs,), boundary, what)[0]

        module.register_forward_hook(after)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """Lay the inputs and the outputs of a module: a `PrepareModuleInput` and a `PrepareModuleOutput` in one."""

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        self.prepare_module_output._apply(module, device_mesh)
        return module


def _listed(layouts: Layouts | None) -> tuple[Placement | None, ...] | None:
    return (layouts,) if isinstance(layouts, Placement) else None if layouts is None else tuple(layouts)


def _check_pairs(
    name: str, given: tuple[object, ...] | None, desired: tuple[object, ...] | None, *, named: bool = False
) -> None:
    fits = set(given or ()) == set(desired or ()) if named else len(given or ()) == len(desired or ())
    if not fits:
        raise ParallelPlanError(
            message(
                f"{name} and desired_{name} do not match",
                got=f"{name}={list(given or ())}, desired_{name}={list(desired or ())}",
                do="give both for the same inputs or outputs; None leaves one as it is",
            )
        )


def _check_kind(style: ParallelStyle, module: nn.Module) -> None:
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise ParallelPlanError(
            message(
                f"{type(style).__name__} knows Linear and Embedding, not {type(module).__name__}",
                do="give the styles of its Linear and Embedding parts, or write a ParallelStyle with its own _apply",
            )
        )


class Flow(NamedTuple):
    """What happens around a module with one tensor in and one out.

    ``given`` is how a plain input lies, ``needed`` how the module needs it, ``asked`` how the output is to lie (None:
    as it comes), ``local`` whether it is handed on as a plain tensor.
    """

    mesh: DeviceMesh
    given: Placement
    needed: Placement
    asked: Placement | None
    local: bool


def _hooked(module: nn.Module, flow: Flow) -> nn.Module:
    features = module.in_features if isinstance(module, nn.Linear) else None

    def entering(item: torch.Tensor) -> DTensor:
        return carry_in(item, flow.mesh, flow.given, flow.needed, features)

    def before(
        module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        if args:
            return (entering(args[0]), *args[1:]), kwargs
        first, *others = kwargs.items()
        return args, {first[0]: entering(first[1]), **dict(others)}

    def after(module: nn.Module, args: tuple[object, ...], output: torch.Tensor) -> torch.Tensor:
        return leave(output, flow.asked, flow.local)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
    return module
