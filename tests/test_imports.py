"""What importing costs and pulls in, seen from fresh interpreters; and that the rooms keep to themselves."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import recshard_lab
from recshard_lab.launcher.engines.fork import LATER

PACKAGE = Path(recshard_lab.__file__).parent
ROOMS = sorted(folder.parent.name for folder in PACKAGE.glob("*/__init__.py"))


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_beyond_torch(code: str) -> set[str]:
    """Modules that `code` loads and `import torch` does not."""
    program = f"import torch, sys; before = set(sys.modules); {code}; print(*sorted(set(sys.modules) - before))"
    return set(run_python(program).split())


def test_importing_the_library_loads_no_other_package() -> None:
    loaded = run_python(
        "import importlib, os, typing, ast, lazy_loader, sys; before = set(sys.modules); import recshard_lab; "
        "print(*sorted(set(sys.modules) - before))"
    )
    assert loaded.split() == ["recshard_lab"]


def test_every_room_is_an_attribute_of_the_library_in_a_fresh_interpreter() -> None:
    code = f"import recshard_lab as rs; [print(getattr(rs, room).__name__) for room in {ROOMS}]"
    assert run_python(code).split() == [f"recshard_lab.{room}" for room in ROOMS]


@pytest.mark.gate
def test_every_name_of_the_stubs_is_there_in_a_fresh_interpreter() -> None:
    """Also where all names are imported at once, in any order, as EAGER_IMPORT of lazy_loader does."""
    packages = [".".join(stub.relative_to(PACKAGE.parent).parent.parts) for stub in PACKAGE.rglob("__init__.pyi")]
    assert len(packages) > 5
    code = (
        f"from importlib import import_module as load; "
        f"[getattr(load(package), name) for package in {packages} for name in dir(load(package))]"
    )
    run_python(code)
    run_python(f"import os; os.environ['EAGER_IMPORT'] = '1'; {code}")


def test_the_wheel_has_the_stubs_and_the_marker_of_types() -> None:
    data = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert (PACKAGE / "py.typed").is_file()
    assert "*.pyi" in data["*"]
    assert "py.typed" in data["recshard_lab"]


def test_the_forkserver_loads_what_a_training_uses() -> None:
    """A rank would otherwise import it on first use."""
    later = f"import importlib; [importlib.import_module(name) for name in {LATER} if name.startswith('recshard_lab')]"
    used = (
        "import recshard_lab as rs; "
        "rs.DistributedModelParallel, rs.distributed.EmbeddingBagCollectionSharder, rs.DLRM, rs.train.Recipe, "
        "rs.train.TrainPipelineSparseDist, rs.train.auc"
    )
    code = f"import sys; {later}; before = set(sys.modules); {used}; print(*set(sys.modules) - before)"
    assert run_python(code).split() == []


def test_importing_the_rooms_that_a_rank_needs_loads_no_notebook_library() -> None:
    modules = ", ".join(name for name in LATER if name.startswith("recshard_lab"))
    loaded = {module.partition(".")[0] for module in loaded_beyond_torch(f"import {modules}, recshard_lab.data")}
    assert not loaded & {"IPython", "ipywidgets", "plotly", "jupyterlab", "anywidget", "scipy"}


def test_an_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(AttributeError, match="ShardingPlann"):
        recshard_lab.ShardingPlann  # noqa: B018


def test_a_name_of_a_room_is_refused_with_its_room_and_no_room_is_imported() -> None:
    names = ("RowWiseAdagrad", "read_tables", "measure_plan", "TrainPipelineSparseDist", "Frobnicate")
    code = (
        "import sys, recshard_lab as rs\n"
        f"for name in {names}:\n"
        "    try:\n        getattr(rs, name)\n    except AttributeError as error:\n        print(error)\n"
        "print('torch' in sys.modules, 'recshard_lab.optim' in sys.modules, hasattr(rs, '__wrapped__'))"
    )
    fixes = [f"use rs.{room}.{name}" for room, name in zip(("optim", "planner", "lab", "train"), names, strict=False)]
    fixes.append("dir(recshard_lab) lists its names")
    told = [f"recshard_lab has no {name!r}. Fix: {fix}" for name, fix in zip(names, fixes, strict=True)]
    assert run_python(code).splitlines() == [*told, "False False False"]


@pytest.mark.parametrize("room", ["planner", "sharding"])
def test_planning_imports_no_tensor_library(room: str) -> None:
    for file in (PACKAGE / room).rglob("*.py"):
        tree = ast.parse(file.read_text())
        imported = {
            name
            for node in (ast.walk(tree) if room == "planner" else tree.body)  # sharding may, inside functions
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        }
        assert not {name for name in imported if name.partition(".")[0] == "torch"}, file


def test_importing_torchrec_is_never_needed() -> None:
    apparatus = PACKAGE.parent / "benchmarks" / "apparatus"
    # run in TorchRec's own environment alone
    names = ("lookup_theirs.py", "step_theirs.py", "plan_theirs.py", "train_theirs.py", "torchrec_dlrm.py")
    theirs = {apparatus / name for name in names}
    both_ways = PACKAGE / "compat" / "plans.py"  # when one of its functions is called
    assert all(file.exists() for file in theirs)
    for file in {*PACKAGE.rglob("*.py"), *apparatus.parent.rglob("*.py")} - theirs:
        tree = ast.parse(file.read_text())
        for node in tree.body if file == both_ways else ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").partition(".")[0] != "torchrec", file
            if isinstance(node, ast.Import):
                assert all(alias.name.partition(".")[0] != "torchrec" for alias in node.names), file
