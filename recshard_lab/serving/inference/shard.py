"""`shard_for_inference`: a model whose tables are split over devices of this process, or over launched ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm import ShardingEnv, agreed, compute_device, from_first_rank
from recshard_lab.distributed import (
    DistributedModelParallel,
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)
from recshard_lab.distributed.state.checkpoint.files import CheckpointError
from recshard_lab.distributed.state.checkpoint.reader import tensors_in
from recshard_lab.embedding import (
    BaseEmbeddingConfig,
    EmbeddingBagCollection,
    EmbeddingCollection,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from recshard_lab.planner import EmbeddingShardingPlanner
from recshard_lab.serving.inference.devices import Device, DeviceMemory, devices_named
from recshard_lab.serving.inference.ranks import over_ranks, replicate_dense
from recshard_lab.serving.inference.sources import Checkpoint, live_source, open_checkpoint, read_rectangles
from recshard_lab.serving.inference.tiles import DeviceEmbeddingBagCollection, DeviceEmbeddingCollection
from recshard_lab.sharding import (
    ParameterConstraints,
    PlanError,
    ShardingPlan,
    ShardingType,
    Topology,
    configs_of,
    scheme_names,
)

_POOLED = (EmbeddingBagCollection, FusedEmbeddingBagCollection)
_SEQUENCE = (EmbeddingCollection, FusedEmbeddingCollection)


class ShardedInference(nn.Module):
    """A model for inference, with tables on several devices or ranks. `shard_for_inference` makes it.

    Attributes:
        module: the model, with other collections and a copy of the dense part.
        plan: module path -> table -> shards. Rank k is the k-th device, or the launched rank k.
    """

    def __init__(self, module: nn.Module, plan: ShardingPlan, devices: Sequence[Device] = ()) -> None:
        super().__init__()
        self.module, self.plan, self._shard_devices = module, plan, list(devices)
        self.eval()

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model, without gradients. Arguments and result are those of the model.

        Over launched ranks it is collective: each rank passes its own batch, and has the result of that batch.
        """
        return self.module(*args, **kwargs)

    def memory(self) -> list[DeviceMemory]:
        """The memory account of each device of this process, after the last batch. Over launched ranks: of this rank.

        Ranks do not count ids and rows apart: ``output_bytes`` are all buffers of the exchanges.
        """
        if self._shard_devices:
            return [device.memory() for device in self._shard_devices]
        sharded = [part for part in self.module.modules() if isinstance(part, ShardedCollection)]
        weights = [
            weight for part in sharded for own in part.table_shards().values() for weight in own.local_weights.values()
        ]
        table_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
        buffers = sum(part.exchange_bytes() for part in sharded)
        return [DeviceMemory(str(sharded[0].device), table_bytes, 0, buffers)]


