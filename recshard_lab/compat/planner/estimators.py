"""Costs of options: times by ``cost_model="torchrec"``, and bytes by TorchRec's rules.

`TorchRecCostModel` has the formulas; this file puts options before it. A kernel, a collective and a number format in
messages each need a model with other bandwidths, so options are grouped by them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch

from recshard_lab.compat.planner.base import Constraints, SharderData, ShardEstimator
from recshard_lab.compat.planner.constants import (
    BIGINT_DTYPE,
    KV_CACHING_RATIO,
    UVM_CACHING_RATIO,
    WEIGHTED_KERNEL_MULTIPLIER,
    kernel_bw_lookup,
)
from recshard_lab.compat.planner.costs import Perf, PlannerError, PlannerErrorType, Storage
from recshard_lab.compat.planner.options import ShardingOption
from recshard_lab.compat.planner.topology import CollectiveType, Topology, link_bandwidths
from recshard_lab.compat.planner.utils import (
    build_sharder_data,
    extract_comm_data_type_size,
    get_num_poolings,
    is_prefetch_pipelined,
)
from recshard_lab.embedding import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig, dtype_to_data_type
from recshard_lab.planner import TorchRecCostModel, Workload
from recshard_lab.planner.model.loads import BACK, LOOKUP, MEMORY, OUT, Rects
from recshard_lab.sharding import ParameterConstraints, ShardingType
from recshard_lab.sharding import Topology as OurTopology

_NODE_ROWS = (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)
_ROWS = (ShardingType.ROW_WISE, *_NODE_ROWS)
_CACHED = ("fused_uvm_caching", "quant_uvm_caching")
_IN_HOST = ("fused_uvm", "quant_uvm", *_CACHED)


@dataclass(frozen=True)
class _Input:
    """What a batch brings to one table: its features' bags and ids."""

    lengths: tuple[float, ...]
    poolings: tuple[float, ...]
    batches: tuple[int, ...]
    weighted: bool

    @classmethod
    def of(cls, option: ShardingOption, constraints: Mapping[str, Any] | None) -> _Input:
        limit = (constraints or {}).get(option.name)
        own = getattr(option.module[1], "is_weighted", None)
        weighted = own() if callable(own) else bool(own if own is not None else limit is not None and limit.is_weighted)
        count = option.num_inputs
        batches = limit.batch_sizes if limit is not None and limit.batch_sizes else [option.batch_size] * count
        return cls(tuple(option.input_lengths), tuple(get_num_poolings(constraints, option)), tuple(batches), weighted)

    @property
    def ids(self) -> float:
        """Ids of one rank's batch."""
        return sum(map(_product, self.lengths, self.poolings, self.batches))


def _product(*numbers: float) -> float:
    return float(np.prod(numbers))


def _loads(
    top: OurTopology,
    tensor: torch.Tensor,
    pooled: bool,
    given: _Input,
    scheme: str,
    dense: bool,
    sizes: Sequence[Sequence[int]],
    message_bytes: float,
) -> Any:
    """Loads ``[K, n]`` of one table's n shards."""
    kind: type[BaseEmbeddingConfig] = EmbeddingBagConfig if pooled else EmbeddingConfig
    features = [str(number) for number in range(len(given.lengths))]
    table = kind(
        name="table",
        num_embeddings=max(1, int(tensor.shape[0])),
        embedding_dim=int(tensor.shape[1]),
        feature_names=features,
        data_type=dtype_to_data_type(tensor.dtype),
    )
    limit = ParameterConstraints(
        pooling_factors=list(given.lengths),
        num_poolings=list(given.poolings),
        batch_sizes=list(given.batches),
        is_weighted=given.weighted,
    )
    model = TorchRecCostModel([table], top, Workload(), {"table": limit})
    model.message_bytes = np.array([message_bytes])
    flags = np.ones(len(sizes))
    rects = Rects(
        np.zeros(len(sizes), dtype=int),
        np.array([float(size[0]) for size in sizes]),
        np.array([float(size[1]) for size in sizes]),
        flags * (scheme == ShardingType.DATA_PARALLEL),
        flags * dense,
        by_node=flags * (scheme in _NODE_ROWS),
    )
    return model.rect_loads(rects)


