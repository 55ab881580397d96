"""Module-level parallelism: styles for modules, plans for models, with the names and signatures of PyTorch's own."""

from shardwise._faces import expose
from shardwise.parallel.loss import loss_parallel
from shardwise.parallel.plan import parallelize_module
from shardwise.parallel.styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]

expose(__name__, globals(), __all__)