@names_wrong_arguments
def shard_for_inference(
    model: nn.Module,
    plan: ShardingPlan | None = None,
    devices: Sequence[torch.device | str] | None = None,
    *,
    output_device: torch.device | str | None = None,
    checkpoint: str | Path | None = None,
) -> ShardedInference:
    """Splits the tables of a trained model over devices of this process, or over launched ranks, for inference.

    The same plans as for training apply: table-, row- and column-wise shards, mixtures of them, and any other tiling.
    No optimizer state is stored. With ``devices``, each device looks up the ids of its shards. The output device adds
    row shards, joins column shards and runs the dense part. Of a replicated table one copy is stored.

    Several ``"cpu"`` entries are virtual devices: worker threads with separate memory accounts. They share this
    machine's cores, so use them to see how a plan works, not to predict the speed of separate machines.

    Without ``devices``, the ranks of the running process group split the tables (`launch`). The call is then
    collective, each rank passes its own batches, and the dense part is replicated.

    Args:
        model: a model with embedding collections, or a `DistributedModelParallel`. It is not changed. Rows are copied a
            shard at a time: no table is copied whole, unless its plan has a whole shard.
        plan: rank k is ``devices[k]``, or the launched rank k. Default: planned for the shortest forward
            (``cost_model="latency"``); on devices of one process without replicas.
        devices: ``["cuda:0", "cuda:1"]``, ``["cpu", "cuda:0"]``, ``["cpu", "cpu"]``. Default: the running ranks.
        output_device: runs the dense part and has the outputs. Default: the first of ``devices``.
        checkpoint: a folder that `save_checkpoint` wrote. Tables and dense part are read from it, and the model may be
            on ``meta``.

    Returns:
        The model in eval mode. It takes the arguments of ``model``.

    Raises:
        PlanError: an invalid plan for these tables and devices; ``devices`` with a model whose shards are on several
            ranks.
        ValueError: a device that does not exist, or a collection that has no static tables.
        CheckpointError: a checkpoint that is missing, damaged, or of another model.

    >>> from recshard_lab import EmbeddingBagConfig, KeyedJaggedTensor, row_wise, construct_module_sharding_plan
    >>> table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    >>> tables = EmbeddingBagCollection([table])
    >>> split = construct_module_sharding_plan(tables, {"t": row_wise()}, world_size=2)
    >>> served = shard_for_inference(tables, ShardingPlan({"": split}), ["cpu", "cpu"])
    >>> batch = KeyedJaggedTensor(["f"], torch.tensor([1, 7, 2]), lengths=torch.tensor([2, 1]))
    >>> torch.allclose(served(batch).values(), tables(batch).values())
    True
    >>> [account.table_bytes for account in served.memory()]  # five rows and a row of zeros each
    [96, 96]
    """
    bare = model._bare if isinstance(model, DistributedModelParallel) else model
    collections = _collections(bare)
    tables = {path: list(configs_of(part) or []) for path, part in collections.items()}
    if devices is None:
        if output_device is not None:
            raise ValueError("output_device applies to devices of one process. Fix: pass devices= too, or omit it")
        return _over_ranks(model, bare, collections, tables, plan, checkpoint)
    places = devices_named(devices)
    output = places[0] if output_device is None else devices_named([output_device])[0]
    saved = None if checkpoint is None else open_checkpoint(checkpoint)
    sources = {
        path: live_source(part) if saved is None else _saved_source(saved, path, part, tables[path])
        for path, part in collections.items()
    }
    if plan is None:
        plan = _planned(bare, tables, places)
    plan = _resolved(plan, tables, len(places), None)
    runners = [Device(place, number) for number, place in enumerate(places)]
    made: dict[str, nn.Module] = {}
    for path, shardings in plan.plan.items():
        part = collections[path]
        made[path] = (DeviceEmbeddingBagCollection if _pools(part) else DeviceEmbeddingCollection)(
            tables[path],
            shardings,
            runners,
            output,
            sources[path],
            weighted=bool(getattr(part, "is_weighted", lambda: False)()),
            out_of_range=str(getattr(part, "out_of_range", "error")),
            need_indices=bool(getattr(part, "need_indices", lambda: False)()),
        )
    module = _with(bare, collections, made)
    if saved is not None:
        _read_dense(module, made, *saved)
    return ShardedInference(module.to(output), plan, runners)


def _over_ranks(
    model: nn.Module,
    bare: nn.Module,
    collections: Mapping[str, nn.Module],
    tables: Mapping[str, list[BaseEmbeddingConfig]],
    plan: ShardingPlan | None,
    checkpoint: str | Path | None,
) -> ShardedInference:
    """The form over launched ranks. Collective."""
    env = model.env if isinstance(model, DistributedModelParallel) else ShardingEnv.default()
    device = model.device if isinstance(model, DistributedModelParallel) else compute_device(env)
    if plan is None:
        kind = "cpu" if device.type == "cpu" else "cuda"
        topology = Topology(env.world_size, compute_device=kind, local_world_size=env.local_world_size)
        plan = from_first_rank(env, lambda: EmbeddingShardingPlanner(topology, cost_model="latency").plan(bare))
    found: ShardingPlan = plan
    found = agreed(env, lambda: _resolved(found, tables, env.world_size, env.local_world_size))
    saved, sources = None, None
    if checkpoint is not None:
        folder = checkpoint
        saved = agreed(env, lambda: open_checkpoint(folder))
        sources = {path: _saved_source(saved, path, part, tables[path]) for path, part in collections.items()}
    pooled = {path: _pools(part) for path, part in collections.items()}
    made = over_ranks(collections, pooled, found, env, device, sources)
    module = _with(bare, collections, made)
    if saved is not None:
        dense, read = module, saved
        agreed(env, lambda: _read_dense(dense, made, *read))
    module = module.to(device)
    replicate_dense(module, made, env)
    return ShardedInference(module, found)


