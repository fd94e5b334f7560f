"""Runs that the tests make, on ranks or in processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import recshard_lab as rs
from recshard_lab.comm import ShardingEnv
from recshard_lab.data import Batch, SyntheticClicks, register_dataset
from recshard_lab.data.registry import Splits
from recshard_lab.distributed.state.checkpoint import BlockWriter
from recshard_lab.train.job import TrainConfig, Trained, run_training
from recshard_lab.train.job.build import build_sources, build_unsharded
from recshard_lab.train.job.progress import Reporter
from recshard_lab.train.pipelines import StageError
from tests.patience import scaled

ROOT = Path(__file__).parents[2]


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """A small run: two epochs of 13 steps, the last batch of an epoch not whole."""
    run: dict[str, Any] = {
        "model": {"name": "dlrm", "embedding_dim": 8, "over_arch_layer_sizes": [8, 1]},
        "data": {"name": "synthetic-criteo", "num_samples": 400, "test_samples": 100, "rows": [40, 300, 7]},
        "batch_size": 32,
        "epochs": 2,
        "seed": 3,
        "optimizer": {"tables": {"lr": 0.1}, "dense": {"lr": 0.01}, "schedule": {"warmup_steps": 9}},
        "checkpoint": {"path": str(folder / "checkpoint"), "every_steps": 4},
        "log": {"progress": "off", "every_steps": 5, "jsonl": str(folder / "log.jsonl")},
    }
    return {**run, **changes}


def wait_for_saves() -> None:
    """Waits for the saves that run in this process."""
    for thread in threading.enumerate():
        if thread.name.startswith("saving "):
            thread.join(scaled(60))


class SlowSaves(Reporter):
    """Holds each save until step 6 is done, for a limited time. Records the threads that write, and whether they waited
    in vain. Raises in step 7 if requested."""

    def __init__(self, monkeypatch: Any, raises: bool = False) -> None:
        self.step_6, self.raises = threading.Event(), raises
        self.writers: list[tuple[str, bool]] = []
        self.notes: list[str] = []
        write = BlockWriter.write

        def held(*args: Any) -> Any:
            done = self.step_6.wait(scaled(5))
            self.writers.append((threading.current_thread().name.partition(" ")[0], done))
            return write(*args)

        monkeypatch.setattr(BlockWriter, "write", held)

    def advance(self, step: int) -> None:
        if step == 6:
            self.step_6.set()
        if step == 7 and self.raises:
            raise RuntimeError("step 7")

    def note(self, words: str) -> None:
        self.notes.append(words.partition(":")[0])


def wait_at_gate(folder: Path) -> None:
    """Waits between two pipes: until the test reads from one, and then until it has opened and closed the other."""
    (folder / "reached").write_text("")
    (folder / "go").read_text()


class Killer(Reporter):
    """Kills its own process without warning when a step is done, if requested after the saves that run."""

    def __init__(self, at: int, after_saves: bool) -> None:
        self.at, self.after_saves = at, after_saves

    def advance(self, step: int) -> None:
        if step == self.at:
            if self.after_saves:
                wait_for_saves()
            os.kill(os.getpid(), signal.SIGKILL)


def on_rank(config: dict[str, Any], kill_at: int | None = None, victim: int = 0, after_saves: bool = False) -> Trained:
    """What a rank runs; the victim dies."""
    mine = kill_at is not None and ShardingEnv.default().rank == victim
    return run_training(TrainConfig.model_validate(config), Killer(kill_at or 0, after_saves) if mine else None)


def weights_of(config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and optimizer states of a run's checkpoint, in an unsharded model, and what the run noted."""
    asked = TrainConfig.model_validate(config)
    assert asked.checkpoint is not None
    model = build_unsharded(asked.model, build_sources(asked)[0])
    if any(p.is_meta for p in model.parameters()):
        model = model.to_empty(device="cpu")
    tables = list(model.embedding_bag_collection.parameters())  # type: ignore[union-attr]
    rs.optim.apply_optimizer_in_backward(rs.optim.RowWiseAdagrad, tables, {"lr": 0.1})
    known = {id(p) for p in tables}
    dense = torch.optim.Adam([p for p in model.parameters() if id(p) not in known])
    extra = rs.load_checkpoint(asked.checkpoint.path, model, dense).extra
    state = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        own = dense.state.get(parameter, {})
        state |= {f"adam.{name}.{key}": torch.as_tensor(value).clone() for key, value in own.items()}
    return state, extra


def recshard(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "recshard_lab.cli", *arguments]


def environment() -> dict[str, str]:
    found = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    found.pop("GLOO_SOCKET_IFNAME", None)
    return found


def torchrun(config: Path, log: Path) -> subprocess.Popen[bytes]:
    """Two ranks in a process group of their own, so that all of it can be killed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += ["--module", "recshard_lab.cli", "train", "--config", str(config)]
    with log.open("ab") as out:
        return subprocess.Popen(command, env=environment(), stdout=out, stderr=out, start_new_session=True)


def steps_in(log: Path) -> list[int]:
    return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []


def kill(process: subprocess.Popen[bytes]) -> None:
    """-9 to torchrun's agent and everything that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Mislabelled(SyntheticClicks):
    """One label is a 2."""

    wrong = 128

    def batch(self, samples: Any) -> Batch:
        found = super().batch(samples)
        found.labels[[i for i, sample in enumerate(samples) if sample == self.wrong]] = 2.0
        return found


def mislabelled(train: bool = True) -> Splits:
    """Samples of which one is wrong, among those to train on or those to test on."""
    wrong, right = Mislabelled(200, rows=[9, 9]), SyntheticClicks(200, rows=[9, 9])
    return Splits(wrong, right) if train else Splits(right, wrong)


def told_on_rank(config: dict[str, Any]) -> str:
    """What a rank's run ends with."""
    register_dataset("mislabelled")(mislabelled)
    try:
        on_rank(config)
    except (StageError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Dropping(nn.Module):
    """A reader's own model, with a generator at work in every forward."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        rows = {"cat_0": 40, "cat_1": 300, "cat_2": 7}
        tables = [rs.EmbeddingBagConfig(n, 8, name=name, feature_names=[name]) for name, n in rows.items()]
        self.embedding_bag_collection = rs.EmbeddingBagCollection(tables, device="meta")
        self.top, self.rate = nn.Linear(24 + 13, 1), rate

    def forward(self, dense: Tensor, ids: rs.KeyedJaggedTensor) -> Tensor:
        both = torch.cat([self.embedding_bag_collection(ids).values(), dense], dim=1)
        return self.top(nn.functional.dropout(both, self.rate, self.training))


class Gated(Dropping):
    """Waits at the gate in the folder ``GATE`` of the environment, if there is one, in the forward of a step."""

    def __init__(self, at: int) -> None:
        torch.manual_seed(0)
        super().__init__(0.0)
        self.at, self.steps = at, 0

    def forward(self, dense: Tensor, ids: rs.KeyedJaggedTensor) -> Tensor:
        self.steps += self.training
        if self.training and self.steps == self.at and "GATE" in os.environ:
            wait_at_gate(Path(os.environ["GATE"]))
        return super().forward(dense, ids)
