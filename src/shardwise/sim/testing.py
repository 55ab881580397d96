"""A plugin for pytest: a test marked ``@pytest.mark.world(4)`` runs as every rank of a simulated world of 4.

With several sizes, ``@pytest.mark.world(2, 4)``, the test runs once for each. The fixture ``world`` is the `World` of
the rank that runs::

    @pytest.mark.world(2, 4)
    def test_everybody_counts(world):
        x = torch.ones(())
        torch.distributed.all_reduce(x)
        assert x == world.size

Other fixtures are made once and shared by the ranks. A failure on a rank is reported as the test's own, with the rank
in its notes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from shardwise.errors import CollectiveError, RankError
from shardwise.mesh.world import World, current_world
from shardwise.sim.simulate import run


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "world(*sizes): run the test as every rank of a simulated world of each size")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("world")
    if marker is None:
        return
    if not marker.args or not all(isinstance(size, int) and size > 0 for size in marker.args):
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: pytest.mark.world needs sizes, as in world(2, 4)")
    if "world" not in metafunc.fixturenames:
        metafunc.fixturenames.append("world")
    metafunc.parametrize("world", marker.args, indirect=True, ids=[f"world{size}" for size in marker.args])


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World | int:
    """The simulated world of the rank that runs the test; the test must be marked ``@pytest.mark.world(size)``."""
    if request.node.get_closest_marker("world") is None:
        pytest.fail("the fixture 'world' needs a mark with the number of ranks: @pytest.mark.world(4)", pytrace=False)
    size: int = request.param
    return size


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    __tracebackhide__ = True
    if pyfuncitem.get_closest_marker("world") is None:
        return None
    size = cast("int", pyfuncitem.callspec.params["world"])
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    def body() -> None:
        own = {"world": current_world()} if "world" in arguments else {}
        pyfuncitem.obj(**{**arguments, **own})

    failure = _failure(body, size)
    if failure is not None:
        raise failure
    return True


def _failure(body: Callable[[], None], size: int) -> BaseException | None:
    try:
        run(body, size)
    except RankError as error:
        cause = error.__cause__ or error
        cause.__notes__ = [*getattr(cause, "__notes__", []), f"on rank {error.rank} of {size}"]
        return cause
    except CollectiveError as error:
        return error.with_traceback(None)
    return None
