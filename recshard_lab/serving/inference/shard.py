"""`shard_for_inference`: a model whose tables are split over devices of this process, or over launched ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
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
from recshard_lab.distributed.discover import refuse_unshardable
from recshard_lab.embedding import (
    BaseEmbeddingConfig,
    EmbeddingBagCollection,
    EmbeddingCollection,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
)
from recshard_lab.embedding.quantized.collections import QuantCollection, Types, with_types
from recshard_lab.embedding.quantized.quantize import saved_model, weight_name
from recshard_lab.planner import EmbeddingShardingPlanner
from recshard_lab.saved.model import SavedModel
from recshard_lab.serving.inference.capture import CapturedInference
from recshard_lab.serving.inference.devices import Device, DeviceMemory, devices_named
from recshard_lab.serving.inference.latency import LatencyTable, compare_latencies
from recshard_lab.serving.inference.packed import Tables, packed_rows, packed_table
from recshard_lab.serving.inference.ranks import over_ranks, replicate_dense
from recshard_lab.serving.inference.sources import Saved, Source, live_source
from recshard_lab.serving.inference.tiles import DeviceEmbeddingBagCollection, DeviceEmbeddingCollection, DeviceTiles
from recshard_lab.sharding import (
    ParameterConstraints,
    PlanError,
    ShardingPlan,
    ShardingType,
    Topology,
    configs_of,
    find_collections,
    scheme_names,
)

_POOLED = (EmbeddingBagCollection, FusedEmbeddingBagCollection, QuantEmbeddingBagCollection)
_SEQUENCE = (EmbeddingCollection, FusedEmbeddingCollection, QuantEmbeddingCollection)


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

    def capture(
        self,
        *example: Any,
        batch_sizes: Sequence[int] = (1, 16, 256),
        ids_per_sample: float | Mapping[str, float] | None = None,
    ) -> CapturedInference:
        """The model at fixed batch sizes: on CUDA one graph each, which a call launches as a whole.

        A batch runs at the smallest size that it fits into. The model must not read numbers of the batch on the host.

        Args:
            example: arguments of one call: tensors with one row a sample, and `KeyedJaggedTensor`.
            batch_sizes: samples of each fixed size.
            ids_per_sample: ids for which there is room, for all features or feature -> number: a mean over the
                samples of a batch. Default: the most that a sample of the example has.

        Raises:
            ValueError: a model over launched ranks or over several devices of which one is a GPU, or other arguments.

        >>> from recshard_lab import EmbeddingBagConfig, KeyedJaggedTensor
        >>> tables = [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])]
        >>> served = shard_for_inference(EmbeddingBagCollection(tables=tables), devices=["cpu"])
        >>> batch = KeyedJaggedTensor(["f"], torch.tensor([1, 7, 2]), lengths=torch.tensor([2, 1]))
        >>> captured = served.capture(batch, batch_sizes=[4])
        >>> captured
        CapturedInference(programs without graphs of 4 samples)
        >>> torch.equal(captured(batch).values(), served(batch).values())
        True
        """
        parts = [part for part in self.module.modules() if isinstance(part, DeviceTiles)]
        if not parts:
            raise ValueError(
                "capture() is for devices of one process, and this model is over launched ranks. Fix: pass devices= to "
                "shard_for_inference"
            )
        output = parts[0].output
        places = {group.place for part in parts for group in part.groups} | {output}
        if len(places) > 1:
            names = ", ".join(sorted(map(str, places)))
            raise ValueError(f"a graph runs on one device, and the shards are on {names}. Fix: devices=['{output}']")
        return CapturedInference(self, parts, output, example, batch_sizes, ids_per_sample)

    @property
    def has_devices(self) -> bool:
        """Whether the tables are on devices of this process, not on launched ranks."""
        return bool(self._shard_devices)

    def latency(self, *batch: Any, topology: Topology | None = None, calls: int = 30) -> LatencyTable:
        """The predicted latency of this plan beside the measured one: `compare_latencies` of one model."""
        return compare_latencies({"this plan": self}, *batch, topology=topology, calls=calls)

    def memory(self) -> list[DeviceMemory]:
        """The memory account of each device of this process, after the last batch. Over launched ranks: of this rank.

        Ranks do not count ids and rows apart: ``output_bytes`` are all buffers of the exchanges.
        """
        if self.has_devices:
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
    dtype: Types | None = None,
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
        checkpoint: files with the weights of tables and dense part, as `quantize_embeddings` takes them. The model may
            be on ``meta``.
        dtype: quantizes the tables on the way: a number format, or table name -> format, as `quantize_embeddings` takes
            it. Default: tables keep theirs. A model that `quantize_embeddings` made keeps its formats too. Shards of
            columns keep the scale and bias of whole rows, so lookups read the same numbers as unsharded.

    Returns:
        The model in eval mode. It takes the arguments of ``model``.

    Raises:
        PlanError: an invalid plan for these tables and devices; ``devices`` with a model whose shards are on several
            ranks.
        ValueError: a device that does not exist, a collection that has no static tables, or one under two names.
        CheckpointError: a checkpoint that is missing, damaged, or of another model.

    >>> from recshard_lab import EmbeddingBagConfig, KeyedJaggedTensor, row_wise
    >>> from recshard_lab.sharding import construct_module_sharding_plan
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
    if dtype is not None:
        tables = _typed(collections, tables, dtype)
    packed = dtype is not None or any(isinstance(part, QuantCollection) for part in collections.values())
    if devices is None:
        if output_device is not None:
            raise ValueError("output_device applies to devices of one process. Fix: pass devices= too, or omit it")
        return _over_ranks(model, bare, collections, tables, plan, checkpoint, packed)
    places = devices_named(devices)
    output = places[0] if output_device is None else devices_named([output_device])[0]
    saved = None if checkpoint is None else saved_model(checkpoint, collections)
    sources: dict[str, Any] = {}
    for path, part in collections.items():
        sources[path] = partial(packed_table, part) if isinstance(part, QuantCollection) else _source(saved, path, part)
        if packed and not isinstance(part, QuantCollection):
            sources[path] = partial(packed_rows, source=sources[path])
    if plan is None:
        plan = _planned(_with_tables(bare, collections, tables) if packed else bare, tables, places)
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
    module = _with(bare, collections, _around(collections, made), saved)
    return ShardedInference(module.to(output), plan, runners)


def _over_ranks(
    model: nn.Module,
    bare: nn.Module,
    collections: Mapping[str, nn.Module],
    tables: Mapping[str, list[BaseEmbeddingConfig]],
    plan: ShardingPlan | None,
    checkpoint: str | Path | None,
    packed: bool,
) -> ShardedInference:
    """The form over launched ranks. Collective."""
    shown = _with_tables(bare, collections, tables) if packed else bare
    env = model.env if isinstance(model, DistributedModelParallel) else ShardingEnv.default()
    device = model.device if isinstance(model, DistributedModelParallel) else compute_device(env)
    if plan is None:
        kind = "cpu" if device.type == "cpu" else "cuda"
        topology = Topology(env.world_size, compute_device=kind, local_world_size=env.local_world_size)
        plan = from_first_rank(env, lambda: EmbeddingShardingPlanner(topology, cost_model="latency").plan(shown))
    found: ShardingPlan = plan
    found = agreed(env, lambda: _resolved(found, tables, env.world_size, env.local_world_size))
    saved, sources = None, None
    if checkpoint is not None:
        folder = checkpoint
        saved, sources = agreed(env, lambda: _opened(folder, collections))
    pooled = {path: _pools(part) for path, part in collections.items()}
    typed = {path: Tables(part, tables[path]) for path, part in collections.items()} if packed else None
    made = over_ranks(collections, pooled, found, env, device, sources, typed)
    dense, read = _around(collections, made), saved
    module = agreed(env, lambda: _with(bare, collections, dense, read))
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


def _opened(checkpoint: str | Path, collections: Mapping[str, nn.Module]) -> tuple[SavedModel, dict[str, Source]]:
    saved = saved_model(checkpoint, collections)
    return saved, {path: _source(saved, path, part) for path, part in collections.items()}


def _source(saved: SavedModel | None, path: str, part: nn.Module) -> Source:
    """The rows of a collection, in memory or in files."""
    if saved is None:
        return live_source(part)
    tables = configs_of(part) or []
    return Saved(
        saved,
        {one.name: (weight_name(path, part, one.name), (one.num_embeddings, one.embedding_dim)) for one in tables},
    )


def _typed(
    collections: Mapping[str, nn.Module], tables: Mapping[str, list[BaseEmbeddingConfig]], dtype: Types
) -> dict[str, list[BaseEmbeddingConfig]]:
    """The tables in other number formats.

    Raises:
        ValueError: an unknown format or table, or tables that are quantized already.
    """
    if any(isinstance(part, QuantCollection) for part in collections.values()):
        raise ValueError("dtype= applies to trained tables, and this model is quantized. Fix: leave dtype out")
    if isinstance(dtype, Mapping):
        names = [table.name for own in tables.values() for table in own]
        for name in dtype:
            if name not in names:
                raise ValueError(f"dtype names table {name!r}, which the model does not have. Fix: use one of {names}")
    return {path: with_types(own, dtype) for path, own in tables.items()}


def _with_tables(
    model: nn.Module, collections: Mapping[str, nn.Module], tables: Mapping[str, Sequence[BaseEmbeddingConfig]]
) -> nn.Module:
    """The model for the planner: its collections have configs and no rows."""
    return _with(model, collections, {path: Tables(part, tables[path]) for path, part in collections.items()})


def _collections(model: nn.Module) -> dict[str, nn.Module]:
    """Module path -> embedding collection.

    Raises:
        ValueError: none, one whose tables are not static, or one that the model has under two names.
    """
    found = find_collections(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no embedding collection. Fix: pass a model that has one")
    for one in found:
        _pools(one.module)
    refuse_unshardable(found)
    return {one.path: one.module for one in found}


def _around(collections: Mapping[str, nn.Module], sharded: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The sharded collections, each after the steps that its unsharded one takes before the lookup.

    A collection with such steps has a method ``around(lookup)``: a module that takes them and calls ``lookup``.
    """
    steps: dict[str, Any] = {path: getattr(collections[path], "around", None) for path in sharded}
    return {path: part if steps[path] is None else steps[path](part) for path, part in sharded.items()}


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


def _with(
    model: nn.Module, old: Mapping[str, nn.Module], new: Mapping[str, nn.Module], saved: SavedModel | None = None
) -> nn.Module:
    """A copy of the model with other collections; the old ones are not copied. The rest is filled from files.

    Raises:
        CheckpointError: a tensor that the files lack, or have in another size.
    """
    if "" in new:
        return new[""]
    copy = deepcopy(model, {id(part): nn.Identity() for part in old.values()})
    if saved is not None:
        saved.fill(copy, skip=())
        copy.requires_grad_(False)
    for path, part in new.items():
        parent, _, name = path.rpartition(".")
        setattr(copy.get_submodule(parent), name, part)
    return copy
