"""Tools for tests: whether a sharding rule says what its operator does."""

from shardwise._faces import expose
from shardwise.rules.check import check_rule

__all__ = ["check_rule"]

expose(__name__, globals(), __all__)
