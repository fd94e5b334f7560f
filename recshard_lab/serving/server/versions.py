"""The model that is served: versions in a folder, the swap to a newer one, and the end of the old one.

A *version* is a folder with a ``model.json``; its name is the version. Numbers in names are compared as numbers, so
that ``v10`` is newer than ``v9``. Write a new version under a name that starts with a dot, then rename it. The rename
is atomic, and the server never sees half of a version.
"""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from recshard_lab.serving.bundle import Batch, Servable
from recshard_lab.serving.server.bodies import Decoder, example
from recshard_lab.serving.server.config import ServerConfig
from recshard_lab.serving.server.log import Log
from recshard_lab.serving.server.metrics import Metrics

if TYPE_CHECKING:
    from numpy.typing import NDArray

MARK = "model.json"
"""A folder with this file is a version."""


@dataclass(frozen=True, eq=False)
class Version:
    """A loaded model.

    Args:
        name: of its folder.
        model: computes.
        decoder: checks requests against its inputs.
        seconds: time that loading and the first calls took.
    """

    name: str
    model: Servable
    decoder: Decoder
    seconds: float = 0.0

    def predict(self, batches: Sequence[Batch]) -> Iterator[Mapping[str, NDArray[Any]]]:
        """The outputs of each batch, from one call of the model. Outputs are ``[B]`` or ``[B, ...]``.

        Raises:
            RuntimeError: an output has another number of samples.
        """
        merged = batches[0] if len(batches) == 1 else Batch.cat(batches)
        samples = len(merged.dense)
        outputs = {}
        for name, tensor in self.model.predict(merged).items():
            if tensor.ndim == 0 or len(tensor) != samples:
                raise RuntimeError(f"output {name!r} has the shape {list(tensor.shape)} for {samples} samples")
            tensor = tensor.detach().cpu()
            outputs[name] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        start = 0
        for batch in batches:
            end = start + len(batch.dense)
            yield {name: output[start:end] for name, output in outputs.items()}
            start = end

    def stage_seconds(self) -> Mapping[str, float]:
        """Seconds of each stage in the last `predict` of this thread, of a model with stages. Otherwise empty."""
        stages = getattr(self.model, "stage_seconds", None)
        return {} if stages is None else stages()


def version_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts names with their numbers as numbers.

    >>> sorted(["v10", "v9", "v9-fixed", "2026-11-02"], key=version_key)
    ['2026-11-02', 'v9', 'v9-fixed', 'v10']
    """
    words = re.findall(r"\d+|\D+", name)
    return [(0, int(word), word) if word.isdecimal() else (1, 0, word) for word in words]


def find_versions(path: Path) -> list[Path]:
    """Folders that can be served, the newest first. `path` itself if it is a bundle.

    Raises:
        FileNotFoundError: `path` is not a folder, or contains no version.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{str(path)!r} is not a folder. Fix: pass the folder of a bundle.")
    if (path / MARK).is_file():
        return [path]
    found = [one for one in path.iterdir() if not one.name.startswith(".") and (one / MARK).is_file()]
    if not found:
        raise FileNotFoundError(
            f"{str(path)!r} contains no bundle: neither it nor a folder in it has a {MARK}. Fix: write one with "
            f"recshard export, or in Python with recshard_lab.serving.save_bundle."
        )
    return sorted(found, key=lambda one: version_key(one.name), reverse=True)


def _identity(folder: Path) -> tuple[str, int, int]:
    """Changes when a folder is replaced by another of the same name."""
    status = (folder / MARK).stat()
    return folder.name, status.st_ino, status.st_mtime_ns


@dataclass
class Versions:
    """The served version, and how the next one replaces it.

    Args:
        config: options.
        metrics: counters to update.
        log: where swaps and refusals are written.
    """

    config: ServerConfig
    metrics: Metrics
    log: Log
    current: Version | None = None
    _identity: tuple[str, int, int] | None = None
    _refused: set[tuple[str, int, int]] = field(default_factory=set)
    _busy: threading.Lock = field(default_factory=threading.Lock)

    def load(self, folder: Path) -> Version:
        """Loads a version and computes two examples with it, of one sample and of a whole batch."""
        begun = time.perf_counter()
        module, _, function = self.config.loader.partition(":")
        model: Servable = getattr(import_module(module), function)(folder)
        decoder = Decoder(model.inputs, self.config.max_samples, self.config.max_ids)
        version = Version(folder.name, model, decoder)
        with torch.inference_mode():
            for samples in dict.fromkeys((1, 2, self.config.max_batch)):
                list(version.predict([example(model.inputs, samples)]))
        return Version(folder.name, model, decoder, time.perf_counter() - begun)

    def refresh(self, retry: bool = False) -> list[str]:
        """Serves the newest version that loads. Returns why newer ones were refused. Blocks: call it in a thread.

        Args:
            retry: load versions again that were refused before.
        """
        with self._busy:
            refusals = []
            found = {folder: _identity(folder) for folder in find_versions(Path(self.config.path))}
            self._refused &= set(found.values())
            for folder, identity in found.items():
                if identity == self._identity:
                    break
                if not retry and identity in self._refused:
                    continue
                try:
                    version = self.load(folder)
                except Exception as error:
                    self._refused.add(identity)
                    serving = self.current.name if self.current else None
                    refusals.append(f"version {folder.name!r} was refused: {type(error).__name__}: {error}")
                    self.metrics.swaps.labels("refused").inc()
                    self.log.error("version_refused", error, version=folder.name, serving=serving)
                    continue
                self._swap(version, identity)
                break
            return refusals

    def _swap(self, version: Version, identity: tuple[str, int, int]) -> None:
        old, self.current, self._identity = self.current, version, identity
        self.metrics.swaps.labels("loaded").inc()
        self.metrics.version.labels(version.name).set(1)
        self.log.info(
            "version_loaded",
            version=version.name,
            seconds=round(version.seconds, 3),
            replaces=old and old.name,
            not_compiled=getattr(version.model, "not_compiled", "not a program"),
        )
        if old is not None:
            if old.name != version.name:
                self.metrics.version.labels(old.name).set(0)
            del old
            gc.collect()  # programs contain reference cycles

    async def watch(self) -> None:
        """Looks for a new version every `watch_s` seconds, until it is cancelled."""
        while True:
            await asyncio.sleep(self.config.watch_s)
            try:
                await asyncio.to_thread(self.refresh)
            except OSError as error:
                self.log.error("watch_failed", error)
