"""The architecture, held: what may import what, how long things are, where state lives.

Each law is a function that yields `Offence`s for one module; the tests run it over the package, and over a piece of
source that breaks it. To allow an exception, extend the list at the top that the failure names, and say why beside it.
"""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src"
PACKAGE = "shardwise"

# The layers, bottom first: a module imports only from earlier rows. A name ending in ".*" is a room of several files,
# which may import each other where that makes no cycle; modules that share a row otherwise do not know each other.
LAYERS = [
    ["_value"],
    ["errors", "_faces"],
    ["mesh.layout"],
    ["mesh.agreement", "mesh.axes"],
    ["mesh.process_groups", "mesh.store"],
    ["mesh.world"],
    ["mesh.arguments", "mesh.device", "mesh.seat"],
    ["mesh.slicing"],
    ["mesh.mesh"],
    ["comm.transmission"],
    ["comm.guard"],
    ["comm.wire"],
    ["comm.async_tensor"],
    ["comm.place"],
    ["comm.verbs"],
    ["comm.functional"],
    ["collectives"],
    ["sharding.placement"],
    ["sharding.spec", "sharding.fitting"],
    ["rules.equation"],
    ["rules.images", "rules.strided"],
    ["rules.pattern"],
    ["rules.rule"],
    ["rules.empty"],
    ["rules.parts"],
    ["rules.halo"],
    [
        "rules.pointwise",
        "rules.algebra",
        "rules.answers",
        "rules.views",
        "rules.shape",
        "rules.indexing",
        "rules.nn",
        "rules.norms",
        "rules.attention",
        "rules.losses",
        "rules.linalg",
        "rules.creation",
        "rules.foreach",
        "rules.reduction",
        "rules.gathered",
        "rules.lists",
        "rules.search",
        "rules.order",
        "rules.refused",
    ],
    ["rules.table", "rules.told"],
    ["rules.checker"],
    ["rules.check"],
    ["testing"],
    ["redistribute.topology"],
    ["redistribute.bits", "redistribute.carriers"],
    ["redistribute.parcels"],
    ["redistribute.steps"],
    ["redistribute.cost"],
    ["redistribute.shards", "redistribute.bounds"],
    ["redistribute.search"],
    ["redistribute.planner"],
    ["redistribute.execute"],
    ["redistribute.transfer"],
    ["tensor.signature"],
    ["tensor.view_metas"],
    ["tensor.metas", "tensor.asked"],
    ["tensor.outline"],
    ["tensor.relabel"],
    ["tensor.propagate"],
    ["tensor.rng"],
    ["tensor.bindings"],
    ["tensor.prepare"],
    ["tensor.explicit"],
    ["tensor.dispatch"],
    ["tensor.roads"],
    ["tensor.agree"],
    ["tensor.dtensor"],
    ["tensor.stored", "tensor.early"],
    ["tensor.factories"],
    ["tensor.api", "tensor.local_map", "tensor.register"],
    ["parallel.*"],
    ["sim.*"],
    ["debug.*"],
    ["checkpoint.*"],
    ["compat.*"],
    [""],  # the face `shardwise` itself
    ["cli"],
    ["__main__"],
]

OPTIONAL_PACKAGES = {"matplotlib"}  # third parties that may be imported where they are used

TORCHS_OWN = ["torch.distributed.tensor", "torch.distributed.device_mesh", "torch.distributed._functional_collectives"]
MAY_IMPORT_TORCHS_OWN = ["compat.*", "interop.*"]

# All state that lives as long as the process: (module, name). Interning pools, the current world, the wire's observers,
# users' rules, the plan cache, the configuration, locks; and nothing else.
STATE = {
    ("_value", "_pool"),
    ("_value", "_lock"),
    ("sharding.placement", "Replicate._recent"),  # a pool: the few placements that there are, by their arguments
    ("sharding.placement", "Shard._recent"),
    ("sharding.placement", "Partial._recent"),
    ("mesh.world", "_current"),
    ("mesh.world", "_process"),
    ("mesh.world", "_process_lock"),
    ("rules.table", "_user_rules"),
    ("rules.table", "_planned"),  # the plan caches, to clear them
    ("rules.table", "_lookup"),  # forgets when users' rules change
    ("sim.simulate", "_one_run"),
}

