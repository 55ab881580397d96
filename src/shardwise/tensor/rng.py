"""One stream of random numbers, whatever the sharding.

A random operator on a distributed tensor draws the numbers of the *global* tensor, on every rank the same, and keeps
this rank's part: so the values are those of one device with the same seed, whatever the mesh and the placements.

The numbers come from the default generator of the mesh's first rank, which sends its state to the others before each
draw (5 kB on a CPU, 16 bytes on a GPU). So replicas agree whatever the ranks have drawn by themselves, seeding and
``torch.set_rng_state`` on the first rank work as they do on one device, and so does recomputation in checkpointing.
The generators of the other ranks are left as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from shardwise.comm import wire
from shardwise.mesh.mesh import DeviceMesh
from shardwise.mesh.world import Group
from shardwise.redistribute import execute
from shardwise.redistribute.planner import plan
from shardwise.sharding.placement import Partial, Replicate
from shardwise.sharding.spec import Spec
from shardwise.tensor.asked import Asked
from shardwise.tensor.propagate import OpPlan, propagate
from shardwise.tensor.signature import signature

LIKE = ("rand_like", "randn_like", "randint_like")


def draws(asked: Asked) -> bool:
    """Whether the call draws random numbers."""
    traits = signature(asked.op)
    if not traits.is_random:
        return False
    if "dropout_p" in traits.names:
        place = traits.names.index("dropout_p")
        given = asked.args[place] if place < len(asked.args) else asked.kwargs.get("dropout_p", traits.defaults[place])
        return bool(given)
    return True


def plan_random(asked: Asked) -> OpPlan:
    """Plan a call that draws: fills cut the global draw, anything else runs on whole operands."""
    traits = signature(asked.op)
    fills = traits.written == (0,) and len(asked.specs) == 1
    alike = asked.op.name().removeprefix("aten::").partition(".")[0] in LIKE
    spec = asked.specs[0] if asked.specs else None
    if spec is not None and (fills or alike):
        return _plan_fill(asked, spec, alike)
    planned = propagate(asked, whole=True)
    if planned.expand is not None:
        return planned
    return replace(planned, local=_streamed(planned.local, asked.mesh))


def _plan_fill(asked: Asked, spec: Spec, alike: bool) -> OpPlan:
    if alike:
        planned = propagate(asked, whole=True)
        meta = planned.outputs[0].meta if planned.outputs[0] is not None else spec.meta
        kept = [Replicate() if isinstance(role, Partial) else role for role in spec.placements]
        spec = Spec(asked.mesh, tuple(kept), meta)
    coordinate = asked.coordinate
    lying = spec.with_placements(tuple(Replicate() if isinstance(role, Partial) else role for role in spec.placements))
    pending = plan(lying, spec)

    def fill(
        local: torch.Tensor, *args: object, generator: torch.Generator | None = None, **kwargs: object
    ) -> torch.Tensor:
        meta = spec.meta
        whole = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=local.device)
        given = {} if generator is None else {"generator": generator}
        with stream(asked.mesh, local.device, generator):
            drawn = asked.op(whole, *args, **kwargs, **given)
        assert coordinate is not None
        part = execute.run(lying.take(drawn, coordinate), lying, pending)
        return part.clone() if alike else local.copy_(part)

    return OpPlan(fill, (), (spec,))


def _streamed(local: Callable[..., object], mesh: DeviceMesh) -> Callable[..., object]:
    def drawing(*args: object, generator: torch.Generator | None = None, **kwargs: object) -> object:
        device = next((item.device for item in args if isinstance(item, torch.Tensor)), torch.device(mesh.device_type))
        given = {} if generator is None else {"generator": generator}
        with stream(mesh, device, generator):
            return local(*args, **kwargs, **given)

    return drawing


@contextlib.contextmanager
def stream(mesh: DeviceMesh, device: torch.device, given: torch.Generator | None = None) -> Iterator[None]:
    """Let the default generator of ``device`` stand as the first rank's does; ``given``, if any, is used as it is."""
    if given is not None:
        yield
        return
    generator = _default_generator(device)
    group = mesh.axes_group(tuple(range(mesh.ndim)))
    own = generator.get_state()
    if group.size > 1:
        generator.set_state(_first(own, mesh, group))
    try:
        yield
    finally:
        if group.index:
            generator.set_state(own)


def _first(state: torch.Tensor, mesh: DeviceMesh, group: Group) -> torch.Tensor:
    carried = state.to(mesh.device_type)
    return wire.wait(wire.broadcast(carried, 0, group, axis="random state")).to(state.device)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator
