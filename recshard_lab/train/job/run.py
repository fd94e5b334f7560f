"""A training run: started, killed, resumed on any number of ranks, finished.

A run is split into *segments*. Only between two segments, it is saved and scored, and its pipeline is empty. A segment
ends at every multiple of the checkpoint's and the evaluation's steps, and at the end. A save copies the state to host
memory. Its files are written during the next segment.

What a run does after a checkpoint is a function of the checkpoint and the config alone. The order of samples depends on
the seed, schedules depend on the step, and torch's generator gets a new seed at the start of a segment. So a run
that is killed and resumed ends with the weights of one that was not: bit for bit on the same number of ranks, otherwise
up to the order of sums.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from recshard_lab.arguments import checks_arguments
from recshard_lab.comm import ShardingEnv, agreed, all_reduce, compute_device, gathered, times_note
from recshard_lab.cores import free_memory
from recshard_lab.data import Batch, BatchLoader
from recshard_lab.distributed import DistributedModelParallel
from recshard_lab.distributed.state.checkpoint import (
    PendingSave,
    async_save_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from recshard_lab.planner import tables_of
from recshard_lab.sharding import PlanError, ShardingPlan
from recshard_lab.train.job.build import (
    brings_its_loss,
    build_dense_optimizer,
    build_plan,
    build_sharders,
    build_sources,
    build_unsharded,
)
from recshard_lab.train.job.config import TrainConfig
from recshard_lab.train.job.locks import lock_paths
from recshard_lab.train.job.progress import LogReporter, Reporter, summary_writer
from recshard_lab.train.job.saved import FORMAT, saved_state
from recshard_lab.train.job.scoring import evaluated
from recshard_lab.train.loop import batch_loss
from recshard_lab.train.metrics import MetricsConfig, RecMetricDef, RecMetricEnum, RecMetricModule
from recshard_lab.train.metrics import generate_metric_module as metrics_of
from recshard_lab.train.pipelines.base import Pipeline
from recshard_lab.train.pipelines.registry import pipeline_kind

_ENUM = {
    "auc": RecMetricEnum.AUC,
    "log_loss": RecMetricEnum.LOG_LOSS,
    "normalized_entropy": RecMetricEnum.NE,
    "calibration": RecMetricEnum.CALIBRATION,
}


@dataclass(frozen=True)
class Trained:
    """The result of a run, the same on every rank.

    Attributes:
        step: steps of the run, including those before it was resumed.
        samples: samples trained since this process started, on all ranks.
        seconds: wall clock of these samples, without scoring and saving.
        loss: mean over the last logged steps; None if no step was trained.
        test: metrics of the test samples; empty if they were not scored at the end.
        unsaved: why the last checkpoint could not be written; None if it was.
    """

    step: int
    samples: int
    seconds: float
    loss: float | None
    test: dict[str, float] = field(default_factory=dict)
    unsaved: str | None = None

    @property
    def samples_per_second(self) -> float:
        """Of all ranks together."""
        return self.samples / self.seconds if self.seconds else 0.0


@checks_arguments
def run_training(config: TrainConfig, reporter: Reporter | None = None) -> Trained:
    """Trains a run in the default process group, or alone without one. All ranks must call it.

    Args:
        config: the run.
        reporter: receives progress and metrics. Default: the output of ``config.log`` on rank 0.

    Raises:
        ValueError: data, model, plan or checkpoint that do not match, by name; a label that is not 0 or 1; another run
            writes to the checkpoint or the log.
        StageError: a stage of the pipeline failed, with its batch and rank.
        OSError: data that cannot be read. A checkpoint that cannot be written is reported, and the next one is tried.

    >>> from recshard_lab.train.job import TrainConfig
    >>> data = {"name": "synthetic-criteo", "num_samples": 64, "test_samples": 64, "rows": [20, 30]}
    >>> config = TrainConfig(model={"name": "dlrm"}, data=data, batch_size=16, log={"progress": "off"})
    >>> run_training(config).step
    4
    """
    run = TrainingRun(config, reporter)
    try:
        return run.train()
    finally:
        run.close()


class TrainingRun:
    """A run with its model, optimizers, data and output. `run_training` creates one, trains and closes it.

    Args:
        config, reporter: as in `run_training`.

    Attributes:
        model: the sharded model. dense: the optimizer of its dense part. loader: this rank's batches. step: steps so
            far.
    """

    def __init__(self, config: TrainConfig, reporter: Reporter | None = None) -> None:
        self.config, self.env = config, ShardingEnv.default()
        self._locks = agreed(self.env, lambda: self._locked(reporter))
        try:
            self._create(reporter)
        except BaseException:
            self._locks.close()
            raise

    def _locked(self, reporter: Reporter | None) -> ExitStack:
        """The locks of all paths that this rank's files of the run are written to."""
        config, written = self.config, dict[str, str | None]()
        if config.checkpoint is not None:
            written["checkpoint.path"] = config.checkpoint.path
        if reporter is None:  # otherwise nothing writes the files of the config's log
            written |= {"log.tensorboard": config.log.tensorboard, "log.jsonl": config.log.jsonl}
        first = self.env.rank == 0
        return lock_paths({field: path for field, path in written.items() if first and path is not None})

    def _create(self, reporter: Reporter | None) -> None:
        config = self.config
        self.device = compute_device(self.env)
        self._saved = saved_state(config, self.env)
        self.source, self.test = agreed(self.env, lambda: build_sources(config))
        torch.manual_seed(config.seed)
        unsharded = build_unsharded(config.model, self.source, self.env)
        sharders = build_sharders(config)
        plan = self._kept_plan(unsharded)
        if plan is None:
            plan = build_plan(config, unsharded, self.source, self.env, self.device, sharders)
        self.model = DistributedModelParallel(unsharded, self.env, self.device, plan, sharders)
        self.dense = build_dense_optimizer(config, self.model)
        self._rates = [group["lr"] for group in self.dense.param_groups]
        self.loader = BatchLoader(
            self.source,
            config.batch_size,
            self.env.rank,
            self.env.world_size,
            shuffle=config.shuffle,
            seed=config.seed,
            drop_last=config.drop_last,
            prefetch=config.loader_prefetch,
        )
        if not len(self.loader):
            raise ValueError(
                f"an epoch of {len(self.source):,} samples has no whole batch of {config.batch_size:,}. Fix: a smaller "
                f"batch_size, or drop_last: false"
            )
        self.metrics = self._metrics()
        self.step = self._samples = 0
        self._seconds = 0.0
        self._loss: float | None = None
        self._losses: list[Tensor] = []
        self._unlogged = [0.0, 0.0]  # seconds and samples
        self.unsaved: str | None = None
        self._saving: tuple[int, PendingSave] | None = None  # its step, and the save that is running
        self._resumed = self._resume()
        self._reporter = self._reporter_of(reporter)

    def _reporter_of(self, given: Reporter | None) -> Reporter:
        if self.config.log.tensorboard is not None:
            summary_writer()  # if it is missing, every rank raises

        def made() -> Reporter:
            return LogReporter(self.config.log) if self.env.rank == 0 else Reporter()

        found: Reporter = agreed(self.env, lambda: made() if given is None else given)
        return found

    # ---- resuming ----

    def _kept_plan(self, unsharded: torch.nn.Module) -> ShardingPlan | None:
        """The plan of the checkpoint, if the number of ranks is the same: sums then have the same order."""
        if self._saved is None or self.config.plan.path is not None:
            return None
        if self._saved["world"] != [self.env.world_size, self.env.local_world_size]:
            return None
        if self._saved["config"]["plan"] != self.config.plan.model_dump(exclude_none=True):
            return None  # the config now has another plan
        found = ShardingPlan.from_json(self._saved["plan"])
        try:
            return found.resolved(tables_of(unsharded), self.env.world_size, self.env.local_world_size)
        except PlanError:  # of other tables: loading the checkpoint raises with the difference
            return None

    def _resume(self) -> str:
        if self._saved is None:
            return ""
        assert self.config.checkpoint is not None
        load_checkpoint(self.config.checkpoint.path, self.model, self.dense)
        self.loader.load_state_dict(self._saved["loader"])
        self.step = self._saved["step"]
        with suppress(ValueError):  # the config now has other metrics: they start here
            self.metrics.load_state_dict(self._saved["metrics"])
        ranks = self._saved["world"][0]
        at = f"step {self.step:,}, {self.loader.position}, saved by {ranks} rank{'s' * (ranks != 1)}"
        self._saved = None
        return at

    def _state(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": self.step,
            "loader": self.loader.state_dict(),
            "metrics": self.metrics.state_dict(),
            "plan": self.model.plan.to_json(),
            "world": [self.env.world_size, self.env.local_world_size],
            "config": self.config.model_dump(exclude_none=True),
        }

    def save(self, in_background: bool = False) -> None:
        """Writes the checkpoint, if the config has one. A full disk is reported, and the run continues.

        Args:
            in_background: whether to copy the state to host memory and to write it while training continues. The next
                call waits for it and reports its error. Without memory for the copies, this call writes it.
        """
        if self.config.checkpoint is None:
            return
        self._finish_save()
        path, step = self.config.checkpoint.path, self.step
        try:
            if in_background and self._has_room():
                self._saving = step, async_save_checkpoint(path, self.model, self.dense, extra=self._state())
            else:
                save_checkpoint(path, self.model, self.dense, extra=self._state())
                self._report_saved(step)
        except OSError as error:
            self._report_saved(step, error)

    def _has_room(self) -> bool:
        """Whether each host has free memory for a copy of its ranks' weights and states. Collective."""
        stored = self.model.memory_bytes()
        needed = stored["weights"] + stored["optimizer_state"] + stored.get("index", 0) + 2 * stored["dense"]
        needed += sum(self.model.host_memory_bytes().values())
        return all(gathered(self.env, lambda: needed * self.env.local_world_size < free_memory()[0]))

    def _finish_save(self) -> None:
        """Waits for the save that is running in the background, and reports its result."""
        if self._saving is not None:
            step, pending = self._saving
            self._saving = None
            try:
                pending.result()
                self._report_saved(step)
            except OSError as error:
                self._report_saved(step, error)

    def _report_saved(self, step: int, error: OSError | None = None) -> None:
        self.unsaved = None if error is None else str(error)
        assert self.config.checkpoint is not None
        self._reporter.note(
            f"saved at step {step:,}: {self.config.checkpoint.path}"
            if error is None
            else f"NOT SAVED at step {step:,}: {error}. Training continues"
        )

    # ---- training ----

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, including those already made."""
        further = self.config.epochs - self.loader.epoch - 1  # epochs after the current one
        left = self.loader.total - self.loader.state_dict()["samples"]
        steps = -(-left // self.config.batch_size) + further * len(self.loader) if further >= 0 else 0
        total = self.step + steps
        return total if self.config.max_steps is None else min(total, max(self.step, self.config.max_steps))

    def train(self) -> Trained:
        """Trains to the end."""
        total = self.total_steps
        self._reporter.begin(self.step, total, self._about())
        batches = self._batches()
        pipeline = self._pipeline()
        kind = pipeline_kind(self.config.pipeline.name)
        test: dict[str, float] = {}
        try:
            while self.step < total:
                end = min(total, *self._stops())
                torch.manual_seed(((self.config.seed * 1_000_003 + self.step) * 65_537 + self.env.rank) % (1 << 63))
                self._segment(pipeline, islice(batches, end - self.step), end, total)
                test = self._between(total)
                if not kind.exact and self.step < total:
                    pipeline.close()
                    pipeline = self._pipeline()
            if not test and self.config.evaluation.at_end:
                test = self._evaluate()
        except BaseException:
            with suppress(RuntimeError):  # threads that wait for ranks that have ended
                pipeline.close()
            raise
        pipeline.close()
        return Trained(self.step, self._samples, self._seconds, self._loss, test, self.unsaved)

    def _segment(self, pipeline: Pipeline, batches: Iterator[Batch], end: int, total: int) -> None:
        self.model.train()
        begun = time.perf_counter()
        while self.step < end:
            self._set_rates(self.step + 1)
            logits, labels, loss, size = pipeline.progress(batches)
            self.step += 1
            self._losses.append(loss)
            self._unlogged[1] += size
            self.metrics.update({"prediction": logits.double().sigmoid(), "label": labels})
            self._reporter.advance(self.step)
            if self.step % self.config.log.every_steps == 0 or self.step == total:
                loss_now = self._mean_loss()  # waits for the device
                self._unlogged[0] += time.perf_counter() - begun
                self._log_values(loss_now)
                begun = time.perf_counter()
        self._unlogged[0] += time.perf_counter() - begun
        with suppress(StopIteration):  # the pipeline has reached the segment's end
            pipeline.progress(batches)
            raise AssertionError("a segment had more batches than steps")

    def _log_values(self, loss: float) -> None:
        """Reports loss, metrics and throughput since the last call."""
        seconds, samples = self._unlogged
        self._seconds, self._samples = self._seconds + seconds, self._samples + int(samples)
        self._unlogged = [0.0, 0.0]
        self._reporter.values(self.step, {"loss": loss, **self._watched(), "samples_per_second": samples / seconds})

    def _between(self, total: int) -> dict[str, float]:
        """Saves and scores between two segments, if due. Returns the test's metrics, if scored."""
        every = self.config.checkpoint.every_steps if self.config.checkpoint is not None else None
        if self.step == total or (every is not None and self.step % every == 0):
            self.save(in_background=self.step < total)
        due = self.config.evaluation.every_steps
        if (due is not None and self.step % due == 0) or (self.step == total and self.config.evaluation.at_end):
            return self._evaluate()
        return {}

    def _evaluate(self) -> dict[str, float]:
        asked = self.config.evaluation
        found = evaluated(self.model, self._forward, self.dense, self.test, asked, self.env, self.device)
        if found:
            self._reporter.values(self.step, found, "test")
        return found

    def _stops(self) -> list[int]:
        """The next steps at which a save or a scoring is due."""
        saved = self.config.checkpoint.every_steps if self.config.checkpoint is not None else None
        cadences = [every for every in (saved, self.config.evaluation.every_steps) if every is not None]
        return [(self.step // every + 1) * every for every in cadences] or [1 << 62]

    def _batches(self) -> Iterator[Batch]:
        while self.loader.epoch < self.config.epochs:
            yield from self.loader

    def _pipeline(self) -> Pipeline:
        settings = self.config.pipeline.settings
        if self.config.pipeline.name == "semi_sync":
            settings["start_batch"] = max(0, settings.get("start_batch", 900) - self.step)
        make = pipeline_kind(self.config.pipeline.name).make
        return make(self.model, self.dense, self.device, custom_model_fwd=self._forward, **settings)

    def _forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, int]]:
        if brings_its_loss(self.config.model):
            loss, (_, logits, _) = self.model(batch)
        else:
            logits = self.model(batch.dense_features, batch.sparse_features)
            loss = batch_loss(logits, batch)
        return loss, (logits.detach().flatten(), batch.labels, loss.detach(), batch.global_size)

    def _set_rates(self, step: int) -> None:
        """Sets the config's learning rates, not those of a checkpoint."""
        schedule = self.config.optimizer.schedule
        factor = 1.0 if schedule is None else schedule.factor(step)
        for group, rate in zip(self.dense.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        for group in self.model.fused_optimizer.param_groups:
            group["lr"] = self.config.optimizer.tables.lr * factor

    # ---- metrics ----

    def _metrics(self) -> RecMetricModule:
        window = self.config.metrics_window
        definitions = {_ENUM[name]: RecMetricDef(window_size=window) for name in self.config.metrics}
        each = -(-self.config.batch_size // self.env.world_size)
        settings = MetricsConfig(rec_metrics=definitions)
        return metrics_of(RecMetricModule, settings, each, self.env.world_size, self.env.rank, self.env.pg)

    def _watched(self) -> dict[str, float]:
        values = self.metrics.compute()
        found = {}
        for metric, name in zip(self.metrics.rec_metrics, self.config.metrics, strict=True):
            key = f"{metric.namespace}-{next(iter(metric.tasks))}|window_{metric.namespace}"
            found[name] = float(values[key])
        return found

    def _mean_loss(self) -> float:
        """The mean since the last call, of all ranks."""
        parts = torch.stack([part.double() for part in self._losses]).sum().reshape(1)
        loss = float(all_reduce(parts, self.env, "train/loss")) / self.env.world_size / len(self._losses)
        self._losses.clear()
        self._loss = loss
        return loss

    def _about(self) -> str:
        ranks = f"{self.env.world_size} rank{'s' * (self.env.world_size != 1)} on {self.device.type}"
        begun = f"resumed at {self._resumed}" if self._resumed else "from the beginning"
        note = f"; {times_note()}" if times_note() else ""
        return f"{self.config.model.name} on {self.source.source}; {ranks}, {begun}{note}"

    def close(self) -> None:
        """Waits for a save that is running, closes files, and releases the locks of the run."""
        if self._saving is not None:
            wait([self._saving[1]])  # its error is logged
        try:
            self._reporter.close()
        finally:
            self._locks.close()
