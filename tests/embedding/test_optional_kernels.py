"""Kernels that are not installed, do not load or cannot be compiled; and where numba's machine code is stored."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recshard_lab.embedding.kernels import available
from recshard_lab.embedding.kernels.numba import compiled
from tests.patience import scaled

needs_numba = pytest.mark.skipif("numba" not in available(), reason="needs numba")

ABSENT = """
import importlib.abc, importlib.util, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.startswith(ABSENT) else found(name, *rest)
"""
BROKEN = """
import types
broken = types.ModuleType("fbgemm_gpu")
broken.__spec__ = importlib.util.spec_from_loader("fbgemm_gpu", None)
sys.modules["fbgemm_gpu"] = broken  # its submodules cannot be imported
"""
PROGRAM = """
import sys
import torch
from recshard_lab.embedding import EmbeddingBagConfig, FusedEmbeddingBagCollection
from recshard_lab.embedding.kernels import available, kernel_named, kernel_names
from recshard_lab.sparse import KeyedJaggedTensor

table = EmbeddingBagConfig(4, 4, "t", feature_names=["f"], init_fn=torch.nn.init.zeros_)
for _ in range(2):
    fused = FusedEmbeddingBagCollection([table], torch.optim.SGD, {"lr": 1.0})
fused(KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))).values().sum().backward()
print(fused.backend, fused.state_dict()["embedding_bags.t.weight"].sum().item())
print("numba" in sys.modules)
for backend in ("numba", "fbgemm"):
    try:
        FusedEmbeddingBagCollection([table], torch.optim.SGD, {"lr": 1.0}, backend=backend)
        print("served")
    except ValueError as error:
        print(error)
print(available(), kernel_names())
"""


@pytest.fixture
def fresh() -> Iterator[None]:
    compiled._folder.cache_clear()
    yield
    compiled._folder.cache_clear()


def run(before: str = "", **environment: str) -> tuple[list[str], str]:
    command, env = [sys.executable, "-c", before + PROGRAM], {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=scaled(120), env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_without_fbgemm_and_numba_the_native_kernel_serves_all_and_one_notice_names_each() -> None:
    out, err = run('ABSENT = ("numba", "fbgemm_gpu")' + ABSENT)
    assert out[0] == "native -4.0"
    assert "numba is not installed (pip install" in out[2]
    assert out[3].startswith("no kernel can serve this lookup (fbgemm: fbgemm_gpu is not installed")
    assert "fbgemm_gpu is not installed (pip install" in out[3]
    assert out[4] == "['native'] ['fbgemm', 'native', 'numba']"
    assert err.count("kernel 'fbgemm' is not used") == 1
    assert err.count("kernel 'numba' is not used") == 1


def test_an_fbgemm_that_does_not_load_is_treated_as_absent_with_the_reason() -> None:
    out, err = run('ABSENT = ("numba",)' + ABSENT + BROKEN)
    assert out[0] == "native -4.0"
    assert "does not load beside torch" in out[3]
    assert out[4].startswith("['native']")
    assert err.count("kernel 'fbgemm' is not used") == 1


@needs_numba
def test_a_process_that_finds_the_code_does_not_import_numba() -> None:
    out, err = run()
    assert out[:3] == ["numba -4.0", "False", "served"]
    assert err == ""


@needs_numba
def test_code_that_cannot_be_compiled_is_no_kernel_and_another_is_taken_by_itself(tmp_path: Path) -> None:
    out, err = run(NUMBA_CACHE_DIR=str(tmp_path), NUMBA_DISABLE_JIT="1")
    assert out[0] in ("fbgemm -4.0", "native -4.0")
    assert out[2].startswith("no kernel can serve this lookup (numba: its loops cannot be compiled or loaded here: ")
    assert err.count("kernel 'numba' is not used: its loops cannot be compiled") == 1


@needs_numba
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("obstacle", ["a file", "open to others"])
def test_where_the_code_cannot_be_kept_safely_it_is_kept_among_the_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    asked = tmp_path / "asked"
    if obstacle == "a file":
        asked.touch()
    else:
        asked.mkdir()
        asked.chmod(0o777)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(asked))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "asked" / "no" if obstacle == "a file" else "/proc/nowhere"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = compiled._folder()
    assert folder is not None
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@needs_numba
@pytest.mark.usefixtures("fresh")
def test_where_nothing_can_be_kept_that_is_said_and_the_loop_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "/proc/nowhere")
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    monkeypatch.setattr(compiled, "_compile", lambda *_: ("symbol", b"code"))
    compiled.notice_once.cache_clear()
    assert compiled._machine_code("pool", *compiled._LOOPS["pool"]) == ("symbol", b"code")
    assert "Every process compiles them (about 5 s)" in caplog.text


@needs_numba
@pytest.mark.usefixtures("fresh")
def test_damaged_code_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    made = []
    monkeypatch.setattr(compiled, "_compile", lambda *_: made.append(1) or ("symbol", b"code\nof many lines"))
    for times in (1, 1, 2, 2):
        if times > len(made) > 0:
            (path,) = tmp_path.glob("*.loop")
            path.write_bytes(path.read_bytes()[:-3])
        assert compiled._machine_code("pool", *compiled._LOOPS["pool"]) == ("symbol", b"code\nof many lines")
        assert len(made) == times
