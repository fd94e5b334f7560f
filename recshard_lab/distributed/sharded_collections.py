"""Embedding collections with sharded tables, called like the unsharded ones.

Shape letters: B batch, D columns of an output block, N ids of a feature.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm import ShardingEnv, agreed, gathered
from recshard_lab.distributed.awaitable import (
    Awaitable,
    Later,
    LazyDict,
    LazyJaggedTensor,
    LazyKeyedTensor,
    NoWait,
    eager,
)
from recshard_lab.distributed.state.forms import are_tiers_apart
from recshard_lab.distributed.state.moves import Move, Tiles, move
from recshard_lab.distributed.state.table import ShardedTable, StateEntries, TableTensor, sized
from recshard_lab.distributed.step.batch import LookupInput
from recshard_lab.distributed.step.executor import Executor, PendingRows
from recshard_lab.distributed.step.gradients import exchange_rows
from recshard_lab.distributed.step.input_dist import PendingInput
from recshard_lab.distributed.step.kernels import Listener
from recshard_lab.distributed.step.layout import Block, CollectionOptions, Layout
from recshard_lab.distributed.step.lookup import GroupKind, choose_kernels, index_parts
from recshard_lab.distributed.step.output_dist import PooledOutput, SequenceOutput
from recshard_lab.embedding import (
    BaseEmbeddingConfig,
    BaseManagedCollisionEmbeddingCollection,
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
    OptimizerSpec,
    PoolingType,
    embedding_names_by_table,
)
from recshard_lab.embedding.dynamic.config import SLOTS, DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.kernel import DynamicKernel
from recshard_lab.embedding.dynamic.table import DynamicTable
from recshard_lab.embedding.inputs import OutOfRange, as_batch, put_back
from recshard_lab.embedding.kernels import LookupKernel
from recshard_lab.embedding.managed_collision.modules import ManagedEmbeddingConfig, bucket_fault
from recshard_lab.embedding.scaled_loss import watch_hidden
from recshard_lab.sharding import ParameterSharding, ShardingPlan
from recshard_lab.sharding.plan.sharding_plan import Shard
from recshard_lab.sparse import KeyedJaggedTensor, Multistreamable

if TYPE_CHECKING:
    from recshard_lab.distributed.fused_optimizer import EmbeddingFusedOptimizer


_CHUNK_BYTES = 4 * 1024 * 1024  # of rows that are gathered at a time
Feed = Callable[["ShardedCollection", KeyedJaggedTensor], LookupInput]


@dataclass
class ShardedModuleContext(Multistreamable):
    """What the stages of one batch share: `ShardedCollection.create_context` makes it, and `input_dist` fills it.

    Attributes:
        features: the local batch.
        inverse_indices: keys and ``[F, B]`` bags of the samples in a batch with deduplicated bags, or None.
        variable_batch_per_feature: whether features have batches of different sizes.
    """

    features: KeyedJaggedTensor | None = None
    inverse_indices: tuple[list[str], Tensor] | None = None
    variable_batch_per_feature: bool = False

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the batch's memory until the stream has used it."""
        if self.features is not None:
            self.features.record_stream(stream)
        if self.inverse_indices is not None:
            self.inverse_indices[1].record_stream(stream)