def _ours(topology: Topology, memory_bw: float, links: tuple[float, float]) -> OurTopology:
    return OurTopology(
        topology.world_size,
        "cuda",
        local_world_size=topology.local_world_size,
        hbm_mem_bw=memory_bw,
        intra_host_bw=links[0],
        inter_host_bw=links[1],
    )


class EmbeddingPerfEstimator(ShardEstimator):
    """Sets the `Perf` of every shard by TorchRec's formulas (`TorchRecCostModel`).

    Args:
        topology: the devices. constraints: table name -> constraints, for batch sizes and weights.
        is_inference: whether there is no backward.
    """

    def __init__(self, topology: Topology, constraints: Constraints | None = None, is_inference: bool = False) -> None:
        self._topology, self._constraints, self._is_inference = topology, constraints, is_inference

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: dict[str, SharderData]) -> None:
        """Sets ``perf`` of the options' shards.

        Raises:
            PlannerError: a kernel without a bandwidth on the device.
        """
        for option in sharding_options:
            data = sharder_data_map.get(option.module_type_key) or build_sharder_data(None)
            for shard, perf in zip(option.shards, self._perfs(option, data), strict=True):
                shard.perf = perf

    def _perfs(self, option: ShardingOption, data: SharderData) -> list[Perf]:
        top, scheme = self._topology, option.sharding_type
        given = _Input.of(option, self._constraints)
        prefetches = is_prefetch_pipelined(option, data)
        bandwidth = kernel_bw_lookup(
            top.compute_device,
            option.compute_kernel,
            top.hbm_mem_bw,
            top.ddr_mem_bw,
            top.hbm_to_ddr_mem_bw,
            option.cache_load_factor,
            prefetches,
            top.ssd_mem_bw,
        )
        if bandwidth is None:
            raise PlannerError(
                f"table {option.name!r}: kernel {option.compute_kernel!r} has no bandwidth on {top.compute_device!r}. "
                f"Fix: compute_kernels=['fused']",
                PlannerErrorType.INVALID_COMPUTE_KERNEL,
            )
        dense = option.compute_kernel == "dense"
        replicated, by_rows = scheme == ShardingType.DATA_PARALLEL, scheme in _ROWS
        collective = CollectiveType.REDUCE_SCATTER if by_rows else CollectiveType.ALL_TO_ALL
        links = link_bandwidths(top, collective)
        reduced = top.comms_bandwidths.get_bw(top.local_world_size, top.world_size, CollectiveType.ALL_REDUCE)
        between = reduced / top.local_world_size if replicated else links[1]
        exchange, back, reduce_out, reduce_back = extract_comm_data_type_size(option, data)
        sent, returned = (reduce_out, reduce_back) if by_rows else (exchange, back)
        halved = 2.0 if dense or replicated else 1.0  # the model halves it again
        full = _ours(top, bandwidth * halved, (links[0], between))
        sizes = [shard.size for shard in option.shards]
        loads = _loads(full, option.tensor, option.is_pooled, given, scheme, dense, sizes, sent)
        factor = top.bwd_compute_multiplier
        if given.weighted:
            factor = factor * top.weighted_feature_bwd_compute_multiplier + WEIGHTED_KERNEL_MULTIPLIER
        train = 0.0 if self._is_inference else 1.0
        ids_link = link_bandwidths(top, CollectiveType.ALL_TO_ALL)[1]
        ids_ms = 0.0 if replicated else ceil(given.ids * top.world_size * BIGINT_DTYPE) / ids_link
        perfs = []
        for column, shard in enumerate(option.shards):
            out = float(loads[OUT, column])
            grads = float(loads[BACK, column]) * (1.0 if replicated else returned / sent)
            forward = float(loads[LOOKUP, column])
            fetched = _fetch_bytes(option, shard.size) / top.hbm_to_ddr_mem_bw
            perfs.append(Perf(forward, out, forward * factor * train, grads * train, ids_ms, fetched))
        return perfs


