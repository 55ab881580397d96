"""Looking at what distributed tensors do: what is sent, where elements lie, how a call is planned."""

from shardwise._faces import expose
from shardwise.debug.explain import explain, explanation
from shardwise.debug.guard import guard
from shardwise.debug.picture import sharding_picture, visualize_sharding
from shardwise.debug.trace import CommCounts, CommDebugMode, Traffic, traffic_table

__all__ = [
    "CommCounts",
    "CommDebugMode",
    "Traffic",
    "explain",
    "explanation",
    "guard",
    "sharding_picture",
    "traffic_table",
    "visualize_sharding",
]

expose(__name__, globals(), __all__)
