"""What a training run is, as one file: YAML or JSON, every key checked, unknown ones refused with the nearest there is.

::

    model: {name: dlrm, embedding_dim: 16, over_arch_layer_sizes: [128, 64, 1]}
    data: {name: movielens, variant: 100k}
    batch_size: 4096                 # of all ranks together: the same steps whatever their number
    epochs: 2
    optimizer:
      tables: {name: exact_row_wise_adagrad, lr: 0.1}
      dense: {name: adam, lr: 0.002}
    pipeline: {name: sparse_dist}
    checkpoint: {path: run/checkpoint, every_steps: 500}

Relative paths start at the file's own folder.
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

MOST_TOLD = 8  # mistakes that a message lists
METRICS = ("auc", "log_loss", "normalized_entropy", "calibration")
DENSE = ("adam", "adamw", "sgd", "adagrad")


def one_of(names: Sequence[str]) -> Any:
    """A string among `names`; another is refused with the nearest."""

    def check(given: Any) -> Any:
        if not isinstance(given, str) or given not in names:
            raise ValueError(f"must be one of {', '.join(names)}, got {given!r}{nearest(str(given), names)}")
        return given

    return Annotated[str, BeforeValidator(check)]


class Section(BaseModel):
    """A part of the file: no key but its own, no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OpenSection(BaseModel):
    """A part whose further keys are settings of what it names."""

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
    """Which model: a registered name with its settings, or ``package.module:factory`` (or ``file.py:factory``).

    A registered model has one table a feature of the data, and takes their settings beside its own: ``embedding_dim``,
    ``pooling``, ``init_max``, ``data_type``, and ``tables``, feature -> what is different for its table.
    A factory is called with the settings and gives a module with ``model(dense_features, sparse_features) -> logits``.
    """

    @model_validator(mode="after")
    def _known(self) -> ModelSection:
        if ":" not in self.name:
            check_settings(self.name, self.settings)
        return self


class DataSection(OpenSection):
    """Which data set, by its registered name, and its settings."""

    @model_validator(mode="after")
    def _known(self) -> DataSection:
        if self.name not in dataset_names():
            known = dataset_names()
            raise ValueError(f"no dataset is named {self.name!r}{nearest(self.name, known)}; there are: {known}")
        return self


class PipelineSection(OpenSection):
    """Which pipeline, and its switches."""

    name: str = "sparse_dist"

    @model_validator(mode="after")
    def _known(self) -> PipelineSection:
        check_pipeline(self.mapping)
        return self


class TableOptimizer(Section):
    """The optimizer fused into the tables' backward; settings that it does not read are refused."""

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
            raise ValueError(f"eps={self.eps} has no place in exact_sgd: leave it out")
        return self

    @property
    def fused_params(self) -> dict[str, Any]:
        """As sharders take it."""
        told = self.model_dump(exclude_none=True)
        return {"optimizer": told.pop("name"), "learning_rate": told.pop("lr"), **told}


class DenseOptimizer(Section):
    """torch's optimizer of everything else."""

    name: one_of(DENSE) = "adam"  # type: ignore[valid-type]
    lr: PositiveFloat = 0.001
    eps: NonNegativeFloat | None = None
    weight_decay: NonNegativeFloat | None = None
    momentum: NonNegativeFloat | None = None


class Schedule(Section):
    """What both learning rates are multiplied by, at step t from 1.

    ``t / warmup_steps`` up to there; then 1; from `decay_start` on ``((end - t) / decay_steps) ** power`` with ``end =
    decay_start + decay_steps``, and 0 after it. With power 2 it is MLPerf's schedule of DLRM.
    """

    warmup_steps: NonNegativeInt = 0
    decay_start: NonNegativeInt | None = None
    decay_steps: PositiveInt | None = None
    power: PositiveFloat = 2.0

    @model_validator(mode="after")
    def _whole(self) -> Schedule:
        if (self.decay_start is None) != (self.decay_steps is None):
            raise ValueError("decay_start and decay_steps belong together: give both or neither")
        return self

    def factor(self, step: int) -> float:
        """At step t, from 1.

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
    """Of the tables, of the rest, and the schedule of both."""

    tables: TableOptimizer = TableOptimizer()
    dense: DenseOptimizer = DenseOptimizer()
    schedule: Schedule | None = None


class PlanSection(Section):
    """A plan from a file, one scheme for every table, or what the planner is told.

    topology: a machine by name, such as h100x8, or a device profile (.json); the running ranks when left out.
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
        said = [name for name in ("path", "scheme", "topology") if getattr(self, name) is not None]
        if len(said) > 1:
            raise ValueError(f"{' and '.join(said)} say where tables lie: give one of them")
        return self


