"""DMPCollection: replicas of a sharded model, brought together from time to time.

::

    4 ranks, sharding groups of 2           each step                            sync()
    group 0: ranks 0, 2  (whole model)      embeddings: inside the group         weights and optimizer states
    group 1: ranks 1, 3  (whole model)      dense part: averaged over all ranks  averaged over ranks 0, 1 and 2, 3

With one sharding group over all ranks this is `DistributedModelParallel`; with groups of one rank, every rank has all
tables. In between, a step's exchanges involve S ranks instead of W, at the price of R copies of the tables.

Shape letters: W ranks in all, S in a sharding group, R = W / S replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum, unique
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm import (
    ReplicaGrid,
    ShardingEnv,
    agreed,
    broadcast,
    compute_device,
    device_mesh,
    from_first_rank,
    gathered,
    refuse_differences,
)
from recshard_lab.distributed.data_parallel import DataParallelWrapper
from recshard_lab.distributed.model_parallel import DistributedModelParallel
from recshard_lab.distributed.rank_facts import plan_facts
from recshard_lab.distributed.sharded_collections import ShardedCollection
from recshard_lab.distributed.sharders import CollectionSharder, default_sharders
from recshard_lab.distributed.state.live_reshard import Bound, Resharded, agreed_plan, migrate, recover
from recshard_lab.distributed.state.regroup import Regrouping
from recshard_lab.distributed.state.replica_sync import AllReduce, average, torch_states
from recshard_lab.planner import EmbeddingShardingPlanner
from recshard_lab.sharding import EmbeddingModuleShardingPlan, PlanError, ShardingPlan, Topology


@dataclass
class _Tensors:
    """What is averaged: numbers that a sharding group holds once, and numbers that it may hold several times."""

    single: list[Tensor] = field(default_factory=list)
    several: list[Tensor] = field(default_factory=list)


@unique
class ShardingStrategy(StrEnum):
    """What `DMPCollection.sync` averages at a time: all tables, or those of one module."""

    DEFAULT = "default"
    PER_MODULE = "per_module"


@names_wrong_arguments
class DMPCollection(DistributedModelParallel):
    """R replicas of a model, each sharded over S ranks by the same plan.

    Between two calls of `sync` every sharding group steps its tables on its own ranks' batches alone, with gradients
    averaged over these; `sync` then averages tables over the replicas. With plain SGD and a sync after every step
    that is one step on the batches of all ranks together (averaging after a step is stepping by the averaged gradient);
    with other optimizers, or rarer syncs, it is local SGD (Stich, "Local SGD Converges Fast and Communicates Little",
    ICLR 2019). The dense part is averaged over all W ranks in every step, as ever.

    Rank 0's weights are everybody's at first. State dicts hold this rank's sharding group's tables under their ordinary
    names, as sharded tensors over that group; `save_checkpoint` wants replicas that are alike.

    Args:
        module: the model; its collections are replaced in place.
        device: where it lives; this rank's GPU with NCCL, the CPU otherwise, when None.
        plan: for ranks ``0 .. S - 1`` of a sharding group; planned on rank 0 when None.
        world_size: W.
        sharding_group_size: S, which divides W.
        global_pg: all ranks; the default process group when None.
        sharding_strategy: what is averaged at a time.
        node_group_size: ranks of a sharding group that count as one node for table-row-wise, grid and two-hop tables;
            those that live on one when left out.
        sharders: which collections, with which fused optimizer and kernel.
        use_inter_host_allreduce: neighbouring ranks share a sharding group, so that steps stay inside nodes and `sync`
            crosses them; replicas of a part are neighbours when False, and steps cross.
        custom_all_reduce: averages a list of tensors over ``replica_pg`` in place, instead of `sync`'s own exchange.
        init_data_parallel, init_parameters, data_parallel_wrapper: as of `DistributedModelParallel`.
        submodule_configs, rs_awaitable_hook_module, use_sharded_relay: as TorchRec has them by
            default; nothing else is done here.

    Raises:
        ValueError: S does not divide W, W is not the group's size, ranks disagree, or an argument that nothing honours.
        PlanError: a plan that needs more ranks than a sharding group has, or does not tile.

    >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig
    >>> table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    >>> dmp = DMPCollection(EmbeddingBagCollection([table]), "cpu", None, 1, 1, None)
    >>> dmp.sync()
    >>> print(dmp.show())
    1 replica on 1 rank each: {0}
    table  size    scheme         kernel  ranks  shards
    t      10 x 4  data_parallel  fused   0      1 x [10 x 4]
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str | None,
        plan: ShardingPlan | None,
        world_size: int,
        sharding_group_size: int,
        global_pg: Any,
        sharding_strategy: ShardingStrategy | str = ShardingStrategy.DEFAULT,
        node_group_size: int | None = None,
        sharders: Sequence[CollectionSharder] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        use_inter_host_allreduce: bool = False,
        custom_all_reduce: AllReduce | None = None,
        submodule_configs: Any = None,
        rs_awaitable_hook_module: str | None = None,
        use_sharded_relay: bool = False,
    ) -> None:
        if not isinstance(global_pg, dist.ProcessGroup | None):
            raise ValueError(f"global_pg must be a process group or None, got {global_pg!r}")
        world = ShardingEnv.default() if global_pg is None else ShardingEnv.from_process_group(global_pg)

        def read() -> tuple[ReplicaGrid, list[CollectionSharder]]:
            _refuse("submodule_configs", submodule_configs, None, "all collections share one layout of ranks")
            _refuse("rs_awaitable_hook_module", rs_awaitable_hook_module, None, "tables are whole in every replica")
            _refuse("use_sharded_relay", use_sharded_relay, False, "replicas are averaged by one exchange")
            self._strategy = _strategy_of(sharding_strategy)
            if world_size != world.world_size:
                raise ValueError(
                    f"world_size={world_size!r}, but the process group has {world.world_size} ranks. Fix: pass "
                    f"world_size={world.world_size}, or another global_pg"
                )
            grid = ReplicaGrid(world, sharding_group_size, bool(use_inter_host_allreduce), node_group_size)
            if plan is not None and plan.world_size > sharding_group_size:
                raise PlanError(_too_wide(plan, sharding_group_size))
            return grid, list(sharders) if sharders is not None else default_sharders()

        self.grid, known_sharders = agreed(world, read)
        grid = self.grid
        arguments = {
            "sharding_group_size": grid.group_size,
            "use_inter_host_allreduce": grid.contiguous,
            "ranks of a node": grid.ranks_per_node,
            "sharding_strategy": self._strategy.value,
            "custom_all_reduce": custom_all_reduce is not None,
        }
        refuse_differences(world, {"arguments": arguments, "plan": plan_facts(plan)}, PlanError)
        if plan is None:
            plan = from_first_rank(world, lambda: self._planned_for_group(module, device, known_sharders))
        super().__init__(
            module,
            grid.sharding,
            device,
            plan,
            known_sharders,
            init_data_parallel,
            init_parameters,
            data_parallel_wrapper,
        )
        self._custom_all_reduce = custom_all_reduce
        self._apart = False
        with torch.no_grad():
            for shards in self._tables():
                for weight in shards.local_weights.values():
                    broadcast(weight, self.grid.replicas, "replicas/first weights")

    # ---- building ----

    @property
    def dense_env(self) -> ShardingEnv:
        """All ranks: they share the dense part."""
        return self.grid.world

    @property
    def replicas_apart(self) -> bool:
        """Whether there are several replicas that have learned since the last `sync` of weights and states."""
        return self._apart and self.grid.num_replicas > 1

    def _planned_for_group(
        self, module: nn.Module, device: torch.device | str | None, sharders: Sequence[CollectionSharder]
    ) -> ShardingPlan:
        kind = torch.device(device).type if device is not None else compute_device(self.grid.world).type
        topology = Topology(self.grid.group_size, compute_device=kind, local_world_size=self.grid.ranks_per_node)
        return EmbeddingShardingPlanner(topology).plan(module, sharders)

    def _tables(self, collections: Sequence[ShardedCollection] | None = None) -> list[Any]:
        chosen = self.collections.values() if collections is None else collections
        return [shards for collection in chosen for shards in collection.table_shards().values()]

    # ---- replicas ----

    @property
    def sharding_pg(self) -> Any:
        """The process group of this rank's sharding group."""
        return self.grid.sharding.pg

    @property
    def replica_pg(self) -> Any:
        """The process group of the ranks that hold what this one holds."""
        return self.grid.replicas.pg

    @property
    def device_mesh(self) -> Any:
        """torch's ``DeviceMesh`` of R x S ranks, with the dimensions ``replicate`` and ``shard``.

        Raises:
            ValueError: one process on its own has no process groups.
        """
        if self.grid.world.pg is None:
            raise ValueError("one process on its own has no device mesh: launch ranks, or initialise a process group")
        return device_mesh(self.grid, self.device.type)

    def set_all_reduce_hook(self, reduce_hook: AllReduce) -> None:
        """From now on `sync` hands its tensors to this function, which averages them over ``replica_pg`` in place."""
        self._custom_all_reduce = reduce_hook

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, on this rank's batch."""
        self._apart |= torch.is_grad_enabled()
        return super().forward(*args, **kwargs)

    def sync(
        self,
        include_optimizer_state: bool = True,
        *,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        """Averages the tables over the replicas; all of them are the same bits afterwards. All ranks must call it.

        Call it between two steps: after each, or after every so many. A state is averaged number by number, step
        counts become the largest of theirs.

        Args:
            include_optimizer_state: average what fused optimizers keep as well.
            optimizers: the torch optimizers over ``dense_parameters()``, for what they keep about tables on the dense
                kernel.

        Raises:
            ValueError: states are asked for, a table is on the dense kernel, and its optimizer is not given, or keeps
                other things on another replica. Nothing has changed.
        """
        kept: list[Tensor] = []
        dense = {s.config.name: list(s.parameters()) for s in self._tables() if s.sharding.compute_kernel == "dense"}
        if include_optimizer_state and dense and self.grid.num_replicas > 1:
            kept = torch_states(dense, optimizers, self.grid)
        groups = [list(self.collections.values())]
        if self._strategy is ShardingStrategy.PER_MODULE:
            groups = [[collection] for collection in self.collections.values()]
        for group in groups:
            weights, states = _Tensors(), _Tensors()
            for shards in self._tables(group):
                for part in shards.parts() if include_optimizer_state else shards.parts()[:1]:
                    chosen = weights if part.name == "weight" else states
                    for position, matrix in shards.matrices(part).items():
                        several = shards.sharding.replica_flags[position] or part.extent != "element"
                        (chosen.several if several else chosen.single).append(matrix)
            states.several += kept
            self._average(weights, "replicas/weights")
            self._average(states, "replicas/optimizer_state")
            kept = []
        self._apart &= not include_optimizer_state

    def _average(self, tensors: "_Tensors", label: str) -> None:
        if self._custom_all_reduce is None:
            average(tensors.single, self.grid.replicas, label, copies=False)
            average(tensors.several, self.grid.replicas, label)
        elif self.grid.num_replicas > 1 and tensors.single + tensors.several:
            with torch.no_grad():
                self._custom_all_reduce(tensors.single + tensors.several)

    # ---- moving ----

    def reshard(
        self,
        plan: ShardingPlan,
        *,
        max_extra_bytes: int | None = None,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
        park_dir: str | Path | None = None,
        sharding_group_size: int | None = None,
    ) -> Resharded:
        """Moves the tables to another plan, or to other sharding groups, while the model lives. All ranks must call it.

        Every sharding group moves its own replica, whatever the others have learned. With another
        ``sharding_group_size`` (W for one sharded model on all ranks) replicas become more or fewer: they must be alike
        then, after a `sync`, the plan must name every table, and nodes are those of the machine.

        Args:
            plan: for ranks ``0 .. S - 1``, the same on every rank.
            max_extra_bytes, optimizers, park_dir: as of `DistributedModelParallel.reshard`.
            sharding_group_size: S from now on.

        Returns:
            Bytes moved over all ranks, seconds, and the peak of extra memory.

        Raises:
            PlanError, ValueError, OSError: as of `DistributedModelParallel.reshard`, on all ranks; nothing has moved.
        """
        recover(self.collections, self.grid.world, self.fused_optimizer)
        size = self.grid.group_size if sharding_group_size is None else sharding_group_size
        self._agree_on_size(size)
        regroups = size != self.grid.group_size
        after = agreed(self.grid.world, lambda: self._grid_of(size) if regroups else self.grid)
        bound, world = Bound(max_extra_bytes, park_dir), self.grid.world
        current = self.plan
        if regroups:
            current = ShardingPlan({path: EmbeddingModuleShardingPlan() for path in self.collections})
        plan, changed = agreed_plan(plan, current, self.collections, after.sharding, optimizers, bound, everyone=world)
        regrouping = None
        if regroups:
            changed = {path: dict(plan.plan[path]) for path in self.collections}
            regrouping = Regrouping(self.grid, after)
        env = world if regroups else self.env
        done = migrate(
            self.collections,
            changed,
            env,
            self.device,
            bound,
            self.fused_optimizer,
            optimizers or (),
            regrouping,
            everyone=world,
        )
        self.plan, self.grid, self.env = plan, after, after.sharding
        return done

    def _grid_of(self, size: int) -> ReplicaGrid:
        return replace(self.grid, group_size=size, node_group_size=None)

    def _agree_on_size(self, size: int) -> None:
        world = self.grid.world
        refuse_differences(world, {"arguments of reshard": {"sharding_group_size": size}}, after="Nothing was moved. ")
        apart = [rank for rank, flag in enumerate(gathered(world, lambda: self.replicas_apart)) if flag]
        if apart and size != self.grid.group_size:
            raise ValueError(
                f"the replicas have learned apart since the last sync() (on rank {apart[0]}), and "
                f"sharding_group_size={size} would mix them. Nothing was moved. Fix: call sync() first, optimizer "
                f"state included"
            )

    # ---- looking ----

    def show(self) -> str:
        """The layout of the ranks in one line, and a sharding group's plan as a table."""
        return f"{self.grid}\n{self.plan.show()}"


def _refuse(name: str, given: Any, default: Any, why: str) -> None:
    if given is not default:
        raise ValueError(f"{name}={given!r} does nothing here ({why}): leave it {default!r}")


def _strategy_of(given: Any) -> ShardingStrategy:
    name = str(getattr(given, "value", given))
    known = [strategy.value for strategy in ShardingStrategy]
    if name not in known:
        raise ValueError(f"sharding_strategy={name!r} is none of {', '.join(known)}: use one of these")
    return ShardingStrategy(name)


def _too_wide(plan: ShardingPlan, size: int) -> str:
    return (
        f"the plan places tables on {plan.world_size} ranks, but a sharding group has {size}: plan for "
        f"Topology(world_size={size}), or use sharding_group_size={plan.world_size}"
    )
