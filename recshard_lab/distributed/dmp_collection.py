"""DMPCollection: replicas of a sharded model that are averaged periodically.

::

    4 ranks, sharding groups of 2           each step                            sync()
    group 0: ranks 0, 2  (whole model)      embeddings: inside the group         weights and optimizer states
    group 1: ranks 1, 3  (whole model)      dense part: averaged over all ranks  averaged over ranks 0, 1 and 2, 3

With one sharding group over all ranks this is `DistributedModelParallel`; with groups of one rank, every rank has all
tables. In between, a step's exchanges involve S ranks instead of W, but there are R copies of the tables.

Shape letters: W ranks, S ranks per sharding group, R = W / S replicas.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum, unique
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm import (
    RankLost,
    ReplicaGrid,
    ShardingEnv,
    agreed,
    broadcast,
    device_mesh,
    refuse_differences,
    sizes_env,
)
from recshard_lab.comm.errors import error_for, keep_for_others
from recshard_lab.distributed.data_parallel import DataParallelWrapper, Replicated
from recshard_lab.distributed.model_parallel import DistributedModelParallel
from recshard_lab.distributed.sharders import ModuleSharder
from recshard_lab.distributed.state.moves import Regrouping
from recshard_lab.distributed.state.replica_sync import AllReduce, average, torch_states
from recshard_lab.distributed.state.reshard import Reshard, Resharded
from recshard_lab.embedding import BaseEmbeddingConfig
from recshard_lab.sharding import Found, PlanError, ShardingPlan


@unique
class ShardingStrategy(StrEnum):
    """The tables that `DMPCollection.sync` averages together: all, or those of one module."""

    DEFAULT = "default"
    PER_MODULE = "per_module"


@names_wrong_arguments
class DMPCollection(DistributedModelParallel):
    """R replicas of a model, each sharded over S ranks by the same plan.

    Between two calls of `sync`, each sharding group trains its tables on its ranks' batches only. `sync` then averages
    the tables over the replicas. With plain SGD and a sync after every step, this equals one step on the batches of all
    ranks. With other optimizers or fewer syncs it is local SGD (Stich, "Local SGD Converges Fast and Communicates
    Little", ICLR 2019). The dense part is averaged over all W ranks in every step.

    All ranks start with rank 0's weights. State dicts contain the tables of this rank's sharding group under their
    ordinary names, as sharded tensors over the group. `save_checkpoint` requires equal replicas.

    An error of one rank is raised on all ranks of its sharding group. The other groups raise it with the dense
    all-reduce of the same step, or of the next one if that all-reduce is over. On a GPU, or without
    DistributedDataParallel, they raise it with the next `sync`; on a GPU, the failing group's dense gradients of that
    step are zeros.

    Args:
        module: the model. Its collections are replaced in place.
        device: device of the model. Default: this rank's GPU with NCCL, otherwise the CPU.
        plan: plan for ranks ``0 .. S - 1`` of a sharding group. Default: planned on rank 0.
        world_size: W.
        sharding_group_size: S, which divides W.
        global_pg: all ranks. Default: the default process group.
        sharding_strategy: the tables that are averaged together.
        node_group_size: ranks of a sharding group that count as one node for table-row-wise, grid and two-hop tables.
            Default: those on one node.
        sharders: sharders of the collections, with fused optimizer and kernel.
        use_inter_host_allreduce: whether neighbouring ranks form a sharding group. Then steps stay inside nodes and
            `sync` crosses them; otherwise replicas are neighbours, and steps cross nodes.
        custom_all_reduce: averages a list of tensors over ``replica_pg`` in place, instead of `sync`'s exchange.
        init_data_parallel, init_parameters, data_parallel_wrapper: as in `DistributedModelParallel`.
        submodule_configs, rs_awaitable_hook_module, use_sharded_relay: TorchRec's arguments; only the defaults are
            supported.

    Raises:
        ValueError: S does not divide W, W is not the group's size, ranks disagree, an unsupported argument, or several
            replicas of a dynamic or managed table: replicas have different ids in a row, so rows have no average.
        PlanError: a plan that needs more ranks than a sharding group has, or does not tile the tables.

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
        sharders: Sequence[ModuleSharder[Any]] | None = None,
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

        def read() -> ReplicaGrid:
            for name, value, default, reason in (
                ("submodule_configs", submodule_configs, None, "all collections share one layout of ranks"),
                ("rs_awaitable_hook_module", rs_awaitable_hook_module, None, "tables are whole in every replica"),
                ("use_sharded_relay", use_sharded_relay, False, "replicas are averaged by one exchange"),
            ):
                if value is not default:
                    raise ValueError(f"{name}={value!r} is not supported: {reason}. Fix: {name}={default!r}")
            strategy = str(getattr(sharding_strategy, "value", sharding_strategy))
            known = [own.value for own in ShardingStrategy]
            if strategy not in known:
                raise ValueError(f"sharding_strategy={strategy!r} is not supported. Supported: {', '.join(known)}")
            self._strategy = ShardingStrategy(strategy)
            if world_size != world.world_size:
                raise ValueError(
                    f"world_size={world_size!r}, but the process group has {world.world_size} ranks. Fix: pass "
                    f"world_size={world.world_size}, or another global_pg"
                )
            grid = ReplicaGrid(world, sharding_group_size, bool(use_inter_host_allreduce), node_group_size)
            if plan is not None and plan.world_size > sharding_group_size:
                raise PlanError(
                    f"the plan places tables on {plan.world_size} ranks, but a sharding group has "
                    f"{sharding_group_size}. Fix: plan for Topology(world_size={sharding_group_size}), or use "
                    f"sharding_group_size={plan.world_size}"
                )
            return grid

        self.grid = grid = agreed(world, read)
        arguments = {
            "sharding_group_size": grid.group_size,
            "use_inter_host_allreduce": grid.contiguous,
            "ranks of a node": grid.ranks_per_node,
            "sharding_strategy": self._strategy.value,
            "custom_all_reduce": custom_all_reduce is not None,
        }
        refuse_differences(world, {"arguments": arguments}, PlanError)
        super().__init__(
            module,
            grid.sharding,
            device,
            plan,
            sharders,
            init_data_parallel,
            init_parameters,
            data_parallel_wrapper,
        )
        self._custom_all_reduce = custom_all_reduce
        self._may_differ = False
        #: connections of all ranks beside those of the dense part, which another group may still use after an error
        self._everyone = sizes_env(self.grid.world)
        with torch.no_grad():
            for shards in self.table_shards().values():
                for weight in shards.local_weights.values():
                    broadcast(weight, self.grid.replicas, "replicas/first weights")

    # ---- building ----

    def _check_plan(self, module: nn.Module, unsharded: Sequence[Found]) -> None:
        super()._check_plan(module, unsharded)
        planned = [table for one in unsharded if one.path in self.plan.plan for table in one.tables]
        self._refuse_owned_rows(planned, self.grid.num_replicas)

    @staticmethod
    def _refuse_owned_rows(tables: Sequence[BaseEmbeddingConfig], replicas: int) -> None:
        """Raises ValueError if there are several replicas, and a table whose rows belong to ids."""
        owned = [table.name for table in tables if table.dynamic]
        if owned and replicas > 1:
            raise ValueError(
                f"the rows of table {owned[0]!r} belong to ids, which differ between {replicas} replicas: they cannot "
                f"be averaged. Fix: one replica, sharding_group_size=world_size, or DistributedModelParallel"
            )

    @property
    def dense_env(self) -> ShardingEnv:
        """All ranks: they share the dense part."""
        return self.grid.world

    @property
    def replica(self) -> int:
        """Number of the replica of the tables that this rank stores shards of."""
        return self.grid.group

    @property
    def replicas_apart(self) -> bool:
        """Whether there are several replicas that were trained since the last `sync` of weights and states."""
        return self._may_differ and self.grid.num_replicas > 1

    # ---- replicas ----

    @property
    def sharding_pg(self) -> Any:
        """The process group of this rank's sharding group."""
        return self.grid.sharding.pg

    @property
    def replica_pg(self) -> Any:
        """The process group of the ranks that store the same shards."""
        return self.grid.replicas.pg

    @property
    def device_mesh(self) -> Any:
        """torch's ``DeviceMesh`` of R x S ranks, with the dimensions ``replicate`` and ``shard``.

        Raises:
            ValueError: a single process has no process groups.
        """
        if self.grid.world.pg is None:
            raise ValueError("a single process has no device mesh. Fix: launch ranks, or initialize a process group")
        return device_mesh(self.grid, self.device.type)

    def set_all_reduce_hook(self, reduce_hook: AllReduce) -> None:
        """Makes `sync` call ``reduce_hook`` with its tensors, to average them over ``replica_pg`` in place."""
        self._custom_all_reduce = reduce_hook

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on this rank's batch."""
        self._may_differ |= torch.is_grad_enabled()
        try:
            return super().forward(*args, **kwargs)
        except RankLost:
            raise
        except Exception as error:
            self._send_to_other_groups(error)
            raise

    def _send_to_other_groups(self, error: Exception) -> None:
        """Takes part in the dense all-reduce with marked messages, for which the other sharding groups wait."""
        keep_for_others(error, self.env)
        if self.grid.num_replicas > 1 and torch.is_grad_enabled() and isinstance(self._dmp_wrapped_module, Replicated):
            self._dmp_wrapped_module.take_part()
            if self.device.type == "cpu":  # elsewhere, messages are not marked
                error_for(self.grid.world)

    def sync(
        self,
        include_optimizer_state: bool = True,
        *,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        """Averages the tables over the replicas, which are bit-identical afterwards. Collective.

        Call it between two steps: after every step or every n-th. States are averaged element by element; step counts
        become the maximum.

        Args:
            include_optimizer_state: whether to average optimizer states too.
            optimizers: the torch optimizers over ``dense_parameters()``, for the states of tables on the dense kernel.

        Raises:
            ValueError: states are requested and a table is on the dense kernel, but its optimizer is missing or has
                different states on another replica. Nothing was changed.
            Exception: an error of another sharding group that this one does not know yet. Nothing was changed.
        """
        agreed(self._everyone, self._raise_unsent)
        dense_states: list[Tensor] = []
        on_dense = self._dense_tables().values()
        dense = {shards.config.name: list(shards.local_parameters().values()) for shards in on_dense}
        if include_optimizer_state and dense and self.grid.num_replicas > 1:
            dense_states = torch_states(dense, optimizers, self.grid)
        collections = list(self.collections.values())
        groups = [[one] for one in collections] if self._strategy is ShardingStrategy.PER_MODULE else [collections]
        for group in groups:
            tensors: dict[str, tuple[list[Tensor], list[Tensor]]] = {"weights": ([], []), "optimizer_state": ([], [])}
            for shards in (own for collection in group for own in collection.table_shards().values()):
                for part in shards.parts() if include_optimizer_state else shards.parts()[:1]:
                    label = "weights" if part.name == "weight" else "optimizer_state"
                    for position, matrix in shards.matrices(part).items():
                        several = shards.sharding.replica_flags[position] or part.extent != "element"
                        tensors[label][several].append(matrix)
            tensors["optimizer_state"][True].extend(dense_states)
            dense_states = []
            for label, own in tensors.items():
                self._average(*own, f"replicas/{label}")
        self._may_differ &= not include_optimizer_state

    def _raise_unsent(self) -> None:
        error = error_for(self.grid.world)
        if error is not None:
            raise error

    def _average(self, single: list[Tensor], several: list[Tensor], label: str) -> None:
        """Averages tensors that a sharding group stores once, and those that it may store several times."""
        if self._custom_all_reduce is None:
            average(single, self.grid.replicas, label, copies=False)
            average(several, self.grid.replicas, label)
        elif self.grid.num_replicas > 1 and single + several:
            with torch.no_grad():
                self._custom_all_reduce(single + several)

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
        """Moves the tables of a running model to another plan, or to other sharding groups. Collective.

        Each sharding group moves its replica; the replicas may differ. Another ``sharding_group_size`` (W for one
        sharded model on all ranks) changes the number of replicas. They must be equal then, after a `sync`, the plan
        must name every table, and nodes are those of the machine.

        Args:
            plan: plan for ranks ``0 .. S - 1``, the same on every rank.
            max_extra_bytes, optimizers, park_dir: as in `DistributedModelParallel.reshard`.
            sharding_group_size: the new S.

        Returns:
            Bytes moved over all ranks, seconds, and peak extra memory.

        Raises:
            PlanError, ValueError, OSError: as in `DistributedModelParallel.reshard`, on all ranks. Nothing was moved.
        """
        world, size = self.grid.world, self.grid.group_size if sharding_group_size is None else sharding_group_size
        refuse_differences(world, {"arguments of reshard": {"sharding_group_size": size}}, after="Nothing was moved. ")
        regrouping = agreed(world, lambda: self._regrouping(size)) if size != self.grid.group_size else None
        result = Reshard(self, max_extra_bytes, park_dir, optimizers, regrouping).run(plan)
        if regrouping is not None:
            self.grid, self.env = regrouping.after, regrouping.after.sharding
            self.fused_optimizer.replicas = self.grid.num_replicas
        return result

    def _regrouping(self, size: int) -> Regrouping:
        after = replace(self.grid, group_size=size, node_group_size=None)
        tables = [table for own in self.collections.values() for table in own.tables]
        self._refuse_owned_rows(tables, after.num_replicas)
        if self.replicas_apart:
            raise ValueError(
                f"the replicas may differ because they were trained since the last sync(), and "
                f"sharding_group_size={size} would mix them. Nothing was moved. Fix: call sync() first, with "
                f"include_optimizer_state=True"
            )
        return Regrouping(self.grid, after)

    # ---- looking ----

    def show(self) -> str:
        """The layout of the ranks in one line, and the plan of a sharding group as a table."""
        return f"{self.grid}\n{self.plan.show()}"