class CheckpointSection(Section):
    """Where the run is saved, how often, and whether one that is there is gone on with.

    resume: "auto" goes on where there is one, "always" needs one, "never" refuses one.
    """

    path: str
    every_steps: PositiveInt | None = None
    resume: one_of(("auto", "always", "never")) = "auto"  # type: ignore[valid-type]


class EvaluationSection(Section):
    """When the test samples are scored: at the end, and every so many steps."""

    every_steps: PositiveInt | None = None
    at_end: bool = True
    batch_size: PositiveInt = 8192
    max_samples: PositiveInt | None = None


class LogSection(Section):
    """What is told of the run: a bar or lines on rank 0, TensorBoard, a JSON object a line."""

    every_steps: PositiveInt = 20
    progress: one_of(("auto", "bar", "lines", "off")) = "auto"  # type: ignore[valid-type]
    tensorboard: str | None = None
    jsonl: str | None = None


class CommunicationSection(Section):
    """Number formats of rows and gradients on the wire."""

    forward: one_of(("fp32", "fp16", "bf16", "int8")) = "fp32"  # type: ignore[valid-type]
    backward: one_of(("fp32", "fp16", "bf16", "int8")) = "fp32"  # type: ignore[valid-type]


class MultiHotSection(Section):
    """One id a feature becomes a bag, as MLPerf makes Criteo's: as of `recshard_lab.data.MultiHot`.

    sizes: ids of each feature's bag, in the order of the features; MLPerf's 26 when left out.
    """

    sizes: list[PositiveInt] | None = None
    distribution: one_of(("uniform", "pareto")) = "uniform"  # type: ignore[valid-type]
    seed: NonNegativeInt = 0


class TrainConfig(Section):
    """A training run.

    Args:
        model, data: what is trained on what.
        batch_size: samples of all ranks in a step.
        epochs: passes over the training samples.
        max_steps: stop there, in whichever epoch.
        seed: of the first weights, the order of samples, and whatever else is drawn.
        features: of the data, those to train on; all when left out.
        multi_hot: makes bags of features with one id a sample.
        shuffle: visit the samples in a drawn order, another in every epoch.
        drop_last: leave out an epoch's last batch where it is not whole.
        loader_prefetch: batches that a thread prepares ahead.
        metrics: what is watched while training, over the last `metrics_window` samples.
        optimizer, plan, pipeline, checkpoint, evaluation, log, communication: as of their sections.

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
        """The same with relative paths as seen from `folder`."""

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
    """The run that a file describes.

    Raises:
        ValueError: what is wrong, as ``FILE, line 7, field 'optimizer.dense.lr': ...``; every mistake a line.
        OSError: the file cannot be read.

    >>> from tempfile import mkdtemp
    >>> file = Path(mkdtemp()) / "run.yaml"
    >>> _ = file.write_text("model: {name: dlrm}\\ndata: {name: movielens}\\nepoch: 3\\n")
    >>> read_config(file)
    Traceback (most recent call last):
    ...
    ValueError: .../run.yaml, line 3, field 'epoch': there is no such field (did you mean 'epochs'?). Fix: ...
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
        more = error.error_count() - MOST_TOLD
        told = [_told(document, each) for each in error.errors(include_url=False)[:MOST_TOLD]]
        words = "\n".join([*told, f"... and {more:,} more"] if more > 0 else told)
        raise ValueError(with_fix(words, "correct these fields (recshard train --schema lists all)")) from None
    return found.with_paths_from(Path(path).resolve().parent)


def _told(document: Document, error: Any) -> str:
    keys = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        known = _fields_at(keys[:-1])
        near = nearest(str(keys[-1]), known) or f"; fields: {', '.join(known)}"
        return f"{document.where(keys)}: there is no such field{near}"
    if error["type"] == "missing":
        return f"{document.where(keys[:-1])}: field {keys[-1]!r} is missing"
    words = str(error["msg"]).removeprefix("Value error, ")
    words = words[0].lower() + words[1:]
    given = "" if error["type"] == "value_error" else f", got {shown(error['input'])}"
    return f"{document.where(keys)}: {words}{given}"


def _fields_at(keys: Sequence[Any]) -> list[str]:
    """The fields of the section that these keys lead to."""
    section: Any = TrainConfig
    for key in keys:
        kind = section.model_fields[key].annotation
        kinds = [kind, *typing.get_args(kind)]
        section = next(each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel))
    return list(section.model_fields)
