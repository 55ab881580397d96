"""The public names, all of them: a change of what users see is a change of this file."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FACES = {
    "shardwise": [
        # worlds
        "World",
        "current_world",
        "dry_world",
        "use_world",
        # meshes
        "DeviceMesh",
        "current_mesh",
        "init_device_mesh",
        # placements
        "Owned",
        "Partial",
        "Placement",
        "RaggedShard",
        "Replicate",
        "Shard",
        "StridedShard",
        "topology",
        # tensors
        "DTensor",
        "distribute_module",
        "distribute_tensor",
        "empty",
        "explicit",
        "full",
        "implicit_replication",
        "ones",
        "rand",
        "randn",
        "zeros",
        "local_map",
        # rules
        "register_rule",
        "register_sharding",
        "replicate_unknown",
        "unregister_rule",
        # errors
        "ArgumentError",
        "AxisError",
        "AxisNameError",
        "CollectiveError",
        "CollectiveMismatchError",
        "CollectiveTimeoutError",
        "DeadlockError",
        "DistributedTwiceError",
        "EquationError",
        "InplaceError",
        "LeafError",
        "MeshError",
        "MeshMismatchError",
        "MixedTensorError",
        "NotInMeshError",
        "ParallelPlanError",
        "PlacementError",
        "RankError",
        "RedistributeError",
        "RuleError",
        "ShardwiseError",
        "ViewError",
        "WorldError",
        "WrongRuleError",
    ],
    "shardwise.collectives": [
        "AsyncCollectiveTensor",
        "all_gather_into_tensor_coalesced",
        "all_gather_single",
        "all_gather_single_autograd",
        "all_gather_single_coalesced",
        "all_gather_tensor",
        "all_gather_tensor_autograd",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all_single",
        "all_to_all_single_autograd",
        "broadcast",
        "permute_tensor",
        "reduce_scatter_single",
        "reduce_scatter_single_autograd",
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_autograd",
        "reduce_scatter_tensor_coalesced",
        "sum_backward",
        "sum_forward",
        "wait_tensor",
    ],
    "shardwise.parallel": [
        "ColwiseParallel",
        "ParallelStyle",
        "PrepareModuleInput",
        "PrepareModuleInputOutput",
        "PrepareModuleOutput",
        "RowwiseParallel",
        "SequenceParallel",
        "loss_parallel",
        "parallelize_module",
    ],
    "shardwise.sim": [
        "CollectiveMismatchError",
        "DeadlockError",
        "RankError",
        "run",
    ],
    "shardwise.testing": [
        "check_rule",
    ],
    "shardwise.checkpoint": [],
    "shardwise.debug": [
        "CommCounts",
        "CommDebugMode",
        "Traffic",
        "explain",
        "explanation",
        "guard",
        "sharding_picture",
        "traffic_table",
        "visualize_sharding",
    ],
}

# Modules that `import shardwise` must not load: PyTorch's own stack, and what is slow.
UNWANTED = ["torch.distributed.tensor", "torch._dynamo", "torch._inductor", "matplotlib", "pytest"]

NAMES = [(face, name) for face, names in FACES.items() for name in names]


def load(face: str) -> ModuleType:
    return importlib.import_module(face)


def is_naming(node: ast.stmt) -> bool:
    """Whether a statement of a face only names things: imports, dunders, a docstring, the call of `expose`."""
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.unparse(node) == "expose(__name__, globals(), __all__)"
    return isinstance(node, ast.Import | ast.ImportFrom | ast.Expr)


@pytest.mark.parametrize("face", FACES)
def test_face_lists_exactly_these_names(face: str) -> None:
    assert sorted(load(face).__all__) == sorted(FACES[face])
    assert len(set(FACES[face])) == len(FACES[face])


@pytest.mark.parametrize("face", FACES)
def test_face_shows_nothing_else(face: str) -> None:
    visible = {name for name, item in vars(load(face)).items() if not isinstance(item, ModuleType)}
    ours = {name for name in visible - {"annotations", "expose"} if not name.startswith("_")}
    assert ours == set(FACES[face])


@pytest.mark.parametrize("face", FACES)
def test_face_names_things_and_defines_none(face: str) -> None:
    source = Path(inspect.getfile(load(face))).read_text()
    body = ast.parse(source).body
    assert [ast.unparse(node) for node in body if not is_naming(node)] == []
    assert ast.get_docstring(ast.parse(source)), "a face says in its docstring what it is for"


def test_every_error_is_exported() -> None:
    errors = {name for name, item in vars(load("shardwise.errors")).items() if isinstance(item, type)}
    assert errors <= set(FACES["shardwise"])


@pytest.mark.parametrize(("face", "name"), NAMES)
def test_name_shows_a_public_module_and_is_documented(face: str, name: str) -> None:
    item = getattr(load(face), name)
    assert item.__module__ in FACES, f"{face} must end with expose(__name__, globals(), __all__)"
    assert getattr(load(item.__module__), name) is item
    assert vars(item)["__doc__"] if isinstance(item, type) else item.__doc__


@pytest.mark.parametrize(("face", "name"), NAMES)
def test_name_pickles_by_its_public_module(face: str, name: str) -> None:
    item = getattr(load(face), name)
    assert pickle.loads(pickle.dumps(item)) is item


@pytest.mark.parametrize("unwanted", UNWANTED)
def test_import_is_lean(loaded: set[str], unwanted: str) -> None:
    assert unwanted not in loaded


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    program = "import sys, shardwise; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())
