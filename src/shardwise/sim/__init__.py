"""A world of ranks in one process: deterministic, with deadlocks and mismatched calls reported."""

from shardwise._faces import expose
from shardwise.errors import CollectiveMismatchError, DeadlockError, RankError
from shardwise.sim.simulate import run

__all__ = ["CollectiveMismatchError", "DeadlockError", "RankError", "run"]

expose(__name__, globals(), __all__)
