"""The shards of one rank, in as few kernels as their kinds allow."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, combinations, groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from recshard_lab.distributed.state.table import TableTensor
from recshard_lab.distributed.step.batch import LocalBatch, LookupInput, host_list, join
from recshard_lab.distributed.step.layout import Layout, ShardFeature, effective_route
from recshard_lab.embedding import DataType, DynamicEmbeddingConfig, OptimizerSpec
from recshard_lab.embedding.dynamic.cached import Cache, CachedKernel
from recshard_lab.embedding.dynamic.config import SLOTS
from recshard_lab.embedding.dynamic.kernel import DynamicKernel
from recshard_lab.embedding.kernels import (
    KernelInput,
    KernelSpec,
    LookupKernel,
    RowNorms,
    ShardSpec,
    choose_kernel,
    kernel_named,
)
from recshard_lab.embedding.kernels.fbgemm_cached import FbgemmCache, FbgemmCachedKernel
from recshard_lab.embedding.managed_collision.kernel import ManagedKernel
from recshard_lab.embedding.managed_collision.modules import ManagedEmbeddingConfig
from recshard_lab.embedding.optimizers.rules import accumulate_dtype, step
from recshard_lab.sharding import CacheParams, PlanError, Shard
from recshard_lab.sharding.plan.types import DDR, DISTINCT_ROWS
from recshard_lab.sparse.ops import complete_cumsum


@dataclass(frozen=True)
class GroupKind:
    """Shards of one kind share a kernel.

    Attributes:
        backend: the kernel's name.
        data_type: number format of the weights.
        optimizer: fused in backward; None where a torch optimizer reads ``.grad`` (the dense compute kernel).
        joins_norms: columns are split and the optimizer is row-wise: squares must meet before the step.
        route: the output path; "direct" for replicas.
        dynamic: ids have any value, and rows belong to ids (`DynamicKernel`, `ManagedKernel`).
        cache: rows are cached on the device, and stored in host memory (`CachedKernel`, or on a GPU
            `FbgemmCachedKernel`). None for no cache.
        managed: they do by a managed collision module (`ManagedKernel`).
        host: the shards are stored, looked up and stepped in host memory. Only rows and gradients are copied between
            host and device. On CPU ranks the host is the device.
    """

    backend: str
    data_type: DataType
    optimizer: OptimizerSpec | None
    joins_norms: bool
    route: str = "direct"
    host: bool = False
    dynamic: bool = False
    cache: CacheParams | None = None
    managed: bool = False

    def state_parts(self, device: torch.device) -> tuple[TableTensor, ...]:
        """Which optimizer state each shard has on ranks of this device, also on ranks that store no shard."""
        if self.optimizer is None:
            return ()
        kept = torch.device("cpu") if self.host else device
        return _state_parts(self.backend, self.data_type, replace(self.optimizer, learning_rate=0.0), kept)


_INDEX_PARTS = (
    TableTensor("ids", "row", torch.int64),
    TableTensor("tags", "row", torch.uint8, 2),
    TableTensor("accesses", "row", torch.int64, 2),
    TableTensor("step", "table", torch.int64),
    TableTensor("epoch", "table", torch.int64),
)

_OWNER_PARTS = (
    TableTensor("raw_ids", "row", torch.int64),
    TableTensor("owned", "row", torch.uint8),
    TableTensor("row_numbers", "row", torch.int64, 2),
    TableTensor("current_iter", "table", torch.int64),
)


def index_parts(config: Any) -> tuple[TableTensor, ...]:
    """What says which id each row belongs to: tensors of `DynamicTable.index_tensors`, or of `RowOwners.tensors`.

    A static table has none. The counts of absent ids have their largest size from the start.

    Args:
        config: the table, with its rows as of now.
    """
    if isinstance(config, ManagedEmbeddingConfig):
        return _OWNER_PARTS
    if not isinstance(config, DynamicEmbeddingConfig):
        return ()
    if not config.counts_absent_ids:
        return _INDEX_PARTS
    ratio = config.max_buckets, config.num_embeddings // (SLOTS * config.partitions)
    return _INDEX_PARTS + tuple(replace(part, name=f"admission_{part.name}", ratio=ratio) for part in _INDEX_PARTS)


@lru_cache(maxsize=64)
def _state_parts(
    backend: str, data_type: DataType, optimizer: OptimizerSpec, device: torch.device
) -> tuple[TableTensor, ...]:
    """Read from a kernel of two rows and four columns: only kernels know."""
    kernel = kernel_named(backend)(KernelSpec([ShardSpec("probe", 2, 4, data_type, 4)], [0], optimizer, device=device))
    return tuple(TableTensor.of(name, state, 2, 4) for name, state in kernel.optimizer_states()[0].items())


class ShardLookup:
    """One kernel and the adjacent shard features that it serves.

    Args:
        first_copy: in a replicated group, the number of the rank's first replicated shard feature.
    """

    def __init__(
        self,
        kind: GroupKind,
        features: Sequence[ShardFeature],
        first: int,
        layout: Layout,
        pooled: bool,
        device: torch.device,
        first_copy: int | None = None,
    ) -> None:
        self.kind, self.features, self.first, self.device = kind, list(features), first, device
        self.first_copy = first_copy
        self.crosses = kind.host and device.type != "cpu"
        self.shards = sorted({(feature.table, feature.shard_index) for feature in features})
        self.kernel = _kernel(
            kind,
            [(layout.tables[table], layout.shards[table][number]) for table, number in self.shards],
            [self.shards.index((feature.table, feature.shard_index)) for feature in features],
            pooled and kind.route != DISTINCT_ROWS,
            torch.device("cpu") if kind.host else device,
            first_copy is not None,
        )
        self.width = sum(feature.shard.num_cols for feature in features)
        self.end = first + len(self.features)
        #: whether lookups with gradients insert absent ids. Rows are cached for their backward in `eval()` too
        self.inserts = True
        #: called before each step with its ids ``[N]`` by shard feature, and their number in each
        self.on_step: Callable[[Tensor, Sequence[int]], None] | None = None
        #: called before each lookup with its ids ``[N]`` by shard feature, and their number in each
        self.on_lookup: Callable[[Tensor, Sequence[int]], None] | None = None

    def bags(self, lookup_input: LookupInput) -> KernelInput:
        """The ids of this group's shard features, from all ranks."""
        counts = lookup_input.counts[: self.end].sum(1).tolist()
        start, counts = sum(counts[: self.first]), counts[self.first :]
        span = slice(start, start + sum(counts))
        if self.first_copy is None:
            lengths = lookup_input.lengths[self.first : self.end]
        else:
            lengths = lookup_input.copies[self.first - self.first_copy : self.end - self.first_copy]
        weights = None if lookup_input.weights is None else lookup_input.weights[span]
        return KernelInput(lookup_input.ids[span], self._offsets(lengths, counts), weights, counts)

    def own_bags(self, local_batch: LocalBatch) -> KernelInput:
        """The same of the local batch alone, which is all that a replicated group needs in forward."""
        assert self.first_copy is not None
        features = local_batch.replicas[self.first - self.first_copy : self.end - self.first_copy]
        lengths = join([feature.lengths for feature in features])
        if self.kernel.pooled:
            bags = [feature.num_bags for feature in features]
            if len(set(bags)) == 1:
                lengths = lengths.view(len(features), bags[0])
            else:
                lengths = torch.stack([pad(part, (0, max(bags) - part.numel())) for part in lengths.split(bags)])
        weights = [feature.weights for feature in features if feature.weights is not None]
        counts = [feature.num_ids for feature in features]
        ids = join([feature.ids for feature in features])
        return KernelInput(ids, self._offsets(lengths, counts), join(weights) if weights else None, counts)

    def no_ids(self, lookup_input: LookupInput) -> KernelInput:
        """One empty bag for each shard feature: the input of kernels where no rank has a bag, as steps are counted."""
        counts = [0] * len(self.features)
        lengths = lookup_input.lengths.new_zeros(len(self.features), 1)
        weights = None if lookup_input.weights is None else lookup_input.weights[:0]
        return KernelInput(lookup_input.ids[:0], self._offsets(lengths, counts), weights, counts)

    def send_row_norms(self, bags: KernelInput, row_norms: RowNorms) -> None:
        """Takes part in the exchange of row norms without the kernel, which failed. The sums are zeros."""
        parts: list[list[Tensor]] = [[] for _ in self.kernel.shards]
        for own, shard in zip(bags.ids.split(bags.counts), self.kernel.features, strict=True):
            parts[shard].append(own)
        rows = [self.kernel.touched_rows(torch.cat(own), shard) for shard, own in enumerate(parts)]
        spec, weight = self.kernel.optimizer, self.kernel.weights()[0]
        assert spec is not None
        state, totals = self.kernel.optimizer_states()[0], list[Tensor]()
        none = torch.empty(0, dtype=torch.int64, device=weight.device)
        grad = weight.new_empty(0, weight.shape[1], dtype=accumulate_dtype(weight.dtype))
        for _ in range(spec.row_norm_rounds):
            totals.append(step(spec, weight, state, none, grad, totals, self.kernel.shards[0].full_dim))
            shape, dtype = totals[-1].shape[1:], totals[-1].dtype
            row_norms(rows, [torch.zeros(own.numel(), *shape, dtype=dtype, device=self.device) for own in rows])

    def _offsets(self, lengths: Tensor, counts: Sequence[int]) -> Tensor:
        """Where bags begin when pooled (``lengths [features, S]``), where features begin when not (``counts``)."""
        if self.kernel.pooled:
            return complete_cumsum(lengths.reshape(-1))
        return host_list([*accumulate(counts, initial=0)], lengths.device)

    @property
    def prefetches(self) -> bool:
        """Whether the kernel has a slow tier."""
        if isinstance(self.kernel, DynamicKernel):
            return any(table.config.tiers for table in self.kernel.tables)
        return self.kind.cache is not None

    def prefetch(self, bags: KernelInput) -> Any:
        """Moves the rows of a coming batch into the kernel's fast memory. `forward` takes the result."""
        return self.kernel.prefetch(self._there(bags))

    def forward(self, bags: KernelInput, training: bool, prefetched: Any = None) -> tuple[Tensor, Any]:
        """The kernel's rows, and what its backward needs when ``training``."""
        if self.on_lookup is not None:
            self.on_lookup(bags.ids, bags.counts)
        with torch.set_grad_enabled(training):
            there = self._there(bags) if self.crosses else bags
            rows, saved = self.kernel.forward(there._replace(prefetched=prefetched), training and self.inserts)
            if self.crosses:  # by way of pinned memory
                rows = rows.pin_memory().to(self.device, non_blocking=True)
            return rows, saved

    def remember(self, bags: KernelInput) -> Any:
        """What `backward` needs of a batch that is not looked up here."""
        return self.kernel.remember(self._there(bags), self.inserts)

    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        """Steps the fused optimizer, or adds to ``.grad`` under the dense compute kernel.

        Returns:
            The gradient ``[N]`` of per-sample weights, if there are any.
        """
        if not self.crosses:
            return self.kernel.backward(saved, grad, row_norms)

        def norms(rows: list[Tensor], squares: list[Tensor]) -> list[Tensor]:
            assert row_norms is not None
            found = row_norms([own.to(self.device) for own in rows], [own.to(self.device) for own in squares])
            return [own.cpu() for own in found]

        of_weights = self.kernel.backward(saved, grad.cpu(), None if row_norms is None else norms)
        return None if of_weights is None else of_weights.to(self.device)

    def _there(self, bags: KernelInput) -> KernelInput:
        """The batch on the device of the shards."""
        if not self.crosses:
            return bags
        weights = None if bags.weights is None else bags.weights.cpu()
        return bags._replace(ids=bags.ids.cpu(), offsets=bags.offsets.cpu(), weights=weights)