class ShardedCollection(nn.Module):
    """Base of pooled and sequence collections: tables, executor, state.

    Args:
        tables: the tables, in the collection's order.
        shardings: table name -> its sharding.
        optimizers: table name -> the optimizer fused into its backward.
        env: the ranks.
        device: device of the shards.
        options: what holds for all tables.
    """

    pooled: bool
    tables_name: str  # the path of the unsharded collection's tables
    unsharded_module_type: type[nn.Module] = nn.Module
    __class_getitem__: Any = classmethod(GenericAlias)  # TorchRec's ShardedModule[...] is generic

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        shardings: Mapping[str, ParameterSharding],
        optimizers: Mapping[str, OptimizerSpec],
        env: ShardingEnv,
        device: torch.device,
        options: CollectionOptions | None = None,
    ) -> None:
        super().__init__()
        self.options = options or CollectionOptions()
        self._policy = OutOfRange(self.options.out_of_range)
        self.env, self.device = env, device
        self.tables = list(tables)
        self.optimizers = dict(optimizers)
        #: source of the lookup inputs of batches that were sent ahead; training pipelines set it for one forward
        self.feed: Feed | None = None
        self._listener: Listener | None = None
        self._pipelines: WeakSet[Any] = WeakSet()  # that have sent ids ahead
        #: dynamic table that grows -> buckets of each partition, as of the last `level_tables` or load
        self.sizes = {
            table.name: table.buckets
            for table in tables
            if isinstance(table, DynamicEmbeddingConfig) and table.buckets < table.max_buckets
        }
        blocks = blocks_of(self.tables)
        self._keys, self._dims = [block.key for block in blocks], [block.dim for block in blocks]
        self.place({table.name: shardings[table.name] for table in tables})

    def kinds_for(
        self, shardings: Mapping[str, ParameterSharding]
    ) -> tuple[list[GroupKind], dict[tuple[int, int], tuple[int, ...]]]:
        """The kernels for these shardings.

        Raises:
            ValueError: the requested backend does not support a table; names the table and the reason.
        """
        options, dynamic = self.options, [table.name for table in self.tables if table.dynamic]
        if dynamic and options.use_index_dedup:
            raise ValueError(f"use_index_dedup=True does not support the dynamic table {dynamic[0]!r}. Fix: omit it")
        return choose_kernels(
            self.tables,
            [shardings[table.name] for table in self.tables],
            [self.optimizers[table.name] for table in self.tables],
            pooled=self.pooled,
            weighted=options.weighted,
            device=self.device,
            backend=options.backend,
            batch_tables=options.batch_tables,
        )

    def check(self, shardings: Mapping[str, ParameterSharding], env: ShardingEnv) -> None:
        """Checks that kernels, routes and codecs support these shardings. Allocates no tables.

        Raises:
            PlanError, ValueError: they do not.
        """
        _, groups = self.kinds_for(shardings)
        layout = Layout(self.tables, blocks_of(self.tables), shardings, groups, env.world_size)
        (PooledOutput if self.pooled else SequenceOutput)(layout, env, self.options.codecs, self.device)

    def place(self, shardings: Mapping[str, ParameterSharding]) -> None:
        """Replaces kernels and layout with those of these shardings. Weights and states are zero."""
        kinds, groups = self.kinds_for(shardings)
        self.shardings = dict(shardings)
        tables = [self._with_capacity(table) for table in self.tables]
        self.layout = Layout(tables, blocks_of(tables), self.shardings, groups, self.env.world_size)
        fixed = self.env, self.device, self.options, self._policy
        self.executor = Executor(self.layout, kinds, *fixed, pooled=self.pooled)
        self.executor.kernels.listener = self._listener
        self.kinds = {table.name: kinds[groups[n, 0][0]] for n, table in enumerate(self.tables)}
        self.backends = {name: kind.backend for name, kind in self.kinds.items()}
        self.executor.stepped = next((name for name, kind in self.kinds.items() if kind.optimizer is not None), None)
        kernels: list[dict[int, tuple[LookupKernel, int]]] = [{} for _ in self.tables]
        for group in self.executor.lookup.groups:
            for slot, (position, number) in enumerate(group.shards):
                kernels[position][number] = group.kernel, slot
        held: dict[str, ShardedTable] = {}
        for position, table in enumerate(self.tables):
            config, sharding = sized(table, shardings[table.name], self.sizes.get(table.name))
            held[table.name] = ShardedTable(
                config,
                sharding,
                {},  # weights and states are those of the kernels
                {},
                self.env,
                self.kinds[table.name].state_parts(self.device),
                self.device,
                "dtensor" if self.env.output_dtensor else self.options.state_form,
                index_parts(config),
                kernels[position],
                self.sizes,
            )
        self.hold_tables(nn.ModuleDict(dict[str, nn.Module](held)))
        for group in self.executor.lookup.groups:
            if isinstance(group.kernel, DynamicKernel):
                group.kernel.on_grown = partial(_each_flushed, [held[own.config.name] for own in group.kernel.tables])
        #: TorchRec's attributes; here one input exchange, one lookup and one output exchange for all tables
        self._input_dists, self._lookups = [self.executor.input_dist], [self.executor.lookup]
        self._output_dists = [self.executor.paths.route]
        self._own_optimizer: EmbeddingFusedOptimizer | None = None
        self.bind_parameters()

    # ---- tables that grow ----

    def _with_capacity(self, table: BaseEmbeddingConfig) -> BaseEmbeddingConfig:
        """A table whose shards begin with the size on which the ranks agree."""
        if not isinstance(table, DynamicEmbeddingConfig) or table.name not in self.sizes:
            return table
        rows = self.sizes[table.name] * SLOTS * table.partitions
        return table.changed(capacity=min(rows, table.max_capacity))

    def level_tables(self) -> None:
        """Gives all shards of each table that grows the same size: the largest of any rank. Collective.

        Shards grow by themselves during training. State dicts, checkpoints and moves need tables of one size. Does
        nothing inside a block of `tiers_apart`, whose caller has called it.
        """
        tables = self.table_shards() if self.sizes else {}
        growing = [tables[name] for name, buckets in self.sizes.items() if buckets < tables[name].max_buckets]
        if not growing or are_tiers_apart():
            return
        by_rank = gathered(self.env, lambda: [shards.largest for shards in growing])
        for shards, sizes in zip(growing, zip(*by_rank, strict=True), strict=True):
            shards.resize(max(sizes))

        def grow() -> None:
            for shards in growing:
                shards.grow()

        agreed(self.env, grow)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of ``nn.Module``. Collective if a dynamic table may still grow."""
        self.level_tables()
        return super().state_dict(*args, **kwargs)

    def hold_tables(self, tables: nn.Module) -> None:
        """Replaces the modules of the tables."""
        parent, _, name = self.tables_name.rpartition(".")
        if parent and not hasattr(self, parent):
            self.add_module(parent, nn.Module())
        setattr(self.get_submodule(parent), name, tables)

    def bind_parameters(self) -> None:
        """Passes the tables' parameters to the executor; those on the dense kernel also with the kernel's view."""
        self.executor.parameters = [
            (name, own) for name, table in self.table_shards().items() for own in table.parameters()
        ]
        self.executor.kernels.dense = [
            pair
            for table in self.table_shards().values()
            if table.sharding.compute_kernel == "dense"
            for pair in zip(table.local_parameters().values(), table.local_weights.values(), strict=True)
        ]

    def listen(self, listener: Listener | None) -> None:
        """Calls ``listener`` on every lookup, also after resharding; None removes it."""
        self._listener = self.executor.kernels.listener = listener

    def tell_before_moving(self, pipeline: Any) -> None:
        """Calls ``pipeline.drain()`` before the tables move. Keeps a weak reference."""
        self._pipelines.add(pipeline)

    def settle(self) -> None:
        """Drains all pipelines that have sent ids of this collection."""
        for pipeline in list(self._pipelines):
            pipeline.drain()

    def release(self) -> None:
        """Frees the kernels; `place` creates new ones."""
        for name in ("executor", "layout", "_input_dists", "_lookups", "_output_dists"):
            vars(self).pop(name, None)
        self._own_optimizer = None
        self.hold_tables(nn.ModuleDict())

    def is_weighted(self) -> bool:
        """Whether batches must have weights."""
        return self.options.weighted

    def out_of_range_count(self) -> int:
        """Number of out-of-range ids in this rank's batches, with ``"clamp"`` and ``"ignore"``."""
        return self._policy.count()

    def out_of_range_counts(self) -> dict[str, int]:
        """Table -> number of out-of-range ids, for tables that had any."""
        counts: Counter[str] = Counter()
        for key, count in self._policy.counts.items():
            counts[key.rpartition("@")[2]] += int(count)
        return counts

    def exchange_bytes(self) -> int:
        """Bytes of the buffers that the last step exchanged with other ranks; 0 before the first."""
        return sum(self.executor.buffer_bytes.values())

    @property
    def out_of_range(self) -> str:
        """The out-of-range policy."""
        return self._policy.policy

    def table_shards(self) -> dict[str, ShardedTable]:
        """Table name -> this rank's shards."""
        return dict(self.get_submodule(self.tables_name).items())  # type: ignore[operator]

    def tier_counters(self) -> dict[str, dict[str, dict[str, int]]]:
        """Dynamic table -> tier, ``"fast"`` first -> what the tier of this rank's shards has counted."""
        found: dict[str, dict[str, Any]] = {}
        for (name, _), table in self.dynamic_tables().items():
            for tier, counts in table.tier_counters().items():
                found.setdefault(name, {}).setdefault(tier, Counter()).update(counts)
        return found

    def dynamic_tables(self) -> dict[tuple[str, int], DynamicTable]:
        """The name of a table and the position of a shard -> the shard, of the dynamic tables on this rank."""
        return {
            (name, position): kernel.tables[slot]
            for name, shards in self.table_shards().items()
            for position, (kernel, slot) in shards.dynamic.items()
        }

    def recount(self) -> None:
        """Counts the ids of dynamic tables anew, after others have written their indexes."""
        for table in self.dynamic_tables().values():
            table.recount()

    def shards_by_weight(self, path: str = "") -> dict[str, ShardedTable]:
        """Name of each table's weight in the state dict of the module that has the collection at ``path`` -> shards."""
        prefix = f"{path}." * bool(path) + self.tables_name
        return {f"{prefix}.{name}.weight": shards for name, shards in self.table_shards().items()}

    def state_entries(self, path: str = "") -> dict[str, tuple[ShardedTable, TableTensor]]:
        """Name in the state dict of the module that has the collection at ``path`` -> a table, and its part there."""
        return {
            f"{path}.{name}": (module.of, part)
            for path, module in self.named_modules(prefix=path)
            if isinstance(module, StateEntries)
            for name, part in module.entries.items()
        }

    def row_chunks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Gathers a table on every rank, a few megabytes at a time: the first row, and rows ``[n, D]``. Collective."""
        shards = self.table_shards()[name]
        (rows, cols), dtype = shards.size, shards.model_parts()[0].dtype
        step = max(1, _CHUNK_BYTES // (cols * dtype.itemsize))
        for first in range(0, rows, step):
            end = min(rows, first + step)
            chunk = torch.empty(end - first, cols, dtype=dtype, device=self.device)
            everywhere = [Shard(rank, (first, end), (0, cols)) for rank in range(self.env.world_size)]
            target = Tiles(dtype, everywhere, {self.env.rank: chunk})
            move([Move(shards.tiles(shards.model_parts()[0]), target)], self.env, self.device)
            yield first, chunk

    def copy(self, device: torch.device | str) -> Self:
        """A collection with equal tables, weights and optimizer states on another device, or on the same one.

        Raises:
            ValueError: a dynamic table, or no kernel that supports a table there.
        """
        dynamic = next((table.name for table in self.tables if table.dynamic), None)
        if dynamic is not None:
            raise ValueError(f"the dynamic table {dynamic!r} cannot be copied. Fix: use save_checkpoint")
        target = torch.device(device)
        twin = type(self)(self.tables, self.shardings, self.optimizers, self.env, target, self.options)
        twin.unsharded_module_type = self.unsharded_module_type
        for name, shards in self.table_shards().items():
            shards.flush()
            own = twin.table_shards()[name]
            if shards.is_frozen:
                own.requires_grad_(False)
            with torch.no_grad():
                for part in shards.parts():
                    targets = own.matrices(part)
                    for position, tensor in shards.matrices(part).items():
                        targets[position].copy_(tensor)
        return twin.train(self.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = self.copy(self.device)
        return twin

    def first_moves(self, module: nn.Module, source: int) -> list[Move]:
        """Moves that fill the shards from rank ``source``'s unsharded collection, with weights ``[E, D]``."""
        whole, moves = unsharded_weights(module), []
        for name, shards in self.table_shards().items():
            moves.append(shards.scatter_move(shards.model_parts()[0], whole[name].detach(), source))
        return moves

    @property
    def fused_optimizer(self) -> "EmbeddingFusedOptimizer":
        """Learning rates and states of the tables, for a collection without `DistributedModelParallel`."""
        from recshard_lab.distributed.fused_optimizer import EmbeddingFusedOptimizer

        if self._own_optimizer is None:
            self._own_optimizer = EmbeddingFusedOptimizer({"": self})
        return self._own_optimizer

    # ---- the stages of a forward, under TorchRec's names ----

    def create_context(self) -> ShardedModuleContext:
        """What the stages of one batch share. Pass it to each of them."""
        return ShardedModuleContext()

    def input_dist(self, ctx: ShardedModuleContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[LookupInput]]:
        """Sends the sizes of the local batch. Collective.

        Returns:
            Waiting for it sends the ids. Waiting for that result returns the argument of `compute`.

        Raises:
            ValueError: an argument of another type; or a batch that the tables do not support, on all ranks, which
                the first wait raises.

        >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        >>> from recshard_lab.distributed import shard
        >>> from recshard_lab.sharding import row_wise
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
        >>> bags = shard(EmbeddingBagCollection([table]), {"t": row_wise()})
        >>> batch = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
        >>> ctx = bags.create_context()
        >>> ids = bags.input_dist(ctx, batch).wait().wait()
        >>> torch.equal(bags.output_dist(ctx, bags.compute(ctx, ids)).values(), bags(batch).values())
        True
        """
        if not isinstance(ctx, ShardedModuleContext):
            raise ValueError(f"ctx is {ctx!r:.80}, expected a context. Fix: pass ctx=collection.create_context()")
        if not isinstance(features, KeyedJaggedTensor):
            raise ValueError(f"features is {features!r:.80}, expected a KeyedJaggedTensor. Fix: pass the batch's")
        ctx.features = features
        ctx.inverse_indices = features.inverse_indices_or_none()
        ctx.variable_batch_per_feature = features.variable_stride_per_key()
        if self._own_optimizer is not None:
            self._own_optimizer.push_learning_rates()
        send = self.executor.announce(features)
        return Later(lambda: Later(send().wait))

    def compute(self, ctx: ShardedModuleContext, dist_input: LookupInput) -> PendingRows:
        """Looks up the ids of `input_dist` on this rank. Returns the argument of `output_dist`.

        Raises:
            ValueError: the tables have moved (``dmp.reshard``) since the batch was sent.
        """
        self.executor.lookup.train(self.training)
        return self.executor.compute(dist_input)

    def output_dist(self, ctx: ShardedModuleContext, output: PendingRows) -> Any:
        """Issues the output exchange. Returns the output of the forward, which waits when it is first used."""
        if ctx.features is None:
            raise ValueError("ctx has no batch. Fix: pass the ctx that input_dist took")
        output.issue()
        return self._output(output, ctx.features)

    def compute_and_output_dist(self, ctx: ShardedModuleContext, input: LookupInput) -> Any:
        """`compute`, then `output_dist`."""
        return self.output_dist(ctx, self.compute(ctx, input))

    def prefetch(self, dist_input: LookupInput, forward_stream: Any = None, ctx: Any = None) -> None:
        """Moves the rows of a batch into the fast memory of tables that have a slow one.

        Args:
            dist_input: the argument of `compute`.
            forward_stream, ctx: accepted as in TorchRec; the kernel orders itself.
        """
        self.executor.prefetch(dist_input)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of the tables' weights, as in state dicts.

        Args:
            prefix: before each name, with a dot between.
        """
        yield from self.shards_by_weight(prefix)

    def send(self, features: KeyedJaggedTensor) -> PendingInput | NoWait[LookupInput]:
        """Sends the local batch, and waits for the sizes. ``.wait()`` returns the ids to look up here."""
        return self.executor.start(features)

    @eager
    @names_wrong_arguments
    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Local batch -> the output of the unsharded collection, which waits for its rows when they are first used."""
        batch = as_batch(features, self.tables)
        if self._own_optimizer is not None:
            self._own_optimizer.push_learning_rates()
        lookup_input = self.executor.start(batch).wait() if self.feed is None else self.feed(self, batch)
        if self.training and not torch.is_grad_enabled():
            watch_hidden()
        self.executor.lookup.train(self.training)
        return self._output(self.executor.begin(lookup_input), batch)

    def _output(self, pending: PendingRows, features: KeyedJaggedTensor) -> Any:
        """The output of the forward."""
        raise NotImplementedError


