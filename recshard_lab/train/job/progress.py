"""Output of a run: a bar or lines, TensorBoard, one JSON object per line. Only rank 0 prints."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from recshard_lab.train.job.config import LogSection

IN_THE_BAR = ("loss", "auc", "samples_per_second")  # all other values go to files only


class Reporter:
    """Callbacks of a training run. This base class does nothing: override the methods that you need.

    Pass an instance as ``run_training(config, reporter)``. Each rank calls its own instance.

    >>> class Count(Reporter):
    ...     steps = 0
    ...     def advance(self, step: int) -> None:
    ...         self.steps = step
    >>> from recshard_lab.train import TrainConfig, run_training
    >>> data = {"name": "synthetic-criteo", "num_samples": 64, "test_samples": 64, "rows": [20, 30]}
    >>> count = Count()
    >>> _ = run_training(TrainConfig(model={"name": "dlrm"}, data=data, batch_size=16), count)
    >>> count.steps
    4
    """

    def begin(self, step: int, total: int, about: str) -> None:
        """Called once before the first step.

        Args:
            step: steps that an earlier part of the run has made; 0 in a new run.
            total: steps of the whole run.
            about: model, data and plan in words.
        """

    def advance(self, step: int) -> None:
        """Called after every step, with its number from 1."""

    def values(self, step: int, values: Mapping[str, float], kind: str = "train") -> None:
        """Called with metrics of the last steps (kind "train") or of the test samples (kind "test")."""

    def note(self, words: str) -> None:
        """Called with a message, such as the reason why a checkpoint could not be written."""

    def close(self) -> None:
        """Called once at the end, also after an error."""


class LogReporter(Reporter):
    """Prints to the terminal, and writes the files of the config's log section.

    Raises:
        ModuleNotFoundError: the config names a TensorBoard folder, and TensorBoard is not installed.
        OSError: a file cannot be written.
    """

    def __init__(self, log: LogSection, out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._mode = log.progress if log.progress != "auto" else "bar" if self._out.isatty() else "lines"
        self._board_at, self._board = log.tensorboard, None
        if log.tensorboard is not None:
            self._writer = summary_writer()
        self._lines: TextIO | None = None
        if log.jsonl is not None:
            Path(log.jsonl).parent.mkdir(parents=True, exist_ok=True)
            self._lines = Path(log.jsonl).open("a", encoding="utf-8")  # noqa: SIM115  (closed by close)
        self._bar: Any = None
        self._task: Any = None

    def begin(self, step: int, total: int, about: str) -> None:
        if self._board_at is not None and self._board is None:
            # removes what a killed run wrote after its last checkpoint
            self._board = self._writer(self._board_at, purge_step=step + 1)
        self.note(about)
        self._total = total
        if self._mode == "bar":
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
            from rich.table import Column

            whole: dict[str, Any] = {"table_column": Column(no_wrap=True)}
            self._bar = Progress(
                BarColumn(bar_width=None, table_column=Column(ratio=1)),
                MofNCompleteColumn(**whole),
                TextColumn("{task.fields[values]}", **whole),
                TimeRemainingColumn(**whole),
                console=Console(file=self._out),
                expand=True,
            )
            self._task = self._bar.add_task("train", total=total, completed=step, values="")
            self._bar.start()

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def values(self, step: int, values: Mapping[str, float], kind: str = "train") -> None:
        shown = values if self._bar is None or kind != "train" else {k: values[k] for k in IN_THE_BAR if k in values}
        words = "  ".join(_spelled(name, value) for name, value in shown.items())
        if self._bar is not None and kind == "train":
            self._bar.update(self._task, completed=step, values=words)
        elif self._mode != "off":
            self.note(f"step {step:,} of {self._total:,}  {'' if kind == 'train' else f'{kind}: '}{words}")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)
            self._board.flush()
        if self._lines is not None:
            record = {"step": step, "kind": kind, "time": time.time(), **values}
            self._lines.write(json.dumps(record) + "\n")
            self._lines.flush()

    def note(self, words: str) -> None:
        if self._bar is not None:
            self._bar.console.print(words, highlight=False, markup=False)
        elif self._mode != "off":
            print(words, file=self._out, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._board is not None:
            self._board.close()
        if self._lines is not None:
            self._lines.close()


def summary_writer() -> Any:
    """TensorBoard's ``SummaryWriter``.

    Raises:
        ModuleNotFoundError: it is not installed; the message names the extra.
    """
    try:
        return import_module("torch.utils.tensorboard").SummaryWriter
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("tensorboard", "distutils"):
            raise
        raise ModuleNotFoundError(
            "log.tensorboard needs the package tensorboard. Fix: pip install recshard-lab[tensorboard], or omit it",
            name="tensorboard",
        ) from None


def _spelled(name: str, value: float) -> str:
    name = {"normalized_entropy": "NE"}.get(name, name)
    if name == "samples_per_second":
        return f"{value:,.0f} samples/s"
    return f"{name} {value:,.0f}" if name == "samples" else f"{name} {value:.4f}"
