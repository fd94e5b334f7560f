"""Bundles: folders with a model that answers without this library.

::

    model.json              inputs, outputs and stages
    program.pt2             torch.export program; its weights are arguments
    compiled.pt2            the same as machine code, where it was asked for (AOTInductor)
    weights.safetensors     the weights, once
    example.safetensors     one batch, as a client sends it
    answer.py               loads the bundle and answers the example; imports only torch
    manifest.json           size and SHA-256 of each file

A bundle is written to a temporary folder, which is then renamed. After a crash it is complete or absent.

Shape letters: B samples, F sparse features, N ids of all features.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from recshard_lab.arguments import checks_arguments
from recshard_lab.complete_folders import FolderFormat, Staging, described
from recshard_lab.serving.batch import Batch as Batch
from recshard_lab.serving.batch import Inputs as Inputs
from recshard_lab.serving.batch import SparseInput as SparseInput
from recshard_lab.serving.batch import split_answers as split_answers
from recshard_lab.serving.export.compiled import FILE as COMPILED
from recshard_lab.serving.export.compiled import compile_program, load_compiled, machine, why_not
from recshard_lab.serving.export.program import Outputs, arguments_of, check_equal, imports_of, trace, weights_of
from recshard_lab.serving.export.script import answer_script
from recshard_lab.serving.export.stored_program import read_program, write_program
from recshard_lab.serving.export.weights import read_tensors, write_tensors


class BundleError(ValueError):
    """A bundle that is missing, incomplete, damaged, or of another format."""


FORMAT = FolderFormat("bundle", "recshard_lab bundle", 1, BundleError, "save_bundle(model, path)", "model.json")


@runtime_checkable
class Servable(Protocol):
    """What a server needs of a model.

    Attributes:
        inputs: what `predict` takes.
        outputs: keys of what it returns, in order.
    """

    @property
    def inputs(self) -> Inputs: ...

    @property
    def outputs(self) -> tuple[str, ...]: ...

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Each output ``[B]`` or ``[B, ...]``. Threads may call it at the same time."""
        ...


_LOADING = threading.Lock()
"""`torch.export.load` fails if another thread is in it."""