class ShardedEmbeddingBagCollection(ShardedCollection):
    """A sharded `EmbeddingBagCollection`, with the same keys, order and state dict names.

    A forward returns a `LazyKeyedTensor` ``[B, sum of D]``.
    """

    pooled = True
    tables_name = "embedding_bags"
    unsharded_module_type = EmbeddingBagCollection

    def embedding_bag_configs(self) -> list[BaseEmbeddingConfig]:
        """The tables."""
        return self.tables

    def _output(self, pending: PendingRows, features: KeyedJaggedTensor) -> Any:
        return LazyKeyedTensor.pending(pending.wait, keys=[*self._keys], length_per_key=[*self._dims])


class ShardedEmbeddingCollection(ShardedCollection):
    """A sharded `EmbeddingCollection`: one row per id, in batch order.

    A forward returns a `LazyDict`: for each key a jagged ``[N, D]``.
    """

    pooled = False
    tables_name = "embeddings"
    unsharded_module_type = EmbeddingCollection

    def embedding_configs(self) -> list[BaseEmbeddingConfig]:
        """The tables."""
        return self.tables

    def need_indices(self) -> bool:
        """Whether outputs have their ids as weights."""
        return self.options.need_indices

    def _output(self, pending: PendingRows, features: KeyedJaggedTensor) -> Any:
        blocks, local_batch = self.layout.blocks, pending.lookup_input.local_batch

        @cache
        def parts() -> tuple[Tensor, ...]:
            sizes = [n * block.dim for n, block in zip(local_batch.counts, blocks, strict=True)]
            return pending.wait().split(sizes)

        def rows(number: int) -> Tensor:
            part = parts()[number].view(-1, blocks[number].dim)
            kept = None if local_batch.kept is None else local_batch.kept[number]
            return part if kept is None else put_back(part, kept, int(local_batch.lengths[number].sum()))

        ids = local_batch.ids if self.options.need_indices else [None] * len(blocks)
        lengths = [bag_lengths.long() for bag_lengths in local_batch.lengths]
        return LazyDict(
            (block.key, LazyJaggedTensor.pending(partial(rows, number), weights=ids[number], lengths=lengths[number]))
            for number, block in enumerate(blocks)
        )