# Functions that remember their results. They are pure, so whatever depends on the rank is an argument; and bounded,
# unless their arguments come from a finite set.
MEMORIES = {
    ("comm.transmission", "_ours"),
    ("comm.async_tensor", "_is_view"),
    ("rules.equation", "parse"),
    ("rules.foreach", "_base"),
    ("rules.table", "slots"),
    ("redistribute.carriers", "carrier"),
    ("redistribute.parcels", "parcels"),
    ("redistribute.parcels", "places"),
    ("redistribute.parcels", "layouts"),
    ("redistribute.parcels", "_traffic"),
    ("redistribute.steps", "local_sizes"),
    ("redistribute.steps", "is_even"),
    ("redistribute.steps", "_direct"),
    ("redistribute.steps", "largest_nbytes"),
    ("redistribute.steps", "_exchanged"),
    ("redistribute.cost", "_figures"),
    ("redistribute.bounds", "_seen"),
    ("redistribute.bounds", "_places"),
    ("redistribute.bounds", "_cut"),
    ("redistribute.bounds", "_length"),
    ("tensor.dtensor", "_spec_of_part"),
    ("redistribute.shards", "between"),
    ("redistribute.shards", "_is_between"),
    ("redistribute.search", "_ways"),
    ("redistribute.search", "_all_ways"),
    ("redistribute.planner", "_plan"),
    ("redistribute.planner", "_changes"),
    ("redistribute.planner", "_price"),
    ("redistribute.planner", "_planned"),
    ("redistribute.execute", "_stages"),
    ("redistribute.execute", "_parcels"),
    ("redistribute.transfer", "crews"),
    ("redistribute.transfer", "_seats"),
    ("redistribute.transfer", "_parcels"),
    ("tensor.signature", "signature"),
    ("tensor.bindings", "_cast"),
}

# Where `Any` may stand in a signature: it speaks about tensors and arguments of every kind there.
MAY_SAY_ANY = {"_value", "mesh.world", "tensor.prepare", "tensor.dispatch", "tensor.dtensor"}
ANY_PARAMETERS = {"ctx"}  # autograd's context has no type

VAGUE_WORDS = {"util", "utils", "helper", "helpers", "misc", "info", "manager", "handle"}
VAGUE_FILES = VAGUE_WORDS | {"common"}
TORCHS_VAGUE_NAMES = {"get_parameter_info", "get_sharding_info"}  # names that users of torch call

FILE_LINES = 600
FUNCTION_LINES = 60
SHORT_FUNCTION_LINES = 20
SHORT_SHARE = 0.9

MUTABLE_TYPES = {
    "dict", "list", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque", "WeakValueDictionary",
    "WeakKeyDictionary", "WeakSet", "local", "Lock", "RLock", "Condition", "Semaphore", "Event", "ContextVar",
}  # fmt: skip
MUTATORS = {
    "append", "extend", "insert", "remove", "pop", "popitem", "clear", "update", "setdefault", "add", "discard", "sort",
    "reverse", "appendleft", "popleft", "__setitem__",
}  # fmt: skip
CACHES = {"cache", "lru_cache"}


@dataclass(frozen=True)
class Offence:
    module: str
    line: int
    what: str

    def __str__(self) -> str:
        name = self.module.replace(".", "/") or "__init__"
        return f"  {PACKAGE}/{name}.py:{self.line}: {self.what}"