def _kernel(
    kind: GroupKind,
    shards: Sequence[tuple[Any, Shard]],
    features: Sequence[int],
    pooled: bool,
    device: torch.device,
    replicated: bool,
) -> LookupKernel:
    """The kernel of shards of one kind. A shard of a dynamic or managed table has the rows of whole partitions. Of a
    managed table all rows are allocated, of a dynamic one those of its ``capacity``: it grows."""
    backend, params = kernel_named(kind.backend), kind.cache
    specs = [_spec_of(config, shard) for config, shard in shards]
    spec = KernelSpec(specs, features, kind.optimizer, pooled, device, deterministic=replicated)
    configs, columns = [config for config, _ in shards], [shard.cols for _, shard in shards]
    if kind.managed:
        return ManagedKernel(spec, backend, configs, [shard.rows for _, shard in shards], columns)
    if kind.dynamic:
        units = [(config.row_unit, *shard.rows) for config, shard in shards]
        return DynamicKernel(spec, backend, configs, [(first // one, end // one) for one, first, end in units], columns)
    if params is None:
        return backend(spec)
    rows = [params.rows(own.num_rows) for own in specs]
    if fbgemm_caches(kind.backend, params, device):
        caches = [FbgemmCache(many / own.num_rows, params.algorithm) for many, own in zip(rows, specs, strict=True)]
        return FbgemmCachedKernel(spec, caches)
    return CachedKernel(spec, backend, [Cache(many, params.algorithm, params.cost) for many in rows])


def _spec_of(config: Any, shard: Shard) -> ShardSpec:
    size = (shard.num_rows, shard.num_cols)
    return ShardSpec(config.name, *size, config.data_type, config.embedding_dim, shard.rows[0])


def _refuse_uneven_columns(config: DynamicEmbeddingConfig, shards: Sequence[Shard], spec: OptimizerSpec) -> None:
    """Raises PlanError unless column shards that have a row in common have all rows in common.

    Shards grow by themselves, and have ids without a slot. Those of the same rows do so alike, and so have the same
    touched rows in the same order, which `RowNormExchange` adds.
    """
    for one, other in combinations({shard.rows for shard in shards}, 2):
        if max(one[0], other[0]) < min(one[1], other[1]) and (config.buckets < config.max_buckets or config.tiers):
            why = "has tiers" if config.tiers else "grows"
            raise PlanError(
                f"table {config.name!r} {why}, and has column shards of rows {one} and {other}: {spec.optimizer} adds "
                f"up rows over columns, which shards of other rows store in another order. Fix: split all columns at "
                f"the same rows, as grid_shard does"
            )


def fbgemm_caches(backend: str, cache: CacheParams, device: torch.device) -> bool:
    """Whether fbgemm's cache serves such a table: on a GPU, with no emulated cost. Otherwise `CachedKernel` does."""
    return backend == "fbgemm" and device.type == "cuda" and cache.cost is None


class RankLookup:
    """All kernels of one rank: the exchanged groups, then the replicated ones."""

    def __init__(
        self, layout: Layout, kinds: Sequence[GroupKind], rank: int, pooled: bool, device: torch.device
    ) -> None:
        self.exchanged: list[ShardLookup] = []
        self.replicated: list[ShardLookup] = []
        first = 0
        features = layout.rank_features[rank]
        for (replicated, group), run in groupby(features, key=lambda feature: (feature.replicated, feature.group)):
            members = list(run)
            first_copy = len(layout.exchanged_features[rank]) if replicated else None
            lookup = ShardLookup(kinds[group[0]], members, first, layout, pooled, device, first_copy)
            (self.replicated if replicated else self.exchanged).append(lookup)
            first = lookup.end
        self.groups = self.exchanged + self.replicated

    def weights(self) -> dict[tuple[int, int], Tensor]:
        """(table, shard) -> its weights ``[rows, cols]`` on this rank."""
        return {
            key: weight
            for group in self.groups
            for key, weight in zip(group.shards, group.kernel.weights(), strict=True)
        }

    def states(self) -> dict[tuple[int, int], dict[str, Tensor]]:
        """(table, shard) -> its optimizer state on this rank, and the index of a dynamic table."""
        found: dict[tuple[int, int], dict[str, Tensor]] = {}
        for group in self.groups:
            kernel = group.kernel
            for key, index, own in zip(group.shards, kernel.index_tensors(), kernel.optimizer_states(), strict=True):
                found[key] = index | own
        return found

    def cache_bytes(self) -> Iterator[tuple[int, int]]:
        """Of each cached kernel the bytes of cached rows, and of their optimizer states."""
        caches = CachedKernel | FbgemmCachedKernel
        return (group.kernel.fast_bytes() for group in self.groups if isinstance(group.kernel, caches))

    def train(self, mode: bool) -> None:
        """Whether lookups with gradients insert absent ids of dynamic tables."""
        for group in self.groups:
            group.inserts = mode or group.kind.cache is not None


def choose_kernels(
    tables: Sequence[Any],
    shardings: Sequence[Any],
    optimizers: Sequence[OptimizerSpec],
    *,
    pooled: bool,
    weighted: bool,
    device: torch.device,
    backend: str | None,
    batch_tables: bool = True,
) -> tuple[list[GroupKind], dict[tuple[int, int], tuple[int, ...]]]:
    """The kind of every shard of every table, the same on all ranks.

    Returns:
        The kinds, and for each (table, shard) its kernel: the kind's number, and without ``batch_tables`` the table's.

    Raises:
        ValueError: the backend asked for cannot do it, naming table and reason.
    """
    kinds: list[GroupKind] = []
    chosen: dict[tuple[int, int], tuple[int, ...]] = {}
    for table, (config, sharding, spec) in enumerate(zip(tables, shardings, optimizers, strict=True)):
        optimizer = None if sharding.compute_kernel == "dense" else spec
        dynamic = config.dynamic
        if dynamic and (optimizer is None or sharding.route == DISTINCT_ROWS):
            raise PlanError(
                f"table {config.name!r} is dynamic: its rows cannot be on the dense kernel, or sent by the path "
                f"{DISTINCT_ROWS!r}. Fix: use the fused kernel, and route='direct'"
            )
        split = any(shard.num_cols < config.embedding_dim for shard in sharding.shards)
        norms = optimizer is not None and optimizer.row_wise and split
        if norms and not batch_tables:
            raise ValueError(
                f"batch_tables=False does not support table {config.name!r}: {spec.optimizer} adds the squares of a "
                f"row over its column shards, in one kernel for all such tables. Fix: leave it out"
            )
        if norms and isinstance(config, DynamicEmbeddingConfig):
            _refuse_uneven_columns(config, sharding.shards, spec)

        cache = sharding.cache_params
        if cache is not None and any(sharding.replica_flags):
            raise PlanError(
                f"table {config.name!r} is cached (compute_kernel 'fused_uvm_caching') and has replicas, which are "
                f"stepped by the batches of all ranks. Fix: compute_kernel='fused_uvm', or row_wise"
            )
        if cache is not None and dynamic:
            raise PlanError(
                f"table {config.name!r} is dynamic, so compute_kernel 'fused_uvm_caching' does not apply. Fix: "
                f"compute_kernel='fused', and DynamicEmbeddingConfig(tiers=) for slower tiers"
            )
        in_host = [shard.tier == DDR and cache is None for shard in sharding.shards]
        if norms and len(set(in_host)) > 1:
            raise ValueError(
                f"table {config.name!r} has pieces of its columns in both memories of a rank, and {spec.optimizer} "
                f"adds up rows over them, which kernels in different memories cannot. Put all its shards in one tier"
            )
        route, kinds_of = effective_route(config, sharding), {}
        if route == DISTINCT_ROWS and weighted:
            raise PlanError(
                f"route {DISTINCT_ROWS!r} does not apply to table {config.name!r}: the collection has per-sample "
                f"weights, which are not sent with distinct ids. Fix: route='direct' for this table"
            )
        shards = list(zip(sharding.replica_flags, in_host, strict=True))
        for copy, host in sorted(set(shards)):
            own_route, own_norms = ("direct", False) if copy else (route, norms)  # replicas have whole rows
            where, pools = torch.device("cpu") if host else device, pooled and own_route != DISTINCT_ROWS
            same_memory = [shard for shard, there in zip(sharding.shards, in_host, strict=True) if there == host]
            specs = [_spec_of(config, shard) for shard in same_memory]
            of_copy = KernelSpec(specs, (), optimizer, pools, where, weighted, norms)
            kernel = choose_kernel(of_copy, backend)
            others = backend is None and not (cache is None or fbgemm_caches("fbgemm", cache, device))
            if others and kernel.name == "fbgemm":
                kernel = choose_kernel(of_copy, "native")
            how = (own_norms, own_route, host, dynamic, cache, isinstance(config, ManagedEmbeddingConfig))
            kinds_of[copy, host] = GroupKind(kernel.name, config.data_type, optimizer, *how)
        for number, shard in enumerate(shards):
            own = kinds_of[shard]
            if own not in kinds:
                kinds.append(own)
            chosen[table, number] = (kinds.index(own),) if batch_tables else (kinds.index(own), table)
    return kinds, chosen
