"""Which device this process uses: chosen once, from its local rank, unless the program has chosen before."""

from __future__ import annotations

import os

import torch

from shardwise.errors import MeshError, message
from shardwise.mesh.world import World

SILENT_TYPES = ("meta", "xla")  # no data, or communication of its own: meshes of these make no process groups


def settle_device(device_type: str, world: World) -> None:
    """Make a device of this type the current one, in a world of processes.

    The local rank that a launcher gives says which; without one, the ranks are taken to fill hosts of equally many
    devices, one after the other.

    Raises:
        MeshError: there is no such device, or the ranks do not fill hosts evenly.
    """
    module = getattr(torch, device_type, None)
    if module is None or not hasattr(module, "set_device"):
        return
    if not world.has_others or device_type in ("cpu", *SILENT_TYPES):
        return
    count = module.device_count()
    if count and not module.is_initialized():
        module.set_device(_local_rank(device_type, world, count))


def _local_rank(device_type: str, world: World, count: int) -> int:
    given = os.environ.get("LOCAL_RANK")
    if given is None and world.size > count and world.size % count:
        raise MeshError(
            message(
                f"{world.size} ranks do not fill hosts of {count} {device_type} devices evenly",
                asked=f"a mesh of {device_type!r} in a world of {world.size} ranks",
                do=f"torch.{device_type}.set_device before making the mesh, or start the program with torchrun",
            )
        )
    local = world.rank % count if given is None else int(given)
    if local >= count:
        raise MeshError(
            message(
                f"rank {world.rank} has no {device_type} device of its own",
                got=f"LOCAL_RANK={given} and {count} devices",
                do="start as many processes on a host as it has devices",
            )
        )
    return local