@dataclass(frozen=True)
class Module:
    """One source file; ``name`` has no leading ``shardwise.``, and a package goes by its own name."""

    name: str
    source: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return list(self.nodes(ast.FunctionDef, ast.AsyncFunctionDef))

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """Line and full dotted name of everything that an import statement names."""
        return [(node.lineno, name) for node in self.nodes(ast.Import, ast.ImportFrom) for name in self._names(node)]

    def _names(self, node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        here = [PACKAGE, *self.name.split(".")] if self.name else [PACKAGE]
        up = node.level - self.is_package
        base = ".".join([*(here[: len(here) - up] if node.level else []), *filter(None, [node.module])])
        return [f"{base}.{alias.name}" for alias in node.names]

    def offence(self, node: ast.AST, what: str) -> Offence:
        return Offence(self.name, node.lineno, what)


def read_package() -> list[Module]:
    modules = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        modules.append(Module(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package))
    return modules


MODULES = read_package()
NAMES = {module.name for module in MODULES}

Law = Callable[[Module], Iterable[Offence]]


def assert_held(law: Law, remedy: str) -> None:
    offences = [str(offence) for module in MODULES for offence in law(module)]
    assert not offences, "\n".join([f"{len(offences)} offences. To mend: {remedy}", *offences])


# --- imports


def row_of(name: str) -> tuple[int, str] | None:
    """The row of a module, and the entry that places it; exact names win over rooms."""
    entries = [(row, entry) for row, names in enumerate(LAYERS) for entry in names]
    exact = [found for found in entries if found[1] == name]
    rooms = [found for found in entries if found[1].endswith(".*") and f"{name}.".startswith(found[1][:-1])]
    return next(iter(exact + rooms), None)


def is_empty_package(module: Module) -> bool:
    return module.is_package and all(isinstance(node, ast.Expr) for node in module.tree.body)


def own_target(name: str) -> str | None:
    """The module of the package that an imported dotted name lies in; None if it is somebody else's."""
    if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
        return None
    inner = name[len(PACKAGE) + 1 :]
    return inner if inner in NAMES else inner.rpartition(".")[0]


def every_module_has_a_row(module: Module) -> Iterator[Offence]:
    if row_of(module.name) is None and not is_empty_package(module):
        yield Offence(module.name, 1, "stands in no row of LAYERS")


def imports_point_down(module: Module) -> Iterator[Offence]:
    own = row_of(module.name)
    for line, name in module.imports:
        target = own_target(name)
        row = None if target is None else row_of(target)
        if own is None or row is None or row[0] < own[0]:
            continue
        if row == own and own[1].endswith(".*"):
            continue
        yield Offence(module.name, line, f"imports {name}, which is not below it")


def imports_stand_at_the_top(module: Module) -> Iterator[Offence]:
    for function in module.functions:
        for node in ast.walk(function):
            names = module._names(node) if isinstance(node, ast.Import | ast.ImportFrom) else []
            if any(name.split(".")[0] not in OPTIONAL_PACKAGES for name in names):
                yield module.offence(node, f"{function.name} imports {', '.join(names)}")
    for node in module.nodes(ast.Name, ast.Attribute, ast.alias):
        if "TYPE_CHECKING" in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", "")):
            yield module.offence(node, "uses TYPE_CHECKING")
    for node in module.nodes(ast.Call):
        if ast.unparse(node.func) in ("__import__", "import_module", "importlib.import_module"):
            yield module.offence(node, "imports by a call")


def torchs_own_stack_is_not_used(module: Module) -> Iterator[Offence]:
    if any(fnmatch.fnmatch(module.name, pattern) for pattern in MAY_IMPORT_TORCHS_OWN):
        return
    used = [*module.imports, *((node.lineno, ast.unparse(node)) for node in module.nodes(ast.Attribute))]
    for line, name in used:
        if any(name == own or name.startswith(f"{own}.") for own in TORCHS_OWN):
            yield Offence(module.name, line, f"uses {name}")


def room_imports(room: str) -> dict[str, set[str]]:
    inside = [module for module in MODULES if (row_of(module.name) or (0, ""))[1] == room]
    names = {module.name for module in inside}
    targets = {module.name: {own_target(name) for _, name in module.imports} for module in inside}
    return {name: {target for target in found if target in names} for name, found in targets.items()}


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """The nodes that take part in a cycle or lead to one."""
    left = dict(graph)
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_every_module_has_a_row() -> None:
    assert_held(every_module_has_a_row, "put the module in its row of LAYERS")


def test_imports_point_down() -> None:
    assert_held(imports_point_down, "move what is needed to a lower row, or pass it in as an argument")


@pytest.mark.parametrize("room", [entry for row in LAYERS for entry in row if entry.endswith(".*")])
def test_rooms_have_no_cycles(room: str) -> None:
    assert find_cycle(room_imports(room)) == [], "these modules import each other in a circle"


def test_imports_stand_at_the_top() -> None:
    assert_held(imports_stand_at_the_top, "import at the top; an optional third party goes into OPTIONAL_PACKAGES")


def test_torchs_own_stack_is_not_used() -> None:
    assert_held(torchs_own_stack_is_not_used, "use shardwise's own; only compat and interop may import these")


# --- length


def lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef, source: list[str]) -> int:
    """Lines of a function without its decorators, docstrings, comments and blank lines."""
    strings = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    documentation = {line for node in strings for line in range(node.lineno, node.end_lineno + 1)}
    lines = set(range(function.lineno, function.end_lineno + 1)) - documentation
    return sum(1 for line in lines if (text := source[line - 1].strip()) and not text.startswith("#"))