def _fetch_bytes(option: ShardingOption, size: Sequence[int]) -> float:
    """Bytes of rows that one shard copies to its cache in a step; 0 without statistics."""
    stats = getattr(option.cache_params, "stats", None)
    if stats is None or option.compute_kernel not in _CACHED:
        return 0.0
    hits = UVM_CACHING_RATIO if option.cache_load_factor is None else option.cache_load_factor
    columns = len({shard.offset[1] for shard in option.shards})
    row_shards = max(1, option.num_shards // columns)
    missed = stats.expected_miss_rate(hits) * stats.expected_lookups / row_shards
    return float(missed * size[1] * option.tensor.element_size())


class EmbeddingStorageEstimator(ShardEstimator):
    """Sets the `Storage` of every shard: weights, optimizer state, and buffers of ids and rows.

    Args:
        topology: the devices. constraints: table name -> constraints.
        pipeline_type: TorchRec's ``PipelineType`` or its value, such as "train_sparse_dist": how many batches are in
            memory.
        run_embedding_at_peak_memory: whether buffers of rows count although a pipeline is named.
        is_inference: whether there is no backward: buffers do not count.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Constraints | None = None,
        pipeline_type: Any = "none",
        run_embedding_at_peak_memory: bool = False,
        is_inference: bool = False,
    ) -> None:
        self._topology, self._constraints, self._is_inference = topology, constraints, is_inference
        self._pipeline_type, self._run_embedding_at_peak_memory = pipeline_type, run_embedding_at_peak_memory

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: dict[str, SharderData]) -> None:
        """Sets ``storage`` of the options' shards."""
        for option in sharding_options:
            data = sharder_data_map.get(option.module_type_key) or build_sharder_data(None)
            given = _Input.of(option, self._constraints)
            hits = option.cache_load_factor
            wide = option.output_dtype
            out_bytes = option.tensor.element_size() if wide is None else wide.bytes_per_element
            storages = calculate_shard_storages(
                data,
                option.sharding_type,
                option.tensor,
                self._topology.compute_device,
                option.compute_kernel,
                [shard.size for shard in option.shards],
                list(given.batches),
                self._topology.world_size,
                self._topology.local_world_size,
                list(given.lengths),
                list(given.poolings),
                UVM_CACHING_RATIO if hits is None else hits,
                option.is_pooled,
                float(BIGINT_DTYPE),
                float(out_bytes),
                self._pipeline_type,
                self._run_embedding_at_peak_memory,
                self._is_inference,
            )
            for shard, storage in zip(option.shards, storages, strict=True):
                shard.storage = storage


def calculate_shard_storages(
    sharder_data: SharderData,
    sharding_type: str,
    tensor: torch.Tensor,
    compute_device: str,
    compute_kernel: str,
    shard_sizes: list[list[int]],
    batch_sizes: list[int],
    world_size: int,
    local_world_size: int,
    input_lengths: list[float],
    num_poolings: list[float],
    caching_ratio: float,
    is_pooled: bool,
    input_data_type_size: float,
    output_data_type_size: float,
    pipeline_type: Any = "none",
    count_ephemeral_storage_cost: bool = False,
    is_inference: bool = False,
    multipass_prefetch_max_pass: int | None = None,
    key_value_params: Any = None,
    kv_cache_load_factor: float = KV_CACHING_RATIO,
    use_virtual_table: bool = False,
) -> list[Storage]:
    """Bytes of each shard of one table.

    Weights and optimizer state (from the tensor's optimizer in backward) are in the memory of the kernel. A cached
    kernel also has its share of them, and ``4 + 16 * caching_ratio`` bytes per row, in device memory. Buffers are in
    the device's memory. A shard without rows has 0 bytes.

    Args:
        sharder_data, key_value_params, kv_cache_load_factor, use_virtual_table: accepted as in TorchRec. Kernels of
            virtual tables are refused.
        sharding_type, compute_kernel, compute_device: names.
        tensor: the table's weights. shard_sizes: rows and columns of its shards.
        batch_sizes, input_lengths, num_poolings: one entry per feature.
        world_size, local_world_size: ranks.
        caching_ratio: cached share of the rows.
        is_pooled: whether bags are pooled.
        input_data_type_size, output_data_type_size: bytes of an id and of a number of a row.
        pipeline_type, count_ephemeral_storage_cost, is_inference, multipass_prefetch_max_pass: as of
            `calculate_pipeline_io_cost`.

    Raises:
        PlannerError: a kernel with rows in storage.
    """
    if compute_kernel not in ("dense", "fused", "quant", *_IN_HOST):
        raise PlannerError(
            f"kernel {compute_kernel!r} keeps rows in storage, which has no estimate. Fix: use fused_uvm_caching",
            PlannerErrorType.INVALID_COMPUTE_KERNEL,
        )
    top = OurTopology(world_size, "cuda", local_world_size=local_world_size)
    given = _Input(tuple(input_lengths), tuple(num_poolings), tuple(batch_sizes), False)
    loads = _loads(
        top, tensor, is_pooled, given, sharding_type, compute_kernel == "dense", shard_sizes, output_data_type_size
    )
    cached, in_host = compute_kernel in _CACHED, compute_kernel in _IN_HOST
    device = "ddr" if compute_device == "cpu" else "hbm"
    storages = []
    for column, (rows, _) in enumerate(shard_sizes):
        if rows == 0:
            storages.append(Storage(0, 0))
            continue
        weights = int(loads[MEMORY, column])
        state = ceil(weights * _state_factor(tensor))
        ids = ceil(float(loads[MEMORY + 2, column]) * input_data_type_size / BIGINT_DTYPE)
        out = int(loads[MEMORY + 3, column])
        buffers = calculate_pipeline_io_cost(
            ids,
            out,
            ids if cached else 0,
            pipeline_type,
            multipass_prefetch_max_pass,
            count_ephemeral_storage_cost,
            is_inference,
        )
        used: dict[str, int] = defaultdict(int)
        used["ddr" if in_host else device] += weights + state
        if cached:
            held = ceil(weights * caching_ratio)
            used[device] += held + ceil(held * _state_factor(tensor))
            used[device] += ceil(rows * (4 + 16 * caching_ratio))
        used[device] += buffers
        storages.append(Storage(used["hbm"], used["ddr"]))
    return storages


def _state_factor(tensor: torch.Tensor) -> float:
    """Bytes of optimizer state for a byte of weights: by the tensor's optimizer in backward, 0 without one."""
    names = {kind.__name__.lower() for kind in getattr(tensor, "_optimizer_classes", ())}
    if not names or names <= {"sgd", "larssgd"}:
        return 0.0
    if any("rowwiseadagrad" in name for name in names):
        return 1.0 / int(tensor.shape[-1])
    return 2.0 if any("adam" in name and "rowwise" not in name for name in names) else 1.0


def calculate_pipeline_io_cost(
    input_size: int,
    output_size: int,
    prefetch_size: int,
    pipeline_type: Any,
    multipass_prefetch_max_pass: int | None,
    count_ephemeral_storage_cost: bool = False,
    is_inference: bool = False,
) -> int:
    """Bytes of a shard's buffers under a pipeline.

    Args:
        input_size, output_size, prefetch_size: bytes of a batch's ids, of its rows, and of the ids to prefetch.
        pipeline_type: TorchRec's ``PipelineType`` or its value. "none" and "train_base" have one batch,
            "train_sparse_dist" ids of two batches, "train_prefetch_sparse_dist" ids of three.
        multipass_prefetch_max_pass: passes of a prefetch; its six temporary copies are divided by it. Default: 1.
        count_ephemeral_storage_cost: whether the rows count under a pipeline.
        is_inference: 0 bytes.

    >>> calculate_pipeline_io_cost(100, 10_000, 1_000_000, "train_prefetch_sparse_dist", None)
    7000300
    """
    if is_inference:
        return 0
    kind = getattr(pipeline_type, "value", pipeline_type)
    rows = output_size if count_ephemeral_storage_cost else 0
    if kind == "train_sparse_dist":
        return 2 * input_size + rows
    if kind == "train_prefetch_sparse_dist":
        passes = multipass_prefetch_max_pass or 1
        return 3 * input_size + prefetch_size + ceil(6 * prefetch_size / passes) + rows
    return input_size + output_size