# Managed collision: each rank decides which ids own the rows of its shards. Ids are sent by their hash to the rank
# whose buckets they are in, as those of dynamic tables (`HashSplits`). A shard has whole buckets, and all ranks
# together decide as the unsharded module with the same buckets.


class OwnerEntries(StateEntries):
    """The entries of a state dict that say which id owns each row of a table, named as in an unsharded model."""

    def __init__(self, shards: ShardedTable) -> None:
        super().__init__({_OWNER_NAMES.get(part.name, f"_{part.name}"): part for part in shards.index_parts}, shards)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        table = self.of.config
        assert isinstance(table, ManagedEmbeddingConfig)
        for position, state in self.of.states.items():
            buckets = self.of.sharding.shards[position].rows[0], table.partitions, table.row_unit
            problem = bucket_fault(state["raw_ids"], state["owned"], *buckets)
            if problem is not None:
                args[-1].append(f"table {table.name!r}: {problem}")


_OWNER_NAMES = {"current_iter": "_current_iter_tensor"}


class ManagedCollection(ShardedCollection):
    """A collection whose state dict also has the owners of rows. They move with their rows.

    A forward returns two: the rows, and with ``return_remapped_features`` the features with rows in place of ids.
    """

    @property
    def return_remapped_features(self) -> bool:
        """Whether a forward also returns the rows of ids."""
        return self.options.returns_rows

    def place(self, shardings: Mapping[str, ParameterSharding]) -> None:
        """Replaces kernels and layout with those of these shardings. Weights and states are zero."""
        super().place(shardings)
        self.executor.input_dist.keeps_places = self.options.returns_rows or not self.pooled

    def hold_tables(self, tables: nn.Module) -> None:
        """Replaces the modules of the tables, and those of their owners."""
        super().hold_tables(tables)
        owners = {
            name: OwnerEntries(child) for name, child in tables.named_children() if isinstance(child, ShardedTable)
        }
        self._managed_collision_collection = nn.Module()
        self._managed_collision_collection._managed_collision_modules = nn.ModuleDict(owners)

    def first_moves(self, module: nn.Module, source: int) -> list[Move]:
        """Moves that fill the shards and the owners of their rows from rank ``source``'s unsharded collection."""
        assert isinstance(module, BaseManagedCollisionEmbeddingCollection)
        modules, moves = module.managed_collision_collection.modules_by_table(), super().first_moves(module, source)
        for name, shards in self.table_shards().items():
            tensors = modules[name].tensors()  # type: ignore[operator]
            for part in shards.index_parts:
                moves.append(shards.scatter_move(part, part.matrix(tensors[part.name]), source))
        return moves

    def _output(self, pending: PendingRows, features: KeyedJaggedTensor) -> tuple[Any, KeyedJaggedTensor | None]:
        return super()._output(pending, features), self._remapped(features, pending.lookup_input)

    def _remapped(self, features: KeyedJaggedTensor, lookup_input: LookupInput) -> KeyedJaggedTensor | None:
        """The features of the tables with rows in place of ids, after their lookup was issued. Collective."""
        if not self.options.returns_rows:
            return None
        rows, total = lookup_input.rows, features.values().numel()
        if rows is None:  # the lookup failed, or this rank stores no shard
            rows = torch.zeros(lookup_input.ids.shape, dtype=torch.int64, device=self.device)
        remapped = copy(features)  # keys, lengths, weights and inverse indices stay
        remapped._values = exchange_rows(rows, total, lookup_input, self.layout, self.env)
        keys = [feature for table in self.tables for feature in table.feature_names]
        return remapped.permute([features.keys().index(key) for key in keys])


