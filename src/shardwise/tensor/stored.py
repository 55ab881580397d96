"""Distributed tensors in files: what ``torch.load(weights_only=True)`` may make when it reads one."""

from __future__ import annotations

import torch

from shardwise.mesh.layout import Layout, RankMap
from shardwise.mesh.mesh import DeviceMesh, _Cut, _restore
from shardwise.sharding.placement import Partial, Replicate, Shard, StridedShard
from shardwise.sharding.spec import Spec, TensorMeta
from shardwise.tensor.dtensor import DTensor, _rebuild

# All of them only hold what they are given: to make one runs no code from the file.
VALUES = [DeviceMesh, _Cut, Layout, RankMap, Replicate, Shard, StridedShard, Partial, Spec, TensorMeta]
torch.serialization.add_safe_globals([DTensor, *VALUES, _rebuild, _restore])
