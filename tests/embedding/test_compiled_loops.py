"""numba's machine code: where it is stored, damaged files, and the notice if it cannot be stored."""

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

pytestmark = pytest.mark.skipif("numba" not in available(), reason="needs numba")

PROGRAM = """
import torch
from recshard_lab.embedding import EmbeddingBagConfig, FusedEmbeddingBagCollection
from recshard_lab.sparse import KeyedJaggedTensor

table = EmbeddingBagConfig(4, 4, "t", feature_names=["f"], init_fn=torch.nn.init.zeros_)
fused = FusedEmbeddingBagCollection([table], torch.optim.SGD, {"lr": 1.0})
fused(KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))).values().sum().backward()
print(fused.backend, fused.state_dict()["embedding_bags.t.weight"].sum().item())
try:
    FusedEmbeddingBagCollection([table], torch.optim.SGD, {"lr": 1.0}, backend="numba")
except ValueError as error:
    print(error)
import sys
print("numba" in sys.modules)
"""


@pytest.fixture
def fresh() -> Iterator[None]:
    compiled._folder.cache_clear()
    yield
    compiled._folder.cache_clear()


def run(**environment: str) -> tuple[list[str], str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_a_process_that_finds_the_code_does_not_import_numba() -> None:
    out, err = run()
    assert out == ["numba -4.0", "False"]
    assert err == ""


def test_code_that_cannot_be_compiled_is_no_kernel_and_another_is_taken_by_itself(tmp_path: Path) -> None:
    out, err = run(NUMBA_CACHE_DIR=str(tmp_path), NUMBA_DISABLE_JIT="1")
    assert out[0] in ("fbgemm -4.0", "native -4.0")
    assert out[1].startswith("no kernel can serve this lookup (numba: its loops cannot be compiled or loaded here: ")
    assert err.count("kernel 'numba' is not used: its loops cannot be compiled") == 1


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