class ShardedManagedCollisionEmbeddingBagCollection(ManagedCollection, ShardedEmbeddingBagCollection):
    """A sharded `ManagedCollisionEmbeddingBagCollection`, with the same state dict names. See `ManagedCollection`."""

    tables_name = "_embedding_module.embedding_bags"


class ShardedManagedCollisionEmbeddingCollection(ManagedCollection, ShardedEmbeddingCollection):
    """A sharded `ManagedCollisionEmbeddingCollection`. See `ManagedCollection`."""

    tables_name = "_embedding_module.embeddings"


def _each_flushed(tables: Sequence[ShardedTable]) -> None:
    for shards in tables:
        shards.flush()


EmbeddingBagCollectionInterface.register(ShardedEmbeddingBagCollection)
EmbeddingCollectionInterface.register(ShardedEmbeddingCollection)


def create_route_groups(plan: ShardingPlan, env: ShardingEnv) -> None:
    """Creates the process groups of a plan's routes, so that building kernels needs no collective."""
    if any(sharding.route == "two_hop" for shardings in plan.plan.values() for sharding in shardings.values()):
        env.node_envs()


def blocks_of(tables: Sequence[BaseEmbeddingConfig]) -> list[Block]:
    """Output blocks, one per (table, feature), in output order. Features of several tables are ``feature@table``."""
    blocks, start = [], 0
    for number, (table, keys) in enumerate(zip(tables, embedding_names_by_table(tables), strict=True)):
        mean = isinstance(table, EmbeddingBagConfig) and table.pooling is PoolingType.MEAN
        for feature, key in zip(table.feature_names, keys, strict=True):
            blocks.append(Block(number, feature, key, table.embedding_dim, start, mean))
            start += table.embedding_dim
    return blocks


def unsharded_weights(module: nn.Module) -> dict[str, Any]:
    """Table name -> its parameter in an unsharded collection. Names are ``embedding_bags.{table}.weight``."""
    return {name.split(".")[-2]: weight for name, weight in module.named_parameters(remove_duplicate=False)}