def function_lengths(module: Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    source = module.source.splitlines()
    return ((function, lines_of_code(function, source)) for function in module.functions)


def files_are_short(module: Module) -> Iterator[Offence]:
    if (lines := len(module.source.splitlines())) > FILE_LINES:
        yield Offence(module.name, 1, f"has {lines} lines, {FILE_LINES} at most")


def no_function_is_long(module: Module) -> Iterator[Offence]:
    for function, lines in function_lengths(module):
        if lines > FUNCTION_LINES:
            yield module.offence(function, f"{function.name} has {lines} lines of code, {FUNCTION_LINES} at most")


def test_files_are_short() -> None:
    assert_held(files_are_short, "split the file by noun")


def test_no_function_is_long() -> None:
    assert_held(no_function_is_long, "split the function by verb")


def test_most_functions_are_short() -> None:
    lengths = [(lines, f"{module.name}.{f.name}") for module in MODULES for f, lines in function_lengths(module)]
    long = sorted((entry for entry in lengths if entry[0] >= SHORT_FUNCTION_LINES), reverse=True)
    allowed = int(len(lengths) * (1 - SHORT_SHARE))
    listed = "\n".join(f"  {lines:3} {name}" for lines, name in long)
    assert len(long) <= allowed, f"{len(long)} of {len(lengths)} functions are long, {allowed} may be:\n{listed}"


# --- state


def is_constant_name(name: str) -> bool:
    return name.strip("_").isupper() or (name.startswith("__") and name.endswith("__"))


def is_mutable(node: ast.expr | None, *, any_object: bool) -> bool:
    """Whether an expression makes something that can change; ``any_object``: a call of any class counts."""
    if isinstance(node, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
        return True
    if not isinstance(node, ast.Call):
        return False
    callee = ast.unparse(node.func).rpartition(".")[2].partition("[")[0]
    return callee in MUTABLE_TYPES or (any_object and callee.lstrip("_")[:1].isupper())


def bindings(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str, ast.expr | None]]:
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign):
            yield from ((node, target.id, node.value) for target in targets if isinstance(target, ast.Name))


