from __future__ import annotations

from types import FunctionType

from shardwise._faces import expose


def defined_in(module: str) -> FunctionType:
    def anything() -> None: ...

    anything.__module__ = module
    return anything


def test_exposed_things_show_the_face() -> None:
    thing = defined_in("shardwise.comm.wire")
    expose("shardwise.debug", {"thing": thing, "number": 3}, ["thing", "number"])
    assert thing.__module__ == "shardwise.debug"


def test_the_outer_face_wins_in_either_order() -> None:
    first, second = defined_in("shardwise.errors"), defined_in("shardwise.errors")
    for face in ("shardwise", "shardwise.sim"):
        expose(face, {"thing": first}, ["thing"])
    for face in ("shardwise.sim", "shardwise"):
        expose(face, {"thing": second}, ["thing"])
    assert first.__module__ == second.__module__ == "shardwise"
