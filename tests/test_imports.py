"""What importing costs and pulls in, seen from fresh interpreters; and that the rooms keep to themselves."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import recshard_lab

PACKAGE = Path(recshard_lab.__file__).parent
HEAVY = ["IPython", "ipywidgets", "plotly", "jupyterlab", "anywidget", "scipy", "fbgemm_gpu", "torchmetrics", "rich"]


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
        "import importlib, os, typing, sys; before = set(sys.modules); import recshard_lab; "
        "print(*sorted(set(sys.modules) - before))"
    )
    assert loaded.split() == ["recshard_lab"]


def test_importing_the_rooms_that_a_rank_needs_loads_no_notebook_library() -> None:
    code = "import recshard_lab.distributed, recshard_lab.train, recshard_lab.models, recshard_lab.data"
    loaded = {module.partition(".")[0] for module in loaded_beyond_torch(code)}
    assert not loaded & {"IPython", "ipywidgets", "plotly", "jupyterlab", "anywidget", "scipy"}


def test_the_job_that_the_demo_runs_on_ranks_loads_no_notebook_library() -> None:
    loaded = {module.partition(".")[0] for module in loaded_beyond_torch("import recshard_lab.lab.demo.experiment")}
    assert not loaded & {"IPython", "ipywidgets", "plotly", "jupyterlab", "anywidget", "scipy"}


@pytest.mark.parametrize("name", recshard_lab.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(recshard_lab, name) is not None


def test_an_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ShardingPlann'"):
        recshard_lab.ShardingPlann  # noqa: B018


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
