"""The file of a training run: YAML or JSON. Every key is checked. An unknown key raises, with the nearest known key.

::

    model: {name: dlrm, embedding_dim: 16, over_arch_layer_sizes: [128, 64, 1]}
    data: {name: movielens, variant: 100k}
    batch_size: 4096                 # of all ranks together: the same steps on any number of ranks
    epochs: 2
    optimizer:
      tables: {name: exact_row_wise_adagrad, lr: 0.1}
      dense: {name: adam, lr: 0.002}
    pipeline: {name: sparse_dist}
    checkpoint: {path: run/checkpoint, every_steps: 500}

Relative paths start at the file's folder.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from recshard_lab.arguments import checks_arguments, shown
from recshard_lab.data import dataset_names
from recshard_lab.documents import Document, read_document, with_fix
from recshard_lab.embedding import EmbOptimType, OptimizerSpec
from recshard_lab.planner.model.estimate import COST_MODELS
from recshard_lab.planner.planner import SOLVERS
from recshard_lab.sharding.plan.types import nearest
from recshard_lab.train.job.tables import check_settings
from recshard_lab.train.pipelines.registry import check_pipeline

MOST_LISTED = 8  # mistakes that a message lists
METRICS = ("auc", "log_loss", "normalized_entropy", "calibration")
DENSE = ("adam", "adamw", "sgd", "adagrad")


def one_of(names: Sequence[str]) -> Any:
    """A string among `names`. Another one raises with the nearest name."""

    def check(given: Any) -> Any:
        if not isinstance(given, str) or given not in names:
            raise ValueError(f"must be one of {', '.join(names)}, got {given!r}{nearest(str(given), names)}")
        return given

    return Annotated[str, BeforeValidator(check)]


class Section(BaseModel):
    """A section of the file: an unknown key or a value of another type raises."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OpenSection(BaseModel):
    """A section with a name. Its other keys are settings of the named object."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    name: str

    @property
    def settings(self) -> dict[str, Any]:
        """The further keys."""
        return dict(self.model_extra or {})

    @property
    def mapping(self) -> dict[str, Any]:
        """Name and settings."""
        return {"name": self.name, **self.settings}


class ModelSection(OpenSection):
    """The model: a registered name with its settings, or ``package.module:factory`` (or ``file.py:factory``).

    A registered model has one table for each feature of the data. Settings of the tables are ``embedding_dim``,
    ``pooling``, ``init_max``, ``data_type``, and ``tables``: feature -> settings of its table that differ.
    A factory receives the settings and returns a module with ``model(dense_features, sparse_features) -> logits``.

    Args:
        name: dlrm, dlrm_dcn, deepfm, two_tower, or a factory.
    """

    @model_validator(mode="after")
    def _known(self) -> ModelSection:
        if ":" not in self.name:
            check_settings(self.name, self.settings)
        return self


class DataSection(OpenSection):
    """The dataset, by its registered name, and its settings.

    Args:
        name: movielens, criteo, synthetic-criteo, synthetic-ratings, or a dataset that you registered.
    """

    @model_validator(mode="after")
    def _known(self) -> DataSection:
        if self.name not in dataset_names():
            known = dataset_names()
            raise ValueError(f"dataset {self.name!r} does not exist{nearest(self.name, known)}; known: {known}")
        return self


class PipelineSection(OpenSection):
    """The training pipeline, and its switches.

    Args:
        name: base, sparse_dist, prefetch or semi_sync.
    """

    name: str = "sparse_dist"

    @model_validator(mode="after")
    def _known(self) -> PipelineSection:
        check_pipeline(self.mapping)
        return self


class TableOptimizer(Section):
    """The optimizer that updates table rows inside backward. A setting that it does not use raises.

    Args:
        name: by fbgemm's name, such as exact_sgd, exact_adagrad, exact_row_wise_adagrad.
        lr: learning rate.
        eps: added to the denominator.
        weight_decay: L2 regularization.
        beta1, beta2: decay of the moments of Adam and its relatives.
        momentum: of optimizers with momentum.
    """

    name: one_of([member.value for member in EmbOptimType]) = "exact_row_wise_adagrad"  # type: ignore[valid-type]
    lr: PositiveFloat = 0.05
    eps: NonNegativeFloat | None = None
    weight_decay: NonNegativeFloat | None = None
    beta1: NonNegativeFloat | None = None
    beta2: NonNegativeFloat | None = None
    momentum: NonNegativeFloat | None = None

    @model_validator(mode="after")
    def _read(self) -> TableOptimizer:
        OptimizerSpec.from_fused_params(self.fused_params)
        if self.eps is not None and self.name == EmbOptimType.EXACT_SGD.value:
            raise ValueError(f"exact_sgd has no eps, got eps={self.eps}. Fix: leave it out")
        return self

    @property
    def fused_params(self) -> dict[str, Any]:
        """The optimizer as sharders take it."""
        settings = self.model_dump(exclude_none=True)
        return {"optimizer": settings.pop("name"), "learning_rate": settings.pop("lr"), **settings}


class DenseOptimizer(Section):
    """torch's optimizer of the dense part.

    Args:
        name: adam, adamw, sgd or adagrad.
        lr: learning rate.
        eps: added to the denominator.
        weight_decay: as of torch's optimizer.
        momentum: of sgd.
    """

    name: one_of(DENSE) = "adam"  # type: ignore[valid-type]
    lr: PositiveFloat = 0.001
    eps: NonNegativeFloat | None = None
    weight_decay: NonNegativeFloat | None = None
    momentum: NonNegativeFloat | None = None


class Schedule(Section):
    """The factor of both learning rates at step t, from 1.

    It is ``t / warmup_steps`` during the warm-up, then 1. From `decay_start` on it is ``((end - t) / decay_steps) **
    power`` with ``end = decay_start + decay_steps``, and 0 after it. With power 2 it is MLPerf's schedule of DLRM.

    Args:
        warmup_steps: steps of the warm-up.
        decay_start: first step of the decay.
        decay_steps: steps of the decay.
        power: exponent of the decay.
    """

    warmup_steps: NonNegativeInt = 0
    decay_start: NonNegativeInt | None = None
    decay_steps: PositiveInt | None = None
    power: PositiveFloat = 2.0

    @model_validator(mode="after")
    def _whole(self) -> Schedule:
        if (self.decay_start is None) != (self.decay_steps is None):
            raise ValueError("decay_start and decay_steps need each other. Fix: set both or neither")
        return self

    def factor(self, step: int) -> float:
        """The factor at step t, from 1.

        >>> rates = Schedule(warmup_steps=4, decay_start=6, decay_steps=2, power=1.0)
        >>> [rates.factor(step) for step in (1, 4, 6, 7, 8)]
        [0.25, 1.0, 1.0, 0.5, 0.0]
        """
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.decay_start is None or self.decay_steps is None or step <= self.decay_start:
            return 1.0
        return float(max(0.0, (self.decay_start + self.decay_steps - step) / self.decay_steps) ** self.power)


class OptimizerSection(Section):
    """The optimizers of tables and dense part, and the schedule of both learning rates.

    Args:
        tables: section `optimizer.tables`.
        dense: section `optimizer.dense`.
        schedule: section `optimizer.schedule`.
    """

    tables: TableOptimizer = TableOptimizer()
    dense: DenseOptimizer = DenseOptimizer()
    schedule: Schedule | None = None


class PlanSection(Section):
    """A plan from a file, one scheme for every table, or settings of the planner. Default: the planner chooses.

    Args:
        path: file of a plan (.json).
        scheme: sharding scheme of every table.
        topology: a machine by name, such as h100x8, or a device profile (.json). Default: the running ranks.
        memory_gb: device memory of a rank, in 1e9 bytes.
        constraints: file of constraints.
        solver: greedy or exact.
        cost_model: recshard, latency or torchrec.
    """

    path: str | None = None
    scheme: str | None = None
    topology: str | None = None
    memory_gb: PositiveFloat | None = None
    constraints: str | None = None
    solver: one_of(SOLVERS) = "greedy"  # type: ignore[valid-type]
    cost_model: one_of(list(COST_MODELS)) = "recshard"  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _one(self) -> PlanSection:
        given = [name for name in ("path", "scheme", "topology") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each determine the plan. Fix: set one of them")
        return self


class CheckpointSection(Section):
    """Where and how often the run is saved, and whether it resumes.

    Args:
        path: folder of the checkpoint.
        every_steps: steps between saves. Default: only at the end.
        resume: "auto" resumes if there is a checkpoint, "always" requires one, "never" raises if there is one.
    """

    path: str
    every_steps: PositiveInt | None = None
    resume: one_of(("auto", "always", "never")) = "auto"  # type: ignore[valid-type]


class EvaluationSection(Section):
    """When the test samples are scored.

    Args:
        every_steps: steps between evaluations. Default: none during the run.
        at_end: whether to evaluate at the end.
        batch_size: samples of all ranks in one batch of the evaluation.
        max_samples: limit of the number of test samples.
    """

    every_steps: PositiveInt | None = None
    at_end: bool = True
    batch_size: PositiveInt = 8192
    max_samples: PositiveInt | None = None


class LogSection(Section):
    """Output of the run: a progress bar or lines on rank 0, TensorBoard, a file of JSON lines.

    Args:
        every_steps: steps between reports.
        progress: auto (a bar in a terminal, otherwise lines), bar, lines or off.
        tensorboard: folder of TensorBoard's files.
        jsonl: file with one JSON object for each report.
    """

    every_steps: PositiveInt = 20
    progress: one_of(("auto", "bar", "lines", "off")) = "auto"  # type: ignore[valid-type]
    tensorboard: str | None = None
    jsonl: str | None = None


class CommunicationSection(Section):
    """Number formats of rows and gradients in messages.

    Args:
        forward: of rows: fp32, fp16, bf16 or int8.
        backward: of gradients: fp32, fp16, bf16 or int8.
    """

    forward: one_of(("fp32", "fp16", "bf16", "int8")) = "fp32"  # type: ignore[valid-type]
    backward: one_of(("fp32", "fp16", "bf16", "int8")) = "fp32"  # type: ignore[valid-type]


class MultiHotSection(Section):
    """Makes a bag of each feature with one id, as MLPerf does for Criteo (`recshard_lab.data.MultiHot`).

    Args:
        sizes: ids in the bag of each feature, in the order of the features. Default: MLPerf's 26 sizes.
        distribution: of the added ids: uniform or pareto.
        seed: of the added ids.
    """

    sizes: list[PositiveInt] | None = None
    distribution: one_of(("uniform", "pareto")) = "uniform"  # type: ignore[valid-type]
    seed: NonNegativeInt = 0


class TrainConfig(Section):
    """A training run.

    Args:
        model, data, optimizer, plan, pipeline, checkpoint, evaluation, log, communication, multi_hot: see the sections.
        batch_size: samples of all ranks in one step.
        epochs: passes over the training samples.
        max_steps: limit of the number of steps.
        seed: of initial weights, order of samples, and all other random numbers.
        features: features of the data to train on. Default: all.
        shuffle: visit the samples in random order, a different one in each epoch.
        drop_last: skip the last batch of an epoch if it is incomplete.
        loader_prefetch: batches that a thread prepares ahead.
        metrics: metrics during training: auc, log_loss, normalized_entropy, calibration.
        metrics_window: number of last samples that they are computed over.

    >>> TrainConfig(model={"name": "dlrm"}, data={"name": "synthetic-ratings"}).optimizer.dense.name
    'adam'
    """

    model: ModelSection
    data: DataSection
    batch_size: PositiveInt = 4096
    epochs: PositiveInt = 1
    max_steps: PositiveInt | None = None
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0
    features: list[str] | None = None
    multi_hot: MultiHotSection | None = None
    shuffle: bool = True
    drop_last: bool = False
    loader_prefetch: NonNegativeInt = 0
    metrics: list[one_of(METRICS)] = ["auc"]  # type: ignore[valid-type]
    metrics_window: PositiveInt = 100_000
    optimizer: OptimizerSection = OptimizerSection()
    plan: PlanSection = PlanSection()
    pipeline: PipelineSection = PipelineSection()
    checkpoint: CheckpointSection | None = None
    evaluation: EvaluationSection = EvaluationSection()
    log: LogSection = LogSection()
    communication: CommunicationSection | None = None

    def with_paths_from(self, folder: Path) -> TrainConfig:
        """The config with relative paths resolved from `folder`."""

        def seen(path: Any) -> Any:
            return str((folder / path).resolve()) if isinstance(path, str) and not Path(path).is_absolute() else path

        found = self.model_dump(exclude_none=True)
        places = [("plan", "path"), ("plan", "constraints"), ("checkpoint", "path"), ("log", "tensorboard")]
        places += [("log", "jsonl"), ("data", "path")]
        for section, key in places:
            if key in found.get(section, {}):
                found[section][key] = seen(found[section][key])
        machine = found.get("plan", {}).get("topology", "")
        if machine.endswith(".json"):
            found["plan"]["topology"] = seen(machine)
        name = found["model"]["name"]
        if ".py:" in name:
            found["model"]["name"] = seen(name)
        return TrainConfig.model_validate(found)


@checks_arguments
def read_config(path: str | Path) -> TrainConfig:
    """Reads a run from a file.

    Raises:
        ValueError: one line per mistake: ``FILE, line 7, field 'optimizer.dense.lr': ...``.
        OSError: the file cannot be read.

    >>> from tempfile import mkdtemp
    >>> file = Path(mkdtemp()) / "run.yaml"
    >>> _ = file.write_text("model: {name: dlrm}\\ndata: {name: movielens}\\nepoch: 3\\n")
    >>> read_config(file)
    Traceback (most recent call last):
    ...
    ValueError: .../run.yaml, line 3, field 'epoch': unknown field (did you mean 'epochs'?). Fix: ...
    """
    document = read_document(path)
    if not isinstance(document.content, dict):
        raise ValueError(
            f"{document.where()}: must be an object, got {shown(document.content)}. Fix: use the fields "
            f"{', '.join(TrainConfig.model_fields)}."
        )
    try:
        found = TrainConfig.model_validate(document.content)
    except ValidationError as error:
        more = error.error_count() - MOST_LISTED
        lines = [_line_of(document, each) for each in error.errors(include_url=False)[:MOST_LISTED]]
        words = "\n".join([*lines, f"... and {more:,} more"] if more > 0 else lines)
        raise ValueError(with_fix(words, "correct these fields (recshard train --schema lists all)")) from None
    return found.with_paths_from(Path(path).resolve().parent)


def _line_of(document: Document, error: Any) -> str:
    keys = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        known = _fields_at(keys[:-1])
        near = nearest(str(keys[-1]), known) or f"; fields: {', '.join(known)}"
        return f"{document.where(keys)}: unknown field{near}"
    if error["type"] == "missing":
        return f"{document.where(keys[:-1])}: field {keys[-1]!r} is missing"
    words = str(error["msg"]).removeprefix("Value error, ")
    words = words[0].lower() + words[1:]
    given = "" if error["type"] == "value_error" else f", got {shown(error['input'])}"
    return f"{document.where(keys)}: {words}{given}"


def _fields_at(keys: Sequence[Any]) -> list[str]:
    """The fields of the section at these keys."""
    section: Any = TrainConfig
    for key in keys:
        kind = section.model_fields[key].annotation
        kinds = [kind, *typing.get_args(kind)]
        section = next(each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel))
    return list(section.model_fields)
