"""shardwise: distributed tensors for PyTorch that you can trust."""

import shardwise.tensor.early
import shardwise.tensor.stored  # noqa: F401 (both for what they tell torch)
from shardwise._faces import expose
from shardwise.errors import (
    ArgumentError,
    AxisError,
    AxisNameError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeadlockError,
    DistributedTwiceError,
    EquationError,
    InplaceError,
    LeafError,
    MeshError,
    MeshMismatchError,
    MixedTensorError,
    NotInMeshError,
    ParallelPlanError,
    PlacementError,
    RankError,
    RedistributeError,
    RuleError,
    ShardwiseError,
    ViewError,
    WorldError,
    WrongRuleError,
)
from shardwise.mesh.mesh import DeviceMesh, current_mesh, init_device_mesh
from shardwise.mesh.world import World, current_world, dry_world, use_world
from shardwise.redistribute.topology import topology
from shardwise.rules.table import register_rule, unregister_rule
from shardwise.sharding.placement import Owned, Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from shardwise.tensor.api import distribute_module, distribute_tensor, implicit_replication, replicate_unknown
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.explicit import explicit
from shardwise.tensor.factories import empty, full, ones, rand, randn, zeros
from shardwise.tensor.local_map import local_map
from shardwise.tensor.register import register_sharding

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "AxisError",
    "AxisNameError",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DTensor",
    "DeadlockError",
    "DeviceMesh",
    "DistributedTwiceError",
    "EquationError",
    "InplaceError",
    "LeafError",
    "MeshError",
    "MeshMismatchError",
    "MixedTensorError",
    "NotInMeshError",
    "Owned",
    "ParallelPlanError",
    "Partial",
    "Placement",
    "PlacementError",
    "RaggedShard",
    "RankError",
    "RedistributeError",
    "Replicate",
    "RuleError",
    "Shard",
    "ShardwiseError",
    "StridedShard",
    "ViewError",
    "World",
    "WorldError",
    "WrongRuleError",
    "current_mesh",
    "current_world",
    "distribute_module",
    "distribute_tensor",
    "dry_world",
    "empty",
    "explicit",
    "full",
    "implicit_replication",
    "init_device_mesh",
    "local_map",
    "ones",
    "rand",
    "randn",
    "register_rule",
    "register_sharding",
    "replicate_unknown",
    "topology",
    "unregister_rule",
    "use_world",
    "zeros",
]

expose(__name__, globals(), __all__)
