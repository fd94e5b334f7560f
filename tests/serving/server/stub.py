"""A model whose answers are known: the sum of a sample's ids and dense values, times the scale of its version."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recshard_lab.serving import Batch, Inputs, SparseInput

LOADER = "tests.serving.server.stub:load"
INPUTS = Inputs(("age", "price"), (SparseInput("movie", 1000), SparseInput("user", None)))


class Stub:
    """Computes ``scale * (sum of ids + sum of dense)``; sleeps or fails where it is told."""

    def __init__(self, options: dict[str, Any], inputs: Inputs = INPUTS) -> None:
        self.inputs, self.outputs, self.options = inputs, ("probability",), options
        self.calls: list[int] = []

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        samples = len(batch.dense)
        self.calls.append(samples)
        time.sleep(self.options.get("sleep_s", 0))
        if 13 in batch.values:
            raise RuntimeError("13 is refused")
        bags = torch.arange(len(batch.lengths)).repeat_interleave(batch.lengths.long()) % samples
        values = batch.values.double() * (1 if batch.weights is None else batch.weights.double())
        sums = torch.zeros(samples, dtype=torch.float64).index_add_(0, bags, values)
        return {"probability": self.options.get("scale", 1.0) * (sums + batch.dense.double().sum(1))}


def load(folder: Path) -> Stub:
    """The model of a folder that `write` wrote."""
    options = json.loads((folder / "model.json").read_text())
    if options.get("broken"):
        raise ValueError("this version is broken")
    found = Stub(options)
    if megabytes := options.get("megabytes"):
        found.weight = torch.ones(megabytes * 250_000)  # type: ignore[attr-defined]
    return found


def write(folder: Path, name: str, **options: Any) -> Path:
    """A version, complete at once."""
    hidden = folder / f".{name}"
    hidden.mkdir(parents=True)
    (hidden / "model.json").write_text(json.dumps(options))
    return hidden.rename(folder / name)


def batch(*ids: int, samples: int = 1) -> Batch:
    """Samples with `ids` as movies, no users and zeros."""
    lengths = torch.tensor([len(ids)] * samples + [0] * samples)
    return Batch(torch.zeros(samples, 2), torch.tensor(ids * samples, dtype=torch.int64), lengths)


def request(movie: int = 5, user: int = 7) -> dict[str, Any]:
    """One sample for `Client.predict`."""
    return {"dense": {"age": [0.0], "price": [0.0]}, "sparse": {"movie": [[movie]], "user": [[user]]}}
