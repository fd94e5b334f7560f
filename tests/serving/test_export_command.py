"""`recshard export` makes a bundle of a training run, which answers what the trained model answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from recshard_lab.cli import app
from recshard_lab.embedding import quantize_embeddings
from recshard_lab.serving import load_bundle
from recshard_lab.train.job import TrainConfig, TrainingRun, load_trained, read_config
from tests.serving.bundles import batch_of

CLICKS = {"name": "synthetic-criteo", "num_samples": 64, "test_samples": 8, "rows": [40, 300, 7]}
RATINGS = {"name": "synthetic-ratings", "num_ratings": 400}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "clicks": ({"name": "dlrm", "embedding_dim": 8, "over_arch_layer_sizes": [8, 1]}, CLICKS, ["probability"]),
    "two towers": ({"name": "two_tower", "embedding_dim": 8, "layer_sizes": [8]}, RATINGS, ["query", "candidate"]),
}


def export(*words: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, words)])


@pytest.mark.parametrize("name", list(RUNS))
def test_a_bundle_of_a_run_answers_what_the_run_predicts(name: str, tmp_path: Path) -> None:
    model, data, outputs = RUNS[name]
    checkpoint = {"path": str(tmp_path / "checkpoint")}
    config = TrainConfig(
        model=model, data=data, batch_size=32, max_steps=2, checkpoint=checkpoint, log={"progress": "off"}
    )
    run = TrainingRun(config)
    run.train()
    run.close()
    done = export(tmp_path / "checkpoint", "--out", tmp_path / "v1")
    assert done.exit_code == 0, done.output
    assert "v1: step 2. Serve it: recshard serve " in done.output
    loaded = load_bundle(tmp_path / "v1")
    assert list(loaded.outputs) == outputs
    batch = batch_of(loaded.inputs, 16, most=1)
    run.model.eval()
    features = batch.to_keyed_jagged(loaded.inputs)
    with torch.no_grad():
        if name == "two towers":
            expected = run.model.module.two_tower(features)
        else:
            expected = [run.model(batch.dense, features).squeeze(1).sigmoid()]
    for answer, wanted in zip(loaded.predict(batch).values(), expected, strict=True):
        assert torch.equal(answer, wanted)


def test_the_file_of_a_run_and_a_number_format(tmp_path: Path) -> None:
    model = {"name": "dlrm", "embedding_dim": 8, "over_arch_layer_sizes": [8, 1]}
    run = {"model": model, "data": CLICKS, "batch_size": 32, "max_steps": 2, "log": {"progress": "off"}}
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    with pytest.raises(ValueError, match=r"run\.json names no checkpoint, so the run saved no weights. Fix: add"):
        load_trained(file)
    file.write_text(json.dumps({**run, "checkpoint": {"path": "checkpoint"}}))
    trained = TrainingRun(read_config(file))
    trained.train()
    trained.close()
    done = export(file, "--out", tmp_path / "v1", "--dtype", "int8")
    assert done.exit_code == 0, done.output
    loaded = load_bundle(tmp_path / "v1")
    served = quantize_embeddings(load_trained(file).model, "int8")
    batch = batch_of(loaded.inputs, 16, most=1)
    with torch.no_grad():
        wanted = served(batch.dense, batch.to_keyed_jagged(loaded.inputs)).squeeze(1).sigmoid()
    assert torch.equal(loaded.predict(batch)["probability"], wanted)
    assert isinstance(export(file, "--out", tmp_path / "v2", "--dtype", "int9").exception, ValueError)
