"""TorchRec's names are this library's classes; the import of any other name raises an error with the nearest one."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import recshard_lab
from recshard_lab.compat import torchrec as shim
from recshard_lab.compat.coverage_table import coverage, report
from recshard_lab.compat.difference_list import differences, differences_of
from recshard_lab.compat.not_served import explain, reason_of
from recshard_lab.compat.served import served_modules
from recshard_lab.compat.torchrec_names import PUBLIC
from tests.grid import every


def run_python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.path[:0] = {[str(entry) for entry in path]!r}\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.fixture
def other_torchrec(tmp_path: Path) -> Path:
    """A folder with another package of that name."""
    (tmp_path / "torchrec").mkdir()
    (tmp_path / "torchrec" / "__init__.py").write_text("mine = False\n")
    return tmp_path


@every(sorted(served_modules()))
def test_every_name_that_the_table_serves_is_there(module: str, served: None) -> None:
    imported = importlib.import_module(module)
    for name in served_modules()[module]:
        assert getattr(imported, name) is not None
        assert name in dir(imported)


def test_the_classes_served_are_this_librarys_own(served: None) -> None:
    import torchrec
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    assert torchrec.KeyedJaggedTensor is KeyedJaggedTensor is recshard_lab.KeyedJaggedTensor
    assert torchrec.distributed.DistributedModelParallel is DistributedModelParallel


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "from torchrec.distributed.planner.enumerators import GUARDED_COMPUTE_KERNELS",
            "GUARDED_COMPUTE_KERNELS .*in storage.*fused_uvm_caching",
        ),
        ("from torchrec.distributed.planner import EmbeddingEnumerator", "it is in torchrec.*enumerators"),
        ("from torchrec.inference.modules import quantize_dense", "quantize_dense .*quantized inference"),
        ("from torchrec.quant.utils import populate_fx_names", "populate_fx_names .*fbgemm's lookup modules"),
        ("import torchrec.metrics.cpu_offloaded_metric_module", "another process.*REC_METRICS_MAPPING"),
        ("from torchrec import KeyedJagedTensor", "did you mean 'KeyedJaggedTensor'"),
        ("from torchrec.distributed.types import KeyedJaggedTensor", "it is in torchrec$"),
        ("import torchrec.distribted", "did you mean 'torchrec.distributed'"),
    ],
)
def test_a_name_that_is_not_served_is_refused_where_it_is_imported(served: None, code: str, says: str) -> None:
    with pytest.raises(ImportError, match=says):
        exec(code)


def test_a_name_that_is_not_served_is_no_attribute(served: None) -> None:
    import torchrec.distributed.planner.enumerators as enumerators

    assert not hasattr(enumerators, "GUARDED_COMPUTE_KERNELS")
    with pytest.raises(AttributeError, match="GUARDED_COMPUTE_KERNELS"):
        enumerators.GUARDED_COMPUTE_KERNELS  # noqa: B018


def test_uninstalling_takes_every_module_away() -> None:
    shim.install(shadow=True)
    importlib.import_module("torchrec.distributed.planner")
    shim.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == "torchrec"]
    assert not shim.installed()


@pytest.mark.gate
def test_an_installed_torchrec_is_not_shadowed_unless_asked_for(other_torchrec: Path) -> None:
    install = "from recshard_lab.compat.torchrec import install; "
    refused = run_python(f"{install} install()", other_torchrec)
    assert refused.returncode == 1
    assert "install(shadow=True)" in refused.stderr
    told = run_python(f"{install} install(shadow=True); import torchrec; print(torchrec.KeyedTensor)", other_torchrec)
    assert "recshard_lab" in told.stdout, told.stderr


def test_a_torchrec_in_use_is_never_shadowed(other_torchrec: Path) -> None:
    code = "import torchrec; from recshard_lab.compat.torchrec import install; install(shadow=True)"
    done = run_python(code, other_torchrec)
    assert "fresh interpreter" in done.stderr


def test_processes_started_while_it_is_installed_serve_the_names_too(served: None) -> None:
    done = run_python("import recshard_lab, torchrec; print(torchrec.JaggedTensor.__module__)")
    assert done.stdout.split() == ["recshard_lab.sparse.jagged_tensor"], done.stderr


def test_a_process_with_a_torchrec_of_its_own_keeps_it(other_torchrec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shim.FOR_CHILDREN, "install")
    done = run_python("import recshard_lab, torchrec; print(torchrec.mine)", other_torchrec)
    assert done.stdout.split() == ["False"], done.stderr


def test_without_install_nothing_is_served() -> None:
    code = "import recshard_lab, sys; print([f for f in sys.meta_path if 'recshard' in type(f).__module__])"
    assert run_python(code).stdout.split() == ["[]"]


def test_the_coverage_counts_every_public_name_once() -> None:
    found = coverage()
    assert {entry.module for entry in found} == set(PUBLIC)
    assert all(sorted(entry.served + entry.missing) == sorted(PUBLIC[entry.module].split()) for entry in found)
    assert "populate_fx_names (names and bytes of fbgemm" in report()


def test_every_public_name_that_is_not_served_has_a_reason() -> None:
    paths = [f"{entry.module}.{name}" for entry in coverage() for name in entry.missing]
    assert not [path for path in paths if reason_of(path) is None]
    assert all(re.search(r" \(.+\)\. Nearest here: .+", explain(path)) for path in paths)


def test_names_that_differ_are_names_of_torchrec_and_served() -> None:
    public = {name for text in PUBLIC.values() for name in text.split()}
    for entry in differences().rows:
        assert set(entry.names) <= public, entry
        assert all(differences_of(name) for name in entry.names)


def test_install_refuses_a_wrong_argument_and_serves_nothing() -> None:
    with pytest.raises(ValueError, match=r"shadow must be bool, got 'yes'"):
        shim.install("yes")  # type: ignore[arg-type]
    assert not shim.installed()


def test_a_function_is_served_in_front_of_a_module_of_its_name(served: None) -> None:
    from torchrec.optim import apply_optimizer_in_backward

    submodule = importlib.import_module("torchrec.optim.apply_optimizer_in_backward")
    import torchrec.optim

    assert callable(apply_optimizer_in_backward)
    assert torchrec.optim.apply_optimizer_in_backward is apply_optimizer_in_backward
    assert submodule.apply_optimizer_in_backward is apply_optimizer_in_backward
