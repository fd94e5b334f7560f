"""Bundles as machine code: equal answers, and the program where the machine differs."""

import shutil
from pathlib import Path

import pytest
import torch

from recshard_lab import quantize_embeddings
from recshard_lab.serving import BundleError, Inputs, load_bundle, save_bundle
from recshard_lab.serving.export import compiled
from recshard_lab.serving.export.refusals import ExportError
from tests.serving.bundles import COLUMNS, batch_of, dlrm

needs_compiler = pytest.mark.needs("g++")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with INT8 tables and a dense part, compiled."""
    path = tmp_path_factory.mktemp("compiled") / "v1"
    model = quantize_embeddings(dlrm(), "int8")
    save_bundle(model, path, inputs=Inputs.of(model, COLUMNS), compile=True)
    return path


@pytest.mark.gate
@needs_compiler
def test_machine_code_answers_as_the_program(folder: Path) -> None:
    fast, plain = load_bundle(folder, compiled=True), load_bundle(folder, compiled=False)
    assert fast.not_compiled is None  # type: ignore[attr-defined]
    assert plain.not_compiled == "compiled=False"  # type: ignore[attr-defined]
    assert load_bundle(folder).not_compiled is None  # type: ignore[attr-defined]
    for size in (0, 1, 2, 7, 64):
        for most in (0, 3):  # without ids, and with
            batch = batch_of(fast.inputs, size, most)
            answer, expected = fast.predict(batch)["score"], plain.predict(batch)["score"]
            assert answer.shape == (size,)
            torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-6)
    wrong = batch_of(fast.inputs, 3)
    wrong.values[0] = 50
    with pytest.raises(RuntimeError, match="an id is not a row of its table"):
        fast.predict(wrong)


@pytest.mark.gate
@needs_compiler
def test_another_machine_runs_the_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = compiled.machine()
    monkeypatch.setattr(compiled, "machine", lambda: {**here, "architecture": "riscv64"})
    other = load_bundle(folder)
    assert "riscv64" in str(other.not_compiled)  # type: ignore[attr-defined]
    assert other.predict(batch_of(other.inputs, 2))["score"].shape == (2,)
    with pytest.raises(BundleError, match="it is compiled for architecture"):
        load_bundle(folder, compiled=True)


def test_a_bundle_without_machine_code_says_so(tmp_path: Path) -> None:
    model = dlrm()
    save_bundle(model, tmp_path / "1", inputs=Inputs.of(model, COLUMNS))
    assert load_bundle(tmp_path / "1").not_compiled == "the bundle has no compiled program"  # type: ignore[attr-defined]
    with pytest.raises(BundleError, match="has no compiled program"):
        load_bundle(tmp_path / "1", compiled=True)


def test_without_a_compiler_the_export_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    model = dlrm()
    with pytest.raises(ExportError, match="Fix: apt-get install g"):
        save_bundle(model, tmp_path / "1", inputs=Inputs.of(model, COLUMNS), compile=True)
    assert not (tmp_path / "1").exists()
