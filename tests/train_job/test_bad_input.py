"""What cannot be is named, with its line where it stands in a file, and nothing that was saved is lost."""

from __future__ import annotations

import json
import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from torch import nn
from typer.testing import CliRunner

import recshard_lab as rs
from recshard_lab.cli import app, main
from recshard_lab.distributed.state.checkpoint import read_extra
from recshard_lab.saved.files import CheckpointError
from recshard_lab.train.job import TrainConfig, export_run, read_config, run_training
from recshard_lab.train.job.config import Schedule
from recshard_lab.train.job.progress import LogReporter, Reporter
from tests.refusals import not_refused
from tests.train_job.runs import config_of, told_on_rank, wait_for_saves


def trained(folder: Path, reporter: Reporter | None = None, **changes: Any) -> Any:
    return run_training(TrainConfig.model_validate(config_of(folder, **changes)), reporter)


# ---- configs ----

RIGHT = "model: {name: dlrm}\ndata: {name: synthetic-ratings}\n"


BAD_CONFIGS = [
    (RIGHT + "epoch: 2", r"line 3, field 'epoch': unknown field \(did you mean 'epochs'\?\)"),
    (RIGHT + "optimizer:\n  dense:\n    lrr: 1", r"line 5, field 'optimizer.dense.lrr': .*did you mean 'lr'"),
    (RIGHT + "optimizer: {dense: {lr: 0}}", "field 'optimizer.dense.lr': input should be greater than 0, got 0"),
    (RIGHT + "optimizer: {tables: {name: adamm}}", r"must be one of .* got 'adamm' \(did you mean 'adam'\?\)"),
    (RIGHT + "optimizer: {tables: {name: exact_sgd, eps: 1e-3}}", "exact_sgd has no eps, got eps=0.001"),
    (RIGHT + "optimizer: {tables: {momentum: 0.9}}", "momentum=0.9 is not read by exact_row_wise_adagrad"),
    (RIGHT + "batch_size: yes", "field 'batch_size': input should be a valid integer, got True"),
    (RIGHT + "metrics: [auk]", r"field 'metrics\[0\]': must be one of .*did you mean 'auc'"),
    (RIGHT + "plan: {path: p.json, scheme: row_wise}", "path and scheme each determine the plan"),
    (RIGHT + "pipeline: {name: sparse_dst}", r"pipeline 'sparse_dst' does not exist \(did you mean 'sparse_dist'"),
    (RIGHT + "pipeline: {name: base, thread: false}", r"has no setting 'thread' \(did you mean 'threads'\?\)"),
    (RIGHT + "seed: 1\nseed: 2", "line 4: field 'seed' occurs twice"),
    ("data: {name: movielens}", "field 'model' is missing"),
    ("model: {name: dlmr}\ndata: {name: movielens}", r"no model is named 'dlmr' \(did you mean 'dlrm'\?\)"),
    ("model: {name: dlrm, dim: 3}\ndata: {name: movielens}", "model 'dlrm' has no setting 'dim'"),
    (RIGHT + "optimizer: {schedule: {decay_start: 3}}", "decay_start and decay_steps need each other"),
    ("[1]", "must be an object, got "),
    ("model: {", "not YAML"),
]


def test_a_config_that_cannot_be_is_named_with_its_line(tmp_path: Path) -> None:
    def read(text: str) -> None:
        (tmp_path / "run.yaml").write_text(text)
        read_config(tmp_path / "run.yaml")

    assert not_refused([(partial(read, text), words) for text, words in BAD_CONFIGS]) == []


def test_every_mistake_of_a_config_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"model": {"name": "dlrm"}, "data": {"name": "x"}, "epoch": 1, "seed": -1}))
    with pytest.raises(ValueError, match="dataset 'x' does not exist") as told:
        read_config(file)
    assert [line.partition(": ")[0].partition(", ")[2] for line in str(told.value).splitlines()] == [
        "field 'data'",
        "field 'seed'",
        "field 'epoch'",
    ]