def module_state(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Every name in a module under which something may change while the program runs."""
    for node, name, made in bindings(module.tree.body):
        if not is_constant_name(name) and is_mutable(made, any_object=True):
            yield node, name
    for owner in module.nodes(ast.ClassDef):
        for node, name, made in bindings(owner.body):
            if not is_constant_name(name) and is_mutable(made, any_object=False):
                yield node, f"{owner.name}.{name}"
    for function in module.functions:
        if any(CACHES & set(re.split(r"\W+", ast.unparse(mark))) for mark in function.decorator_list):
            yield function, function.name
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield from ((node, name) for name in node.names)


def state_is_listed(module: Module) -> Iterator[Offence]:
    for node, name in module_state(module):
        if (module.name, name) not in STATE | MEMORIES:
            yield module.offence(node, f"{name} is state of the process")


def changed_name(node: ast.AST) -> str | None:
    """The plain name whose content a statement or call changes, if it does."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        node = node.func.value
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        node = node.value
    elif isinstance(node, ast.AugAssign):
        node = node.target
    else:
        return None
    return node.id if isinstance(node, ast.Name) else None


def constants_stay_constant(module: Module) -> Iterator[Offence]:
    constants = {name for _, name, _ in bindings(module.tree.body) if is_constant_name(name)}
    imported = {name.rpartition(".")[2] for _, name in module.imports}
    tables = constants | {name for name in imported if is_constant_name(name)}
    for function in module.functions:
        for node in ast.walk(function):
            name = changed_name(node)
            if name in tables and (module.name, name) not in STATE:
                yield module.offence(node, f"{function.name} changes {name}")


def test_state_is_listed() -> None:
    assert_held(state_is_listed, "keep it on an object, or in current_world().memory; else add it to STATE or MEMORIES")


def test_constants_stay_constant() -> None:
    assert_held(constants_stay_constant, "build the table where it is defined; what changes is state, in lower case")


def test_listed_state_exists() -> None:
    found = {(module.name, name) for module in MODULES for _, name in module_state(module)}
    assert found >= STATE | MEMORIES, f"listed, but gone: {sorted((STATE | MEMORIES) - found)}"


# --- manners


def errors_are_not_swallowed(module: Module) -> Iterator[Offence]:
    for node in module.nodes(ast.ExceptHandler):
        silent = all(isinstance(step, ast.Pass | ast.Continue | ast.Expr) for step in node.body)
        calls = any(isinstance(inner, ast.Call) for step in node.body for inner in ast.walk(step))
        broad = node.type is not None and re.search(r"\b(Base)?Exception\b", ast.unparse(node.type))
        if node.type is None:
            yield module.offence(node, "catches without saying what")
        elif broad and silent and not calls:
            yield module.offence(node, "swallows every exception")
    for node in module.nodes(ast.Call):
        if re.fullmatch(r"(contextlib\.)?suppress\((Base)?Exception\)", ast.unparse(node)):
            yield module.offence(node, "swallows every exception")


def names_say_something(module: Module) -> Iterator[Offence]:
    if VAGUE_FILES & set(re.split(r"[._]", module.name)):
        yield Offence(module.name, 1, "the file's name says nothing")
    for node in module.nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", node.name).lower().split("_")
        if VAGUE_WORDS & set(words) and node.name not in TORCHS_VAGUE_NAMES:
            yield module.offence(node, f"the name {node.name} says nothing")


def says_any(annotation: ast.expr | None) -> bool:
    """Whether ``Any`` occurs in an annotation, written out or as a string."""
    return annotation is not None and re.search(r"\bAny\b", ast.unparse(annotation)) is not None


def signatures_are_typed(module: Module) -> Iterator[Offence]:
    if module.name in MAY_SAY_ANY:
        return
    for function in module.functions:
        given = function.args
        everything = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, [given.vararg, given.kwarg])]
        loose = [each.arg for each in everything if says_any(each.annotation) and each.arg not in ANY_PARAMETERS]
        if loose or says_any(function.returns):
            yield module.offence(function, f"{function.name} says Any of {', '.join(loose) or 'its result'}")


def test_errors_are_not_swallowed() -> None:
    assert_held(errors_are_not_swallowed, "name the exceptions that you expect, and let the others pass")


def test_names_say_something() -> None:
    assert_held(names_say_something, "name it by the noun or the verb that it is")


def test_signatures_are_typed() -> None:
    assert_held(signatures_are_typed, "say object, a type variable or a protocol; else add the module to MAY_SAY_ANY")