def _planned(
    bare: nn.Module, tables: Mapping[str, Sequence[BaseEmbeddingConfig]], places: Sequence[torch.device]
) -> ShardingPlan:
    """The plan for devices of this process. One copy of a table serves all of them, so none is replicated."""
    kind = "cuda" if any(place.type == "cuda" for place in places) else "cpu"
    schemes = [name for name in scheme_names() if name != ShardingType.DATA_PARALLEL]
    limits = {
        table.name: ParameterConstraints(sharding_types=schemes) for configs in tables.values() for table in configs
    }
    topology = Topology(len(places), compute_device=kind)
    return EmbeddingShardingPlanner(topology, constraints=limits, cost_model="latency").plan(bare)


def _resolved(
    plan: ShardingPlan,
    tables: Mapping[str, Sequence[BaseEmbeddingConfig]],
    world_size: int,
    local_world_size: int | None,
) -> ShardingPlan:
    """The plan with explicit shards, of all collections.

    Raises:
        PlanError: a module that does not exist, or a collection that is not in the plan.
    """
    for path in plan.plan:
        if path not in tables:
            raise PlanError(
                f"the plan names module {path!r}, but the embedding collections of this model are {sorted(tables)}. "
                f"Fix: use one of these paths ('' is the model itself)"
            )
    for path in tables:
        if path not in plan.plan:
            raise PlanError(f"the collection {path!r} is not in the plan. Fix: add an entry for its tables")
    return plan.resolved(tables, world_size, local_world_size)


def _saved_source(
    saved: tuple[Path, Any], path: str, part: nn.Module, tables: Sequence[BaseEmbeddingConfig]
) -> Checkpoint:
    inner = "embedding_bags" if _pools(part) else "embeddings"
    return Checkpoint(*saved, path, {table.name: f"{inner}.{table.name}.weight" for table in tables})


def _collections(model: nn.Module) -> dict[str, nn.Module]:
    """Module path -> embedding collection.

    Raises:
        ValueError: none, or one whose tables are not static.
    """
    found: dict[str, nn.Module] = {}
    for path, part in model.named_modules():
        if any(path.startswith(f"{outer}." if outer else "") for outer in found):
            continue
        if configs_of(part):
            _pools(part)
            found[path] = part
    if not found:
        raise ValueError(f"{type(model).__name__} has no embedding collection. Fix: pass a model that has one")
    return found


def _pools(part: nn.Module) -> bool:
    """Whether a collection pools.

    Raises:
        ValueError: it cannot be sharded for inference.
    """
    static = not any(table.dynamic for table in configs_of(part) or [])
    sharded = isinstance(part, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection)
    if static and (sharded or isinstance(part, _POOLED + _SEQUENCE)):
        return isinstance(part, (*_POOLED, ShardedEmbeddingBagCollection))
    fix = "call export_static first" if not static else "use EmbeddingBagCollection or EmbeddingCollection"
    raise ValueError(f"{type(part).__name__} cannot be sharded for inference. Fix: {fix}")


def _with(model: nn.Module, old: Mapping[str, nn.Module], new: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of the model with other collections; the old ones are not copied."""
    if "" in new:
        return new[""]
    copy = deepcopy(model, {id(part): part for part in old.values()})
    for path, part in new.items():
        parent, _, name = path.rpartition(".")
        setattr(copy.get_submodule(parent), name, part)
    return copy


@torch.no_grad()
def _read_dense(module: nn.Module, collections: Mapping[str, nn.Module], folder: Path, metadata: Any) -> None:
    """Fills the dense part from a checkpoint.

    Raises:
        CheckpointError: a tensor that is not in the checkpoint.
    """
    inside = tuple(f"{path}." if path else "" for path in collections)
    saved = tensors_in(metadata)
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        if prefix.startswith(inside):
            continue
        for name, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
            key = ("model", prefix + name)
            if key not in saved and not isinstance(tensor, nn.Parameter) and not tensor.is_meta:
                continue  # a buffer that is not part of a state dict
            if key not in saved or tuple(saved[key].size) != tuple(tensor.shape):
                raise CheckpointError(
                    f"{prefix}{name} is not in checkpoint {folder}. Fix: pass the model that was saved"
                )
            filled = torch.empty_like(tensor, device="cpu")
            read_rectangles(folder, metadata, key, [(tuple((0, size) for size in tensor.shape), filled)])
            if isinstance(tensor, nn.Parameter):
                setattr(owner, name, nn.Parameter(filled, requires_grad=False))
            else:
                setattr(owner, name, filled)
