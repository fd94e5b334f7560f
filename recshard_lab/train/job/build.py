"""From a config to objects: data, model, plan, sharded model, optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from recshard_lab.comm import CommType, QCommsConfig, Registry, ShardingEnv, get_qcomm_codecs_registry
from recshard_lab.data import BatchLoader, MultiHot, build_dataset
from recshard_lab.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    RankPeers,
)
from recshard_lab.documents import read_text
from recshard_lab.models import ModelKind, build_model, model_named, train_task
from recshard_lab.planner import EmbeddingShardingPlanner, Workload, read_constraints, tables_of
from recshard_lab.sharding import ParameterSharding, PlanError, ShardingPlan, Topology, scheme_named
from recshard_lab.sources import named_object
from recshard_lab.train.job.config import ModelSection, PlanSection, TrainConfig
from recshard_lab.train.job.sources import CheckedSource, check_features
from recshard_lab.train.job.tables import TABLE_SETTINGS, of_the_model, tables_for
from recshard_lab.train.pipelines.registry import pipeline_kind

MEASURED_BATCHES = 4
_PLAIN = ModelKind.__dataclass_fields__["task"].default  # cross entropy of logits
DENSE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}


def build_sources(config: TrainConfig) -> tuple[CheckedSource, CheckedSource]:
    """The training samples and the test samples.

    Raises:
        ValueError: data that cannot be read, a feature that they do not have, or no training sample.
    """
    splits = build_dataset(config.data.mapping)
    train, test = (
        CheckedSource(source, config.features, what)
        for source, what in ((splits.train, "training"), (splits.test, "test"))
    )
    if not len(train):
        raise ValueError(f"{train.source} has no training samples")
    if config.multi_hot is not None:
        settings = config.multi_hot.model_dump(exclude_none=True)
        train.transform = test.transform = MultiHot(rows=list(train.features.values()), **settings)
    return train, test


def build_unsharded(section: ModelSection, source: CheckedSource, env: ShardingEnv | None = None) -> nn.Module:
    """The model. Registered models are on the meta device.

    Args:
        env: the ranks, for losses that compare the samples of all of them.

    Raises:
        ValueError: an unknown model or setting, or a model that does not fit the samples.
    """
    if ":" not in section.name:
        model = _registered(section, source, env or ShardingEnv.from_local(1, 0))
    else:
        factory = named_object(section.name)
        try:
            model = factory(**section.settings) if not isinstance(factory, nn.Module) else factory
        except Exception as error:  # user code may raise anything
            raise ValueError(f"model {section.name} raised {type(error).__name__}: {error}") from error
        if not isinstance(model, nn.Module):
            raise ValueError(f"model {section.name} returns a {type(model).__name__}, expected a torch.nn.Module")
    check_features(model, source)
    return model


def _registered(section: ModelSection, source: CheckedSource, env: ShardingEnv) -> nn.Module:
    """A model by name, inside its loss if it has one."""
    own = {key: value for key, value in section.settings.items() if key in TABLE_SETTINGS}
    settings = of_the_model(section.settings)
    kind = model_named(section.name)
    if "dense_in_features" in {each.name for each in fields(kind.settings)}:
        settings.setdefault("dense_in_features", source.num_dense_features)
    model = build_model(section.name, tables_for(source.features, **own), settings, device="meta", dense_device="meta")
    if not brings_its_loss(section):
        return model
    peers: Any = RankPeers(env)
    return train_task(section.name, model, settings, peers=peers)


def brings_its_loss(section: ModelSection) -> bool:
    """Whether the model takes a batch and returns ``(loss, (loss, logits, labels))`` instead of logits."""
    return ":" not in section.name and model_named(section.name).task is not _PLAIN


def build_sharders(config: TrainConfig) -> list[Any]:
    """The sharders of the model's collections, with the tables' optimizer."""
    fused = config.optimizer.tables.fused_params
    codecs: Registry | None = None
    if config.communication is not None:
        forward, backward = (CommType(name) for name in (config.communication.forward, config.communication.backward))
        codecs = get_qcomm_codecs_registry(QCommsConfig(forward, backward))
    return [EmbeddingBagCollectionSharder(fused, codecs), EmbeddingCollectionSharder(fused, codecs)]


def build_plan(
    config: TrainConfig, model: nn.Module, source: CheckedSource, env: ShardingEnv, device: torch.device, sharders: Any
) -> ShardingPlan:
    """The plan of the config, planned on rank 0. All ranks must call it.

    Raises:
        PlanError: a plan that does not fit these ranks.
        ValueError: a file that is not a plan.
    """
    said = config.plan
    if said.path is not None:
        return _read_plan(said.path, tables_of(model), env)
    if said.scheme is not None:
        name = scheme_named(said.scheme).name
        entries = {path: {t.name: ParameterSharding(name) for t in own} for path, own in tables_of(model).items()}
        return ShardingPlan(entries)  # type: ignore[arg-type]
    return planner_of(config, model, source, _topology(said, env, device)).collective_plan(model, sharders, env.pg)


def planner_of(
    config: TrainConfig, model: nn.Module, source: CheckedSource, topology: Topology
) -> EmbeddingShardingPlanner:
    """The planner of the config. Its workload is measured on the first batches of the data.

    Raises:
        ValueError: constraints or samples that cannot be read.
    """
    said = config.plan
    inside = tuple(f"{path}." if path else "" for path in tables_of(model))
    dense = sum(p.numel() for path, p in model.named_parameters() if not path.startswith(inside))
    loader = BatchLoader(source, config.batch_size, 0, topology.world_size, shuffle=config.shuffle, seed=config.seed)
    batches = [batch.sparse_features for batch, _ in zip(loader, range(MEASURED_BATCHES), strict=False)]
    tables = [table for own in tables_of(model).values() for table in own]
    workload = Workload.measured(
        [batch for batch in batches if batch.stride() == batches[0].stride()],
        tables,
        optimizer=config.optimizer.tables.name,
        dense_parameters=dense,
        pipeline=pipeline_kind(config.pipeline.name).overlap,
    )
    names = [table.name for table in tables]
    constraints = read_constraints(said.constraints, names) if said.constraints is not None else None
    options = {"solver": said.solver, "cost_model": said.cost_model}
    return EmbeddingShardingPlanner(topology, constraints=constraints, workload=workload, **options)


def _read_plan(path: str, tables: Mapping[str, Any], env: ShardingEnv) -> ShardingPlan:
    try:
        found = ShardingPlan.from_json(read_text(path, (".json",))[1])
        return found.resolved(tables, env.world_size, env.local_world_size)
    except PlanError as error:
        raise PlanError(f"plan {path}, on {env.world_size} ranks: {error}") from None


def _topology(said: PlanSection, env: ShardingEnv, device: torch.device) -> Topology:
    if said.topology is not None:
        profile = said.topology.endswith(".json")
        machine = Topology.from_profile(said.topology) if profile else Topology.preset(said.topology)
        if machine.world_size != env.world_size:
            raise PlanError(
                f"plan.topology {said.topology!r} has {machine.world_size} ranks, but {env.world_size} are running. "
                f"Fix: name a topology with {env.world_size} ranks"
            )
    else:
        kind = "cpu" if device.type == "cpu" else "cuda"  # every accelerator is planned as a GPU
        machine = Topology(env.world_size, compute_device=kind, local_world_size=env.local_world_size)
    return machine if said.memory_gb is None else machine.with_memory(said.memory_gb)


def build_dense_optimizer(config: TrainConfig, model: DistributedModelParallel) -> torch.optim.Optimizer:
    """The torch optimizer of the parameters that backward does not update.

    Raises:
        ValueError: a setting that this optimizer does not have, by name.
    """
    settings = config.optimizer.dense.model_dump(exclude_none=True)
    name = settings.pop("name")
    try:
        return DENSE_OPTIMIZERS[name](model.dense_parameters(), **settings)
    except TypeError as error:
        raise ValueError(f"optimizer.dense: {name} does not take {', '.join(settings)}: {error}") from None