# --- the laws themselves: each catches what it is for

BROKEN = [
    (every_module_has_a_row, "attic.box", "x = 1"),
    (imports_point_down, "mesh.layout", "from shardwise.mesh.world import World"),
    (imports_point_down, "mesh.layout", "from .world import World"),
    (imports_point_down, "rules.nn", "from shardwise.rules.algebra import PRODUCTS"),
    (imports_point_down, "rules.table", "from shardwise import DTensor"),
    (imports_stand_at_the_top, "cli", "def f():\n    import json"),
    (imports_stand_at_the_top, "cli", "from typing import TYPE_CHECKING"),
    (imports_stand_at_the_top, "cli", "import importlib\nx = importlib.import_module('json')"),
    (torchs_own_stack_is_not_used, "tensor.api", "from torch.distributed import tensor"),
    (torchs_own_stack_is_not_used, "tensor.api", "import torch\nx = torch.distributed.device_mesh.DeviceMesh"),
    (files_are_short, "cli", "x = 1\n" * 601),
    (no_function_is_long, "cli", "def f():\n" + "    x = 1\n" * 60),
    (state_is_listed, "cli", "cache = {}"),
    (state_is_listed, "cli", "_pool: dict[int, int] = weakref.WeakValueDictionary()"),
    (state_is_listed, "cli", "_current = _Current()"),
    (state_is_listed, "cli", "class A:\n    seen = []"),
    (state_is_listed, "cli", "@functools.lru_cache(maxsize=None)\ndef f(): ..."),
    (state_is_listed, "cli", "def f():\n    global count\n    count = 1"),
    (constants_stay_constant, "cli", "TABLE = {}\ndef f():\n    TABLE['a'] = 1"),
    (constants_stay_constant, "cli", "from shardwise.rules.algebra import TABLE\ndef f():\n    TABLE.update(a=1)"),
    (errors_are_not_swallowed, "cli", "try: f()\nexcept: raise"),
    (errors_are_not_swallowed, "cli", "try: f()\nexcept (KeyError, Exception): pass"),
    (errors_are_not_swallowed, "cli", "with contextlib.suppress(Exception): f()"),
    (names_say_something, "mesh.utils", "x = 1"),
    (names_say_something, "cli", "class MeshManager: ..."),
    (signatures_are_typed, "cli", "def f(x: 'list[Any]') -> None: ..."),
    (signatures_are_typed, "cli", "def f() -> Any: ..."),
]

SOUND = [
    (imports_point_down, "mesh.world", "from shardwise.errors import WorldError"),
    (imports_point_down, "sim.run", "from shardwise.sim.turns import Turns"),
    (imports_stand_at_the_top, "debug.picture", "def f():\n    import matplotlib.pyplot as plt"),
    (torchs_own_stack_is_not_used, "cli", "import torch.distributed as dist"),
    (no_function_is_long, "cli", "def f():\n    '''" + "\n" * 99 + "'''\n" + "    # why\n\n" * 60 + "    x = 1"),
    (state_is_listed, "cli", "TABLE = {'a': 1}\n__all__ = ['f']\nname = compute(1)"),
    (constants_stay_constant, "cli", "TABLE = {}\nTABLE['a'] = 1\ndef f(own):\n    own['a'] = 1"),
    (errors_are_not_swallowed, "cli", "try: f()\nexcept Exception as error: raise RankError from error"),
    (signatures_are_typed, "comm.functional", "def backward(ctx: Any, grad: object) -> None: ..."),
]


@pytest.mark.parametrize(("law", "name", "source"), BROKEN)
def test_laws_catch(law: Law, name: str, source: str) -> None:
    assert list(law(Module(name, source)))


@pytest.mark.parametrize(("law", "name", "source"), SOUND)
def test_laws_let_pass(law: Law, name: str, source: str) -> None:
    assert not list(law(Module(name, source)))


def test_cycles_are_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert find_cycle({"a": {"b"}, "b": {"a"}, "c": set()}) == ["a", "b"]
