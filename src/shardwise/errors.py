"""Every error that shardwise raises, on one page.

Each derives from `ShardwiseError` and from the builtin that a caller of PyTorch's API would expect::

    ShardwiseError
    ├── MeshError (RuntimeError)             a mesh that cannot be
    │   ├── AxisError (KeyError)             an axis that the mesh does not have, or in the wrong order
    │   ├── AxisNameError (ValueError)       a name that is taken or malformed
    │   ├── MeshMismatchError                the ranks do not agree on the mesh
    │   └── NotInMeshError                   this rank takes no part
    ├── WorldError (RuntimeError)            no world, or one that cannot be made
    ├── CollectiveError (RuntimeError)       communication went wrong
    │   ├── CollectiveMismatchError          the ranks of a group call different things
    │   ├── CollectiveTimeoutError           a rank did not come
    │   └── DeadlockError                    every rank waits and none can go on
    ├── RankError (RuntimeError)             one rank of a simulated run raised; its cause is the exception
    ├── ArgumentError (TypeError)            an argument of the wrong kind
    ├── PlacementError (ValueError)          placements that do not fit a tensor or a mesh
    ├── LeafError (RuntimeError)             a tensor with a gradient function where a leaf is needed
    ├── DistributedTwiceError (RuntimeError) a module that has been distributed before
    ├── EquationError (ValueError)           the text of a rule does not parse or fit
    ├── RuleError (NotImplementedError)      an operator, or this use of it, has no sharding rule
    ├── WrongRuleError (AssertionError)      a rule that claims what gives another answer
    ├── ViewError (RuntimeError)             a view that would need communication
    ├── InplaceError (RuntimeError)          an in-place operator that would change a placement
    ├── MixedTensorError (RuntimeError)      plain and distributed tensors in one call
    ├── RedistributeError (RuntimeError)     a change of placement that cannot be
    └── ParallelPlanError (ValueError)       a parallelize plan that does not fit the module
"""

from __future__ import annotations


class ShardwiseError(Exception):
    """The root of every error of shardwise."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class MeshError(ShardwiseError, RuntimeError):
    """A mesh that cannot be."""


class AxisError(MeshError, KeyError):
    """An axis that the mesh does not have, or axes in the wrong order."""


class AxisNameError(MeshError, ValueError):
    """An axis name that is taken or malformed."""


class MeshMismatchError(MeshError):
    """The ranks do not agree on the mesh."""


class NotInMeshError(MeshError):
    """This rank takes no part in the mesh or group."""


class WorldError(ShardwiseError, RuntimeError):
    """There is no world, or it cannot be made."""


class CollectiveError(ShardwiseError, RuntimeError):
    """Communication went wrong."""


class CollectiveMismatchError(CollectiveError):
    """The ranks of a group call different things."""


class CollectiveTimeoutError(CollectiveError):
    """A rank did not come to a collective in time."""


class DeadlockError(CollectiveError):
    """Every rank waits and none can go on."""


class RankError(ShardwiseError, RuntimeError):
    """One rank of a simulated run raised; ``__cause__`` is its exception and ``rank`` its number."""

    rank: int = -1


class ArgumentError(ShardwiseError, TypeError):
    """An argument of the wrong kind."""


class PlacementError(ShardwiseError, ValueError):
    """Placements that do not fit the tensor or the mesh."""


class LeafError(ShardwiseError, RuntimeError):
    """A tensor with a gradient function where a leaf is needed."""


class DistributedTwiceError(ShardwiseError, RuntimeError):
    """A module that has been distributed before."""


class EquationError(ShardwiseError, ValueError):
    """The text of a rule does not parse, or does not fit its operands."""


class RuleError(ShardwiseError, NotImplementedError):
    """An operator, or this use of it, has no sharding rule."""


class WrongRuleError(ShardwiseError, AssertionError):
    """A rule that claims a strategy by which the answer is not that of one rank."""


class ViewError(ShardwiseError, RuntimeError):
    """A view that would need communication; ``placements`` are those that would make it exact, if there are any."""

    placements: tuple[object, ...] | None = None


class InplaceError(ShardwiseError, RuntimeError):
    """An in-place operator that would change the placement of its target; ``placements`` as in `ViewError`."""

    placements: tuple[object, ...] | None = None


class MixedTensorError(ShardwiseError, RuntimeError):
    """Plain and distributed tensors in one call."""


class RedistributeError(ShardwiseError, RuntimeError):
    """A change of placement that cannot be."""


class ParallelPlanError(ShardwiseError, ValueError):
    """A parallelize plan that does not fit the module."""


def message(what: str, *, asked: object = None, got: object = None, do: object = None) -> str:
    """Phrase an error in its parts: what is wrong, what was asked, what was found, what to do."""
    parts = (("asked", asked), ("got", got), ("do", do))
    return "\n".join([what, *(f"  {name:<6} {_indent(text)}" for name, text in parts if text is not None)])


def _indent(text: object) -> str:
    return str(text).replace("\n", "\n         ")