def test_the_schema_of_configs_takes_what_the_config_takes(tmp_path: Path) -> None:
    schema = json.loads(CliRunner().invoke(app, ["train", "--schema"]).stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    right = config_of(tmp_path)
    jsonschema.validate(right, schema)
    for wrong in ({**right, "epoch": 1}, {**right, "batch_size": 0}, {"data": right["data"]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
        with pytest.raises(ValueError, match="validation error"):
            TrainConfig.model_validate(wrong)


def test_relative_paths_start_at_the_files_own_folder(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "run.yaml"
    file.parent.mkdir()
    file.write_text(
        "model: {name: 'm.py:make'}\ndata: {name: criteo, path: ../days}\ncheckpoint: {path: kept}\n"
        "plan: {path: /abs/plan.json}\nlog: {tensorboard: board}\n"
    )
    found = read_config(file)
    assert found.checkpoint is not None
    assert found.model.name == f"{tmp_path}/deep/m.py:make"
    assert found.data.settings["path"] == str(tmp_path / "days")
    assert found.checkpoint.path == str(tmp_path / "deep" / "kept")
    assert found.plan.path == "/abs/plan.json"
    assert found.log.tensorboard == str(tmp_path / "deep" / "board")


def test_a_schedule_rises_stays_and_falls_as_mlperfs() -> None:
    rates = Schedule(warmup_steps=2750, decay_start=49315, decay_steps=27772)
    assert rates.factor(275) == 0.1
    assert rates.factor(2750) == rates.factor(49315) == 1.0
    assert rates.factor(49315 + 27772 // 2) == pytest.approx(0.25)
    assert rates.factor(80_000) == 0.0


# ---- data ----


@pytest.mark.gate
@pytest.mark.parametrize("train", [True, False])
def test_a_label_that_is_not_0_or_1_is_named_on_every_rank_and_what_was_saved_stays(
    tmp_path: Path, train: bool
) -> None:
    data = {"name": "mislabelled", "train": train}
    evaluation = {"every_steps": 10, "batch_size": 10}
    config = config_of(tmp_path, data=data, batch_size=10, shuffle=False, evaluation=evaluation)
    config["plan"] = {"scheme": "table_wise"}  # the planner would read the samples first
    with rs.launch(2) as ranks:
        told = ranks.run(told_on_rank, config)
    words = "training sample 128 of " if train else "test sample 128 of "
    for each in told:  # it is of rank 1's piece of the thirteenth batch
        assert "StageError: stage 'load' of batch 12 failed on rank 1: ValueError: " + words in each
        assert "has the label 2, but labels must be 0 or 1" in each
    assert read_extra(tmp_path / "checkpoint")["step"] == (12 if train else 8)


DROPPING = {"model": {"name": "tests.train_job.runs:Dropping"}}
CRITEO = {"name": "synthetic-criteo", "num_samples": 99}
BAD_RUNS: list[tuple[dict[str, Any], str]] = [
    ({"features": ["cat_0", "cat_7"]}, r"has no feature 'cat_7' \(did you mean 'cat_\d'\?\)"),
    ({"model": {"name": "dlrm", "tables": {"cat_9": {}}}}, r"the data have no feature 'cat_9' \(did you mean 'cat_\d'"),
    ({"model": {"name": "dlrm", "tables": {"cat_1": {"num_embeddings": 3}}}}, "'cat_1' needs 300 rows"),
    ({**DROPPING, "features": ["cat_0", "cat_1"]}, "reads a feature 'cat_2'"),
    ({"data": {**CRITEO, "rows": [40, 300, 7, 5]}, **DROPPING}, r"'cat_3' that .*features: \[cat_0, cat_1, cat_2\]"),
    ({"data": {**CRITEO, "rows": [41, 300, 7]}, **DROPPING}, r"feature 'cat_0' has 41 ids and table 'cat_0' 40 rows"),
    ({"model": {**DROPPING["model"], "rat": 1}}, "raised TypeError.*'rat'"),
    ({"model": {"name": "tests.train_job.runs:free"}}, "has no 'free'"),
    ({"data": {"name": "synthetic-criteo", "num_samples": 0}}, "has no training samples"),
    ({"drop_last": True, "batch_size": 5000}, "no whole batch of 5,000"),
    ({"plan": {"scheme": "row_wize"}}, "row_wize"),
    ({"plan": {"topology": "h100x8"}}, "has 8 ranks, but 1 are running"),
    ({"optimizer": {"dense": {"name": "adam", "momentum": 0.9}}}, "adam does not take .*momentum"),
]


def test_data_and_model_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    assert not_refused([(partial(trained, tmp_path, **changes), words) for changes, words in BAD_RUNS]) == []
    for changes in ({"data": {"name": "movielens", "path": "nowhere"}}, {"plan": {"path": "nothing.json"}}):
        with pytest.raises(OSError, match=r"nowhere|nothing\.json"):
            trained(tmp_path, **changes)
    assert not (tmp_path / "checkpoint").exists()


# ---- checkpoints ----


def test_a_checkpoint_of_another_model_is_named_and_stays(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=4)
    before = sorted((path.name, path.read_bytes()) for path in (tmp_path / "checkpoint").iterdir())
    for changes, words in (
        ({"model": {"name": "dlrm", "embedding_dim": 16}}, "does not match the model: .*16 float32 in the model"),
        ({"model": {"name": "dlrm_dcn", "embedding_dim": 8}}, "does not match the model: .*is not in the checkpoint"),
        ({"data": config_of(tmp_path)["data"] | {"seed": 1, "num_samples": 500}}, "the state has size 400"),
        ({"seed": 8}, "the state has seed 3"),
    ):
        with pytest.raises(ValueError, match=words):
            trained(tmp_path, max_steps=8, **changes)
    assert sorted((path.name, path.read_bytes()) for path in (tmp_path / "checkpoint").iterdir()) == before


def test_what_is_there_is_gone_on_with_only_where_it_may_be(tmp_path: Path) -> None:
    path = {"path": str(tmp_path / "checkpoint")}
    with pytest.raises(CheckpointError, match=r"'always', but .* has no checkpoint"):
        trained(tmp_path, checkpoint={**path, "resume": "always"})
    rs.save_checkpoint(tmp_path / "checkpoint", nn.Linear(2, 1))
    with pytest.raises(CheckpointError, match="not of a training run"):
        trained(tmp_path)
    with pytest.raises(CheckpointError, match=r"'never', but .* has a checkpoint"):
        trained(tmp_path, checkpoint={**path, "resume": "never"})
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        trained(tmp_path, checkpoint={"path": str(other)})
    assert (other / "thesis.txt").read_text() == "dear"


class SmallDisk(Reporter):
    """Files of more than 2 kB cannot be written in these steps."""

    def __init__(self, steps: range) -> None:
        self.steps, self.notes = steps, list[str]()
        self.saved_then: list[int] = []
        self.folder = Path()

    def advance(self, step: int) -> None:
        wait_for_saves()
        most = resource.RLIM_INFINITY if step not in self.steps else 2048
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        if step in self.steps:
            self.saved_then.append(read_extra(self.folder)["step"])

    def note(self, words: str) -> None:
        self.notes.append(words)


def test_a_disk_that_fills_in_mid_save_is_named_and_training_goes_on(tmp_path: Path) -> None:
    disk = SmallDisk(range(6, 10))
    disk.folder = tmp_path / "checkpoint"
    try:
        done = trained(tmp_path, disk)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert not [words for words in disk.notes if "saved at step 8" in words and "NOT" not in words]
    assert disk.saved_then == [4, 4, 4, 4]  # at 8 it could not be saved, and what was saved at 4 stood
    (told,) = [words for words in disk.notes if "NOT SAVED" in words]
    assert "at step 8" in told
    assert "the disk is full" in told
    assert done.unsaved is None
    assert read_extra(tmp_path / "checkpoint")["step"] == done.step == 26
    assert not [path for path in tmp_path.iterdir() if "saving" in path.name]


def test_a_run_that_ends_unsaved_says_so_and_exits_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    config = config_of(tmp_path, max_steps=3)
    config["log"]["jsonl"] = None
    file.write_text(yaml.safe_dump(config))
    monkeypatch.setattr(sys, "argv", ["recshard", "train", "--config", str(file)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
    try:
        with pytest.raises(SystemExit) as left:
            main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert left.value.code == 2
    assert "ended at step 3 and is not saved: " in capfd.readouterr().err


# ---- plans and exports ----


def test_a_plan_for_other_ranks_is_refused_and_one_for_these_runs(tmp_path: Path) -> None:
    config = TrainConfig.model_validate(config_of(tmp_path))
    wide = export_run(config, tmp_path / "two", topology=rs.Topology(2))
    assert [path.name for path in wide] == ["run.yaml", "plan.json", "train.py"]
    table = rs.ParameterSharding("table_wise", ranks=[1])
    names = ("cat_0", "cat_1", "cat_2")
    far = rs.ShardingPlan({"embedding_bag_collection": dict.fromkeys(names, table)})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="needs a plan, or a topology"):
        export_run(config, tmp_path / "none")
    export_run(config, tmp_path / "far", far, topology=rs.Topology(2))
    asked = read_config(tmp_path / "far" / "run.yaml")
    with pytest.raises(ValueError, match=r"plan .*plan.json, on 1 ranks: .*rank 1"):
        run_training(asked)
    export_run(config, tmp_path / "one", topology=rs.Topology(1))
    done = run_training(read_config(tmp_path / "one" / "run.yaml"))
    kept = rs.ShardingPlan.from_json((tmp_path / "one" / "plan.json").read_text())
    assert rs.ShardingPlan.from_json(read_extra(tmp_path / "checkpoint")["plan"]) == kept
    assert done.step == 26


def test_tensorboard_that_is_not_there_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # type: ignore[arg-type]
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError, match=r"pip install recshard-lab\[tensorboard\]"):
        trained(tmp_path, log={"tensorboard": str(tmp_path / "board")})


def test_a_terminal_shows_a_bar_with_samples_a_second_loss_and_auc(tmp_path: Path) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    config = TrainConfig.model_validate(config_of(tmp_path, log={"every_steps": 5}))
    run_training(config, LogReporter(config.log, screen))
    words = screen.getvalue()
    assert "26/26" in words
    assert "━" in words
    assert " samples/s" in words
    assert "auc 0." in words
    assert "loss 0." in words
