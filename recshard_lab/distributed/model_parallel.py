"""DistributedModelParallel: embedding collections sharded, the dense rest replicated, in one call."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from recshard_lab.arguments import checks_arguments, device_named, names_wrong_arguments
from recshard_lab.comm import ShardingEnv, agreed, compute_device, from_first_rank, refuse_differences
from recshard_lab.distributed.data_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from recshard_lab.distributed.fused_optimizer import EmbeddingFusedOptimizer
from recshard_lab.distributed.rank_facts import dense_facts, plan_facts, sharder_facts, table_facts, weight_facts
from recshard_lab.distributed.sharded_collections import ShardedCollection, create_route_groups, unsharded_weights
from recshard_lab.distributed.sharders import CollectionSharder, default_sharders, first_weights
from recshard_lab.distributed.state.live_reshard import Bound, Resharded, agreed_plan, migrate, recover
from recshard_lab.distributed.state.moves import Move, move
from recshard_lab.embedding import FusedCollection
from recshard_lab.planner import EmbeddingShardingPlanner
from recshard_lab.sharding import PlanError, ShardingPlan, Topology
from recshard_lab.sharding.plan.types import DDR

_Found: TypeAlias = tuple[str, nn.Module, CollectionSharder]  # path, collection, what shards it


@names_wrong_arguments
class DistributedModelParallel(nn.Module):
    """Shards every embedding collection of a model and replicates the rest.

    Rank 0's weights are everybody's: tables are spread from it, the dense part is broadcast. Tables on the ``meta``
    device are never whole anywhere: each rank draws its own part, the same numbers under every plan.

    Args:
        module: the model; it need not know that it is sharded. Its collections are replaced in place.
        env: the ranks; the default process group, or this process alone, when left out.
        device: where the model lives; this rank's GPU with NCCL, the CPU otherwise.
        plan: module path -> table -> rectangles; planned on rank 0 when left out.
        sharders: which collections, with which fused optimizer and kernel.
        init_data_parallel: replicate the dense part now; False leaves it to a later call of `init_data_parallel`.
        init_parameters: give dense parameters on ``meta`` memory, and their modules' ``reset_parameters()`` a call.
        data_parallel_wrapper: replicates the dense part; `DefaultDataParallelWrapper` when None.

    Raises:
        PlanError: the plan leaves a hole, overlaps, or names a module, table or rank that is not there.
        ValueError: the same on one device that its kernel cannot serve.

    >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    >>> table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    >>> model = DistributedModelParallel(EmbeddingBagCollection([table]))
    >>> model(KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))).values().shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | str | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[CollectionSharder] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
    ) -> None:
        super().__init__()
        self._data_parallel_wrapper = data_parallel_wrapper or DefaultDataParallelWrapper()
        self.env = env if env is not None else ShardingEnv.default()
        everyone = self.dense_env
        switches = {
            "init_data_parallel": init_data_parallel,
            "init_parameters": init_parameters,
            "data_parallel_wrapper": type(self._data_parallel_wrapper).__qualname__,
        }
        found, facts = agreed(everyone, lambda: self._read_arguments(module, device, plan, sharders, switches))
        refuse_differences(everyone, facts, PlanError)
        if plan is None and found:
            plan = from_first_rank(everyone, lambda: self._planned(module))
        self.plan = plan if plan is not None else ShardingPlan({})
        agreed(everyone, lambda: self._check_plan(module, found))
        create_route_groups(self.plan, self.env)
        self.collections = agreed(everyone, lambda: self._shard(found))
        self._fill(module, found)
        self._bare: nn.Module = self.collections.get("", module)
        agreed(everyone, lambda: self._place_dense(module, init_parameters))
        self.module = self._bare
        if init_data_parallel:
            self.init_data_parallel()

    # ---- building ----

    def _read_arguments(
        self,
        module: nn.Module,
        device: torch.device | str | None,
        plan: ShardingPlan | None,
        sharders: Sequence[CollectionSharder] | None,
        switches: Mapping[str, Any],
    ) -> tuple[list[_Found], dict[str, dict[str, Any]]]:
        """The collections to shard, and what must be the same on every rank because collectives follow from it."""
        self.device = device_named(device) if device is not None else compute_device(self.env)
        self.sharders = list(sharders) if sharders is not None else default_sharders()
        found = list(self._find(module))
        model = dense_facts(module, {path for path, _, _ in found})
        for path, child, sharder in found:
            model |= table_facts(path, sharder.tables(child)) | {f"type of module {path!r}": type(child).__name__}
            model |= weight_facts(path, unsharded_weights(child), sharder.spec)
        settings = {key: value for sharder in self.sharders for key, value in sharder_facts(sharder).items()}
        world = {"world_size": self.env.world_size, "ranks per node": self.env.local_world_size}
        arguments = {"device type": self.device.type, **world, **switches}
        return found, {"arguments": arguments, "plan": plan_facts(plan), "model": model, "sharders": settings}

    def _planned(self, module: nn.Module) -> ShardingPlan:
        topology = Topology(
            self.env.world_size, compute_device=self.device.type, local_world_size=self.env.local_world_size
        )
        return EmbeddingShardingPlanner(topology).plan(module, self.sharders)

    def _check_plan(self, module: nn.Module, found: Sequence[_Found]) -> None:
        """Refuses a plan that does not fit the model; resolves schemes to shards."""
        tables = {path: list(sharder.tables(child)) for path, child, sharder in found}
        self._refuse_strangers(tables)
        self._refuse_lonely(module, tables)
        chosen = {path: configs for path, configs in tables.items() if path in self.plan.plan}
        if chosen:
            self.plan = self.plan.resolved(chosen, self.env.world_size, self.env.local_world_size)

    def _find(self, module: nn.Module) -> Iterator[_Found]:
        for path, child in module.named_modules():
            for sharder in self.sharders:
                if type(child) is sharder.module_type:
                    yield path, child, sharder
                    break

    def _refuse_strangers(self, tables: Mapping[str, Any]) -> None:
        for path in self.plan.plan:
            if path not in tables:
                raise PlanError(
                    f"the plan names module {path!r}, but the embedding collections of this model are "
                    f"{sorted(tables)}: use one of these paths ('' is the model itself)"
                )

    def _refuse_lonely(self, module: nn.Module, tables: Mapping[str, Any]) -> None:
        """Fused tables left whole would learn apart, each replica from its own batches."""
        for path, child in module.named_modules():
            whole = path not in tables or path not in self.plan.plan
            if isinstance(child, FusedCollection) and whole and self.dense_env.world_size > 1:
                raise PlanError(
                    f"the plan leaves {type(child).__name__} {path!r} whole, and each rank's copy would learn from its "
                    f"own batches: add it to the plan (data_parallel() keeps it whole), and its sharder to sharders"
                )

    def _shard(self, found: Sequence[_Found]) -> dict[str, ShardedCollection]:
        """The sharded twin of every planned collection, its tables zero."""
        collections: dict[str, ShardedCollection] = {}
        for path, child, sharder in found:
            params = self.plan.get_plan_for_module(path)
            if params is not None:
                collections[path] = sharder.build(child, params, self.env, self.device)
        return collections

    def _fill(self, module: nn.Module, found: Sequence[_Found]) -> None:
        """Fills the sharded collections and puts them in the place of the unsharded ones. Collective."""
        moves: list[Move] = []
        sharded = [(path, child) for path, child, _ in found if path in self.collections]
        for path, child in sharded:
            moves += first_weights(self.collections[path], child, self.dense_env)
        with torch.no_grad():
            agreed(self.dense_env, lambda: move(moves, self.env, self.device))
        for path, _ in sharded:
            if path:
                parent, _, name = path.rpartition(".")
                setattr(module.get_submodule(parent), name, self.collections[path])

    def _place_dense(self, module: nn.Module, init_parameters: bool) -> None:
        """The fused optimizer, and the dense part on the device."""
        self.fused_optimizer = EmbeddingFusedOptimizer(self.collections)
        if init_parameters:
            self._materialize()
        self._bare.to(self.device)

    def _materialize(self) -> None:
        """Dense modules on ``meta`` get memory and first weights; with several ranks, rank 0's are everybody's then."""
        for name, part in self._bare.named_modules():
            own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
            if not any(tensor.is_meta for tensor in own):
                continue
            reset = getattr(part, "reset_parameters", None)
            if not callable(reset):
                raise ValueError(
                    f"module {name!r} ({type(part).__name__}) is on the meta device and has no reset_parameters() to "
                    f"draw its weights: build it on {self.device}"
                )
            part.to_empty(device=self.device, recurse=False)
            reset()

    def init_data_parallel(self) -> None:
        """Replicates the dense part; does nothing where that has been done."""
        if self.module is self._bare:
            self._data_parallel_wrapper.wrap(self, self.dense_env, self.device)

    @property
    def dense_env(self) -> ShardingEnv:
        """The ranks that share the dense part."""
        return self.env

    @property
    def replicas_apart(self) -> bool:
        """Whether there are several replicas of the tables, which may differ."""
        return False

    def sharded_parameter_names(self) -> set[str]:
        """Names of the parameters that are shards of tables; all others are dense."""
        return {
            f"{path}.{name}" if path else name
            for path, collection in self.collections.items()
            for name, _ in collection.named_parameters()
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """``.to()``, ``.half()`` and the like; refused before the dense part changes where tables cannot follow."""
        for collection in self.collections.values():
            collection._apply(fn)
        return super()._apply(fn, recurse)

    # ---- moving ----

    @checks_arguments
    def reshard(
        self,
        plan: ShardingPlan,
        *,
        max_extra_bytes: int | None = None,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
        park_dir: str | Path | None = None,
    ) -> Resharded:
        """Moves the tables to another plan while the model lives. All ranks must call it, between two steps.

        Weights and optimizer states arrive bit for bit; only overlaps with other ranks' shards travel. Learning rates,
        schedulers over ``fused_optimizer`` and the dense part stay as they are. Old kernels are freed. Gradients of
        tables on the dense kernel are dropped. Batches that were sent before must have finished, backward included:
        later use of them raises.

        The move is all or nothing. If any step fails on any rank, every rank raises the same error, which names that
        rank, and every table, optimizer state and gradient of every rank is as it was.

        Args:
            plan: the new plan, the same on every rank. Tables that it does not name stay where they are.
            max_extra_bytes: memory that a rank may need beyond the larger of what it held before and holds after.
                When left out, new kernels are made beside the old ones: the extra memory is the smaller of both, and
                two messages of at most 8 MB. If that exceeds the bound, all that a rank holds is copied to a file
                (``park_dir``) and freed first; two messages of half the bound are then all the extra memory. States
                that torch optimizers keep about dense tables come on top.
            optimizers: the torch optimizers over ``dense_parameters()``; needed when a table on the dense kernel
                moves: its parameters are exchanged in their groups, its states move as well.
            park_dir: folder for that file; the system's folder for temporary files when left out.

        Returns:
            Bytes moved, seconds, and the peak of extra memory.

        Raises:
            PlanError: a plan that does not fit the model or the codecs, or that differs between ranks.
            ValueError: a kernel that cannot serve a table there, or too small a bound.
            OSError: the file cannot be written.
            RuntimeError: after a failure in bounded memory, a rank has too little memory to rebuild its old kernels.
                The tables wait in the file, and the next call of `reshard` restores them first.

        >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, ParameterSharding, Shard
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
        >>> dmp = DistributedModelParallel(EmbeddingBagCollection([table]))
        >>> halves = [Shard(0, (0, 5), (0, 4)), Shard(0, (5, 10), (0, 4))]
        >>> dmp.reshard(ShardingPlan({"": {"t": ParameterSharding("custom", shards=halves)}})).bytes_moved
        0
        """
        recover(self.collections, self.env, self.fused_optimizer)
        bound = Bound(max_extra_bytes, park_dir)
        plan, changed = agreed_plan(plan, self.plan, self.collections, self.env, optimizers, bound)
        done = migrate(self.collections, changed, self.env, self.device, bound, self.fused_optimizer, optimizers or ())
        self.plan = plan
        return done

    def sync(
        self,
        include_optimizer_state: bool = True,
        *,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        """Only replicas can be brought together: `DMPCollection` has them.

        Raises:
            ValueError: here, always.
        """
        raise ValueError(
            f"{type(self).__name__} keeps one copy of every table, so that there is nothing to sync: leave sync() out, "
            f"or train replicas with DMPCollection(module, device, plan, world_size, sharding_group_size, global_pg)"
        )

    # ---- using ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, on this rank's batch."""
        self.fused_optimizer.push_learning_rates()
        return self.module(*args, **kwargs)

    def dense_parameters(self) -> list[nn.Parameter]:
        """The parameters that a torch optimizer must step: the replicated ones, and tables on the dense kernel."""
        fused = {
            id(p)
            for collection in self.collections.values()
            for shards in collection.table_shards().values()
            if shards.sharding.compute_kernel != "dense"
            for p in shards.parameters()
        }
        return [p for p in self._bare.parameters() if id(p) not in fused]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the unsharded model's names; a rank with several rectangles of a table has one name each."""
        return self._bare.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers under the unsharded model's names."""
        return self._bare.named_buffers(prefix, recurse, remove_duplicate)

    def backends(self) -> dict[str, str]:
        """Table name -> the kernel that serves it."""
        return {name: kernel for c in self.collections.values() for name, kernel in c.backends.items()}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Names as in the unsharded model; tables are torch's sharded tensors."""
        return self._bare.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads what ``state_dict`` returned, or an unsharded model's state dict. All ranks must call it.

        Raises:
            ValueError, RuntimeError: what is loaded does not fit, on any rank; raised on all of them.
        """

        def load() -> Any:
            if assign:
                raise ValueError("assign=True would cut tables loose from their kernels: leave it False")
            if not isinstance(state_dict, Mapping) or not all(isinstance(name, str) for name in state_dict):
                raise ValueError(f"a state dict is a mapping of names to tensors, got {type(state_dict).__name__}")
            return self._bare.load_state_dict(state_dict, strict=strict)

        return agreed(self.dense_env, load)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The unsharded model's state dict, whole on every rank. All ranks must call it."""
        whole: dict[str, Tensor] = {}
        moves = []
        for path, collection in self.collections.items():
            part, tensors = collection.gather_moves()
            moves += part
            prefix = f"{path}." if path else ""
            whole |= {f"{prefix}{collection.tables_name}.{t}.weight": tensor for t, tensor in tensors.items()}
        with torch.no_grad():
            move(moves, self.env, self.device)
        rest = self._bare.state_dict()
        return {name: whole.get(name, value) for name, value in rest.items()}

    def memory_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds now in its own memory, by the categories of the planner's `Estimate`; buffers as
        of the last step. On a GPU what lies in the host's memory is not in it, see `host_memory_bytes`."""
        held = dict.fromkeys(("weights", "optimizer_state", "dense", "input_buffers", "output_buffers"), 0)
        held |= self._table_bytes(in_host=False)
        for collection in self.collections.values():
            for name, count in collection.executor.buffer_bytes.items():
                held[name] += count
        sharded = self.sharded_parameter_names()
        for name, parameter in self._bare.named_parameters():
            if name not in sharded:
                held["dense"] += _bytes(parameter) + (_bytes(parameter.grad) if parameter.grad is not None else 0)
        return held

    def host_memory_bytes(self) -> dict[str, int]:
        """Bytes of weights and optimizer state that this rank keeps in the host's memory, apart from its own: none
        where ranks are CPUs, whose own memory that is."""
        return self._table_bytes(in_host=True)

    def _table_bytes(self, in_host: bool) -> dict[str, int]:
        held = {"weights": 0, "optimizer_state": 0}
        apart = self.device.type != "cpu"
        for shards in (own for c in self.collections.values() for own in c.table_shards().values()):
            for position, weight in shards.local_weights.items():
                if (apart and shards.sharding.shards[position].tier == DDR) is not in_host:
                    continue
                held["weights"] += _bytes(weight)
                held["optimizer_state"] += sum(map(_bytes, shards.states.get(position, {}).values()))
        return held


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