@contextmanager
def _without_notes() -> Iterator[None]:
    """torch writes a line to stderr for each size that a program does not read."""
    logger = logging.getLogger("torch._export.serde.serialize")
    logger.addFilter(_is_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


class ProgramServable:
    """A program with its weights, as a `Servable`.

    Args:
        folder: the bundle.
        content: its model.json.
        compiled: whether to run the compiled program. None: if there is one for this machine.

    Attributes:
        inputs, outputs: as of `Servable`.
        not_compiled: why the program does not run as machine code; None if it does.
    """

    def __init__(self, folder: Path, content: Mapping[str, Any], compiled: bool | None = None) -> None:
        self.inputs = Inputs.from_json(content["inputs"])
        self.outputs: tuple[str, ...] = tuple(content["outputs"])
        self._weights = read_tensors(folder / "weights.safetensors")
        if any("fbgemm_gpu" in stage.get("imports", ()) for stage in content["stages"]):
            try:
                import_module("fbgemm_gpu")  # registers the operators of the program
            except ImportError as error:
                why = "its program has operators of fbgemm_gpu, which is not installed"
                raise BundleError(f"bundle {str(folder)!r} cannot be loaded: {why}. Fix: install fbgemm-gpu") from error
        try:
            with _LOADING, _without_notes():
                program = read_program(folder / "program.pt2").module()
        except ValueError as error:
            raise BundleError(str(error)) from error
        # `forward` skips the hook that compares every weight with its constraints: 28% of a call with one sample
        self._run = self._interpreted = program.forward
        self.not_compiled = "compiled=False" if compiled is False else why_not(content["stages"][0].get("compiled"))
        if self.not_compiled is None:
            self._run = load_compiled(folder)
        elif compiled:
            raise BundleError(f"bundle {str(folder)!r}: {self.not_compiled}. Fix: compiled=None, or save it here")

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Computes the outputs.

        Raises:
            ValueError: shapes or dtypes that the model does not take.
            RuntimeError: an id that is not a row of its table. `Batch.check` names its sample.
        """
        batch.check_shapes(self.inputs)
        weights = batch.weights if self.inputs.weighted else None
        with torch.inference_mode():
            run = self._run if batch.size else self._interpreted  # machine code of torch 2.13 crashes without samples
            answer = run(self._weights, batch.dense, batch.values, batch.lengths.long(), weights)
        return dict(zip(self.outputs, answer, strict=True))


@checks_arguments
def save_bundle(
    model: nn.Module,
    path: str | Path,
    *,
    inputs: Inputs,
    outputs: Any = ("score",),
    example: Batch | None = None,
    compile: bool = False,
) -> None:
    """Exports a model and saves it as a bundle. Replaces a bundle at ``path``.

    Args:
        model: in evaluation mode, not sharded. It takes ``(dense, KeyedJaggedTensor)``, or only the one of both that
            ``inputs`` has, and returns a tensor, a tuple, or a dict of tensors ``[B, ...]``.
        path: the folder. Its name is the version of the bundle.
        inputs: what the model takes. ``Inputs.of(model, dense=[...])`` reads it from the collections.
        outputs: names of the outputs, or a dict of name -> function applied to that output or None, such as
            ``{"probability": torch.sigmoid}``.
        example: a batch to try the bundle with. Default: a random one.
        compile: also compile the program to machine code (AOTInductor), which takes tens of seconds and a C++ compiler.
            It runs where torch and the processor are as here. Everywhere else the program runs.

    Raises:
        BundleError: ``path`` is something else.
        ExportError: the model cannot be exported, or compiled.
        OSError: the disk is full, or ``path`` cannot be written. A bundle there stays as it was.
    """
    named: Outputs = outputs if isinstance(outputs, Mapping) else dict.fromkeys(outputs)
    batch = _random_batch(inputs) if example is None else example
    batch.check(inputs)
    program = trace(model, inputs, named, batch)
    tries = (batch, _random_batch(inputs, 1), _random_batch(inputs, batch.size + 1))
    for tried in tries:
        check_equal(program.module(), model, inputs, named, tried)
    with Staging(FORMAT, Path(path)) as staging:
        write_program(program, staging.path / "program.pt2")
        write_tensors(staging.path / "weights.safetensors", weights_of(model))
        sent = {"dense": batch.dense, "values": batch.values, "lengths": batch.lengths.long(), "weights": batch.weights}
        write_tensors(staging.path / "example.safetensors", {k: each for k, each in sent.items() if each is not None})
        stage: dict[str, Any] = {"name": "model", "kind": "program", "imports": imports_of(program)}
        if compile:
            compile_program(program, arguments_of(model, inputs, batch), staging.path / COMPILED)
            compiled = load_compiled(staging.path)
            for tried in (each for each in tries if each.size):
                check_equal(compiled, model, inputs, named, tried)
            stage["compiled"] = machine()
        imports = stage["imports"]
        script = answer_script(list(named), imports, inputs.weighted)
        (staging.path / "answer.py").write_text(script, encoding="utf-8")
        content = {
            "format": 1,
            "inputs": inputs.to_json(),
            "outputs": list(named),
            "stages": [stage],
        }
        (staging.path / "model.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        staging.commit(described(sorted(staging.path.iterdir())))


@checks_arguments
def load_bundle(path: str | Path, *, check_hashes: bool = False, compiled: bool | None = None) -> Servable:
    """Loads a bundle.

    Args:
        path: the folder.
        check_hashes: also read every file and compare its SHA-256. Sizes are always compared.
        compiled: run the program as machine code. Default: if the bundle has it for this torch and processor. The
            answers are equal.

    Raises:
        BundleError: no bundle, a damaged one, another format, one whose operators are not installed, or one whose
            program has code. `compiled.pt2` is code by design.
    """
    folder = FORMAT.readable(path)
    files = FORMAT.manifest_of(folder)["files"]
    FORMAT.check_files(folder, files, 0 if check_hashes else len(files), 1)
    content = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    if any(stage["kind"] == "index" for stage in content["stages"]):
        from recshard_lab.serving.retrieval.two_stage import RetrieveThenRank

        return RetrieveThenRank.read(folder, content, check_hashes)
    return ProgramServable(folder, content, compiled)


def _random_batch(inputs: Inputs, size: int = 3) -> Batch:
    """A batch with bags of 0 to 2 ids."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 3, (len(inputs.sparse) * size,), generator=draw)
    counts = lengths.reshape(len(inputs.sparse), size).sum(1).tolist()
    ids = [
        torch.randint(0, each.rows or 2**31, (count,), generator=draw)
        for each, count in zip(inputs.sparse, counts, strict=True)
    ]
    values = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64)
    weights = torch.rand(len(values), generator=draw) if inputs.weighted else None
    return Batch(torch.rand(size, len(inputs.dense), generator=draw), values, lengths, weights)
