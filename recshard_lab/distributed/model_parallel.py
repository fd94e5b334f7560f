"""DistributedModelParallel: shards embedding collections and replicates the dense part, in one call."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from recshard_lab.arguments import MPS, checks_arguments, device_named, names_wrong_arguments
from recshard_lab.comm import ShardingEnv as ShardingEnv
from recshard_lab.comm import agreed, compute_device, from_first_rank, refuse_differences
from recshard_lab.distributed.data_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from recshard_lab.distributed.discover import (
    dense_facts,
    module_facts,
    plan_facts,
    refuse_unshardable,
    sharder_facts,
)
from recshard_lab.distributed.fused_optimizer import EmbeddingFusedOptimizer
from recshard_lab.distributed.sharded_collections import ShardedCollection
from recshard_lab.distributed.sharders import (
    CollectionSharder,
    ModuleSharder,
    build_collections,
    get_default_sharders,
    planned_workload,
)
from recshard_lab.distributed.state.dumps import dump_tables, load_tables
from recshard_lab.distributed.state.forms import StateForm, requested, torch_call
from recshard_lab.distributed.state.moves import move
from recshard_lab.distributed.state.reshard import Reshard, Resharded
from recshard_lab.distributed.state.table import ShardedTable
from recshard_lab.embedding import BaseManagedCollisionEmbeddingCollection, FusedCollection
from recshard_lab.embedding.dynamic.row_files import Dumped, Paths, Restored
from recshard_lab.optim import KeyedOptimizer
from recshard_lab.planner import EmbeddingShardingPlanner
from recshard_lab.sharding import Found, PlanError, ShardingPlan, Topology, find_collections
from recshard_lab.sharding.plan.types import DDR

if TYPE_CHECKING:
    from recshard_lab.distributed.row_tracker import DeltaTrackerConfig, ModelDeltaTracker


@names_wrong_arguments
class DistributedModelParallel(nn.Module):
    """Shards every embedding collection of a model and replicates the rest.

    All ranks start with rank 0's weights: its tables are scattered, its dense part is broadcast. Tables on the ``meta``
    device are never allocated whole: each rank draws the weights of its shards, with the same values under every plan.

    ``torch.compile(dmp)`` compiles the dense part: the graph breaks at each collection and where its output is first
    used. ``torch.autocast`` and ``torch.set_float32_matmul_precision`` act on the dense part alone: outputs of
    collections are FP32, or of the sharder's ``output_dtype``.

    A table with ``requires_grad=False`` is for inference: a forward that records gradients raises a ValueError.

    Args:
        module: the model. Its collections are replaced in place.
        env: the ranks. Default: the default process group, or this process alone.
        device: device of the model. Default: this rank's GPU with NCCL, otherwise the CPU.
        plan: module path -> table -> sharding. Default: planned on rank 0.
        sharders: sharders of the collections, with fused optimizer and kernel, or of modules of yours: see
            `ModuleSharder`. The last one of a module type is used.
        init_data_parallel: whether to replicate the dense part now; otherwise call `init_data_parallel` later.
        init_parameters: whether to allocate dense parameters on ``meta`` and call ``reset_parameters()``.
        data_parallel_wrapper: replicates the dense part. Default: `DefaultDataParallelWrapper`.

    Raises:
        PlanError: the plan has a hole or an overlap, or names a module, table or rank that does not exist.
        ValueError: no kernel supports a table on this device, the model has a planned collection under two names, or a
            table's parameter has a second owner.

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
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
    ) -> None:
        super().__init__()
        self._lookup_tracker: ModelDeltaTracker | None = None  # of init_torchrec_delta_tracker
        self._data_parallel_wrapper = data_parallel_wrapper or DefaultDataParallelWrapper()
        self.env = env if env is not None else ShardingEnv.default()
        everyone = self.dense_env
        switches = {
            "init_data_parallel": init_data_parallel,
            "init_parameters": init_parameters,
            "data_parallel_wrapper": type(self._data_parallel_wrapper).__qualname__,
        }
        unsharded, facts = agreed(everyone, lambda: self._read_arguments(module, device, plan, sharders, switches))
        refuse_differences(everyone, facts, PlanError)
        if plan is None and unsharded:
            plan = from_first_rank(everyone, lambda: self._planned(module))
        self.plan = plan if plan is not None else ShardingPlan({})
        agreed(everyone, lambda: self._check_plan(module, unsharded))
        self._bare: nn.Module = self._sharded(module, [one for one in unsharded if one.path in self.plan.plan])
        agreed(everyone, lambda: self._place_dense(module, init_parameters))
        self._dmp_wrapped_module = self._bare
        self._has_data_parallel = False
        if init_data_parallel:
            self.init_data_parallel()

    # ---- tracking ----

    def init_torchrec_delta_tracker(self, delta_tracker_config: "DeltaTrackerConfig") -> "ModelDeltaTracker":
        """Starts to record lookups, and returns the tracker. TorchRec's name.

        If there is a tracker, it returns that one, until tables move.

        Raises:
            ValueError: another type of config, and as `ModelDeltaTracker`.
        """
        from recshard_lab.distributed.row_tracker import DeltaTrackerConfig, ModelDeltaTracker

        if not isinstance(delta_tracker_config, DeltaTrackerConfig):
            raise ValueError(
                f"delta_tracker_config must be a DeltaTrackerConfig, got {delta_tracker_config!r:.80}. "
                f"Fix: DeltaTrackerConfig(tracking_mode=TrackingMode.ID_ONLY)"
            )
        if self._lookup_tracker is None or self._lookup_tracker.moved:
            config = delta_tracker_config
            settings = (config.consumers, config.delete_on_read, config.auto_compact, config.tracking_mode)
            self._lookup_tracker = ModelDeltaTracker(self, *settings, config.fqns_to_skip)
        return self._lookup_tracker

    def get_delta_tracker(self) -> "ModelDeltaTracker | None":
        """The tracker of `init_torchrec_delta_tracker`. None if there is none."""
        return self._lookup_tracker

    # ---- building ----

    def _read_arguments(
        self,
        module: nn.Module,
        device: torch.device | str | None,
        plan: ShardingPlan | None,
        sharders: Sequence[ModuleSharder[Any]] | None,
        switches: Mapping[str, Any],
    ) -> tuple[list[Found], dict[str, dict[str, Any]]]:
        """The collections to shard, and facts that must be equal on all ranks because collectives depend on them."""
        self.device = device_named(device) if device is not None else compute_device(self.env)
        if any(parameter.device.type == "mps" for parameter in module.parameters()):
            raise ValueError(f"a parameter of the module is on MPS: {MPS}. Fix: pass module.to('cpu')")
        self.sharders = list(sharders) if sharders is not None else get_default_sharders()
        unsharded = find_collections(module, self.sharders, None if plan is None else plan.plan)
        model = dense_facts(module, {one.path for one in unsharded})
        for one in unsharded:
            model |= module_facts(one)
        settings = {key: value for sharder in self.sharders for key, value in sharder_facts(sharder).items()}
        world = {"world_size": self.env.world_size, "ranks per node": self.env.local_world_size}
        arguments = {"device type": self.device.type, **world, **switches}
        return unsharded, {"arguments": arguments, "plan": plan_facts(plan), "model": model, "sharders": settings}

    def _planned(self, module: nn.Module) -> ShardingPlan:
        kind = "cpu" if self.device.type == "cpu" else "cuda"  # every accelerator is planned as a GPU
        topology = Topology(self.env.world_size, compute_device=kind, local_world_size=self.env.local_world_size)
        workload = planned_workload(module, self.sharders)
        return EmbeddingShardingPlanner(topology, workload=workload).plan(module, self.sharders)

    def _check_plan(self, module: nn.Module, unsharded: Sequence[Found]) -> None:
        """Checks the plan against the model and resolves schemes to shards. Plans of a user's modules stay as is."""
        planned = [one for one in unsharded if any(path in self.plan.plan for path in one.paths)]
        collections = [one for one in planned if isinstance(one.sharder, CollectionSharder)]
        refuse_unshardable(planned)
        found = sorted(one.path for one in unsharded)
        unknown = next((path for path in self.plan.plan if path not in found), None)
        if unknown is not None:
            raise PlanError(
                f"the plan names module {unknown!r}, but the embedding collections of this model are {found}. Fix: use "
                f"one of these paths ('' is the model itself)"
            )
        self._check_fused(module)
        if collections:
            whole, self.plan = self.plan, copy(self.plan)
            self.plan.plan = {one.path: whole.plan[one.path] for one in collections}
            tables = {one.path: one.tables for one in collections}
            self.plan = self.plan.resolved(tables, self.env.world_size, self.env.local_world_size)
            self.plan.plan = whole.plan | self.plan.plan

    def _check_fused(self, module: nn.Module) -> None:
        """Raises if a fused or managed collection is not sharded: each rank would train its copy on other batches."""
        for path, child in module.named_modules():
            inside = any(path == outer or path.startswith(f"{outer}." if outer else "") for outer in self.plan.plan)
            alone = isinstance(child, FusedCollection | BaseManagedCollisionEmbeddingCollection)
            if alone and not inside and self.dense_env.world_size > 1:
                raise PlanError(
                    f"{type(child).__name__} {path!r} is not in the plan, so the ranks' copies would diverge. Fix: "
                    f"add it to the plan (data_parallel() replicates it), and its sharder to sharders"
                )

    def _sharded(self, module: nn.Module, planned: Sequence[Found]) -> nn.Module:
        """Replaces the planned modules with sharded ones. Collective. Returns the model."""
        built = [one for one in planned if _builds(one.sharder)]
        sharded: dict[str, nn.Module] = dict.fromkeys((one.path for one in planned), module)  # in the model's order
        sharded |= build_collections(built, self.plan, self.env, self.device, self.dense_env)
        for one in planned:
            if one not in built:
                args = one.module, self.plan.plan[one.path], self.env, self.device, one.path
                sharded[one.path] = agreed(self.dense_env, partial(one.sharder.shard, *args))
        self.collections = {
            f"{path}.{inner}".strip("."): part
            for path, own in sharded.items()
            for inner, part in own.named_modules()
            if isinstance(part, ShardedCollection)
        }
        others = {path: own for path, own in sharded.items() if not isinstance(own, ShardedCollection)}
        self._with_names = [path for path, own in others.items() if hasattr(own, "sharded_parameter_names")]
        for path, own in sharded.items():
            if path:
                module.set_submodule(path, own)
        return sharded.get("", module)

    def _place_dense(self, module: nn.Module, init_parameters: bool) -> None:
        """The fused optimizer, and the dense part on the device."""
        self.fused_optimizer = EmbeddingFusedOptimizer(
            self.collections, self.dense_env.world_size // self.env.world_size
        )
        if init_parameters:
            self._materialize()
        self._bare.to(self.device)

    def _materialize(self) -> None:
        """Allocates and initializes dense modules on ``meta``. `init_data_parallel` then broadcasts rank 0's."""
        for name, module in self._bare.named_modules():
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if not any(tensor.is_meta for tensor in tensors):
                continue
            reset = getattr(module, "reset_parameters", None)
            if not callable(reset):
                raise ValueError(
                    f"module {name!r} ({type(module).__name__}) is on the meta device and lacks reset_parameters(). "
                    f"Fix: build it on {self.device}"
                )
            module.to_empty(device=self.device, recurse=False)
            reset()

    def init_data_parallel(self) -> None:
        """Replicates the dense part. Further calls do nothing."""
        if not self._has_data_parallel:
            self._has_data_parallel = True
            self._data_parallel_wrapper.wrap(self, self.dense_env, self.device)

    @property
    def dense_env(self) -> ShardingEnv:
        """The ranks that share the dense part."""
        return self.env

    @property
    def replicas_apart(self) -> bool:
        """Whether there are several replicas of the tables that may differ."""
        return False

    @property
    def replica(self) -> int:
        """Number of the replica of the tables that this rank stores shards of."""
        return 0

    @property
    def _plan(self) -> ShardingPlan:
        """`plan`, where scripts for TorchRec read it."""
        return self.plan

    def table_shards(self) -> dict[str, ShardedTable]:
        """Name of each sharded table's weight in the state dict -> this rank's shards of the table."""
        return {
            name: shards
            for path, collection in self.collections.items()
            for name, shards in collection.shards_by_weight(path).items()
        }

    def _dense_tables(self) -> dict[str, ShardedTable]:
        """Those that a torch optimizer steps."""
        return {name: own for name, own in self.table_shards().items() if own.sharding.compute_kernel == "dense"}

    def sharded_parameter_names(self) -> set[str]:
        """Names of the parameters that are shards of tables; all others are dense."""
        tables = {name for path, own in self.collections.items() for name, _ in own.named_parameters(path)}
        for path in self._with_names:
            sharded: Any = self._bare.get_submodule(path)
            tables.update(sharded.sharded_parameter_names(path))
        return tables

    def refuse_user_shards(self, action: str) -> None:
        """Raises ValueError if a module is sharded by a sharder of the user, whose shards cannot be gathered."""
        if self._with_names:
            raise ValueError(
                f"{action} cannot gather module {self._with_names[0]!r}, which a sharder of yours has sharded. Fix: "
                f"return ShardedTensors in its state_dict, and call torch.distributed.checkpoint with dmp.state_dict()"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """``.to()``, ``.half()`` and similar. Raises before any change if the tables do not support it."""
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
        """Moves the tables of a running model to another plan. Collective; call it between two steps.

        Weights and optimizer states are bit-identical afterwards. Only overlaps with other ranks' shards are sent.
        Learning rates, schedulers over ``fused_optimizer`` and the dense part do not change. Old kernels are freed.
        Gradients of tables on the dense kernel are dropped. Finish earlier batches first, including their backward:
        later use of them raises.

        The move is atomic. If a step fails on any rank, every rank raises the same error, which names that rank, and
        all tables, optimizer states and gradients are unchanged.

        Args:
            plan: the new plan, the same on every rank. Tables that it does not name are not moved.
            max_extra_bytes: limit of the memory beyond the larger of a rank's tables before and after. Without a
                limit, new kernels are created beside the old ones: the extra memory is the smaller of both, plus two
                messages of at most 8 MB. If that exceeds the limit, a rank first copies its tables to a file
                (``park_dir``) and frees them; the extra memory is then two messages of half the limit. States of dense
                tables in torch optimizers come on top.
            optimizers: the torch optimizers over ``dense_parameters()``, required if a table on the dense kernel moves.
                Its parameters are replaced in their groups, and its states move.
            park_dir: folder of that file. Default: the system's folder for temporary files.

        Returns:
            Bytes moved, seconds, and peak extra memory.

        Raises:
            PlanError: a plan that does not match the model or the codecs, or differs between ranks.
            ValueError: no kernel supports a table's new sharding, or the limit is too small.
            OSError: the file cannot be written.
            RuntimeError: after a failure with parked tables, a rank has too little memory to rebuild its old kernels.
                The tables stay in the file, and the next call of `reshard` restores them first.

        >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, ParameterSharding, Shard
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
        >>> dmp = DistributedModelParallel(EmbeddingBagCollection([table]))
        >>> halves = [Shard(0, (0, 5), (0, 4)), Shard(0, (5, 10), (0, 4))]
        >>> dmp.reshard(ShardingPlan({"": {"t": ParameterSharding("custom", shards=halves)}})).bytes_moved
        0
        """
        return Reshard(self, max_extra_bytes, park_dir, optimizers).run(plan)

    def sync(
        self,
        include_optimizer_state: bool = True,
        *,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        """Not supported here: only `DMPCollection` has replicas to average.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{type(self).__name__} has one copy of every table, so sync() has nothing to average. Fix: remove sync(), "
            f"or train replicas with DMPCollection(module, device, plan, world_size, sharding_group_size, global_pg)"
        )

    def sync_replicas(self) -> None:
        """Copies the first replica of replicated tables and rows to the other ranks, with its optimizer states.

        Collective; call it between two steps. Replicas on equal kernels stay bit-identical without it, because all
        ranks apply the same gradients in the same order. Replicas on different devices or kernels differ by rounding.
        """
        self.level_tables()
        moves = [
            copies
            for shards in self.table_shards().values()
            for part in shards.parts()
            for copies in shards.replica_moves(part)
        ]
        agreed(self.env, lambda: move(moves, self.env, self.device))

    def level_tables(self) -> None:
        """Gives all shards of each dynamic table that grows the size of the largest one. Collective."""
        for collection in self.collections.values():
            collection.level_tables()

    # ---- dumps ----

    def dump(
        self,
        path: str | Path,
        since: int | str | Path | None = None,
        rows: Mapping[str, Tensor] | None = None,
    ) -> Dumped:
        """Writes the dynamic tables, or what changed in them since an earlier dump. Collective. See `dump_tables`.

        >>> from tempfile import TemporaryDirectory
        >>> from recshard_lab import DynamicEmbeddingBagCollection, DynamicEmbeddingConfig, KeyedJaggedTensor
        >>> users = DynamicEmbeddingConfig("user", 4, capacity=128)
        >>> bags = DynamicEmbeddingBagCollection([users], torch.optim.SGD, {"lr": 1.0})
        >>> dmp = DistributedModelParallel(bags)
        >>> batch = KeyedJaggedTensor(["user"], torch.tensor([10**15, -7]), lengths=torch.tensor([2]))
        >>> dmp(batch).values().sum().backward()
        >>> with TemporaryDirectory() as folder:
        ...     dmp.dump(f"{folder}/full").rows
        ...     dmp.load(f"{folder}/full")
        {'user': 2}
        Restored(rows={'user': 2}, lost={'user': 0})
        """
        return dump_tables(path, self, since=since, rows=rows)

    def load(self, path: Paths, *, optimizer_state: bool = True) -> Restored:
        """Fills the tables from one or more dumps. Collective. See `load_tables`."""
        return load_tables(path, self, optimizer_state=optimizer_state)

    # ---- copying ----

    def copy(self, device: torch.device | str) -> Self:
        """A model with equal weights and optimizer states on another device, or on the same one. Collective.

        The ranks and the plan are the same. Copy between two steps: batches in flight belong to the original.

        Raises:
            ValueError: a dynamic table, deferred steps, or a table that no kernel supports there.

        >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
        >>> dmp = DistributedModelParallel(EmbeddingBagCollection([table]))
        >>> twin = dmp.copy("cpu")
        >>> all(torch.equal(twin.state_dict()[name], value) for name, value in dmp.state_dict().items())
        True
        """
        self.fused_optimizer.refuse_deferred("dmp.copy")
        target = device_named(device)
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        for name in ("_modules", "_parameters", "_buffers"):
            vars(twin)[name] = {}
        own = agreed(self.dense_env, lambda: {path: old.copy(target) for path, old in self.collections.items()})
        memo: dict[int, Any] = {id(old): own[path] for path, old in self.collections.items()}
        twin.device, twin.collections = target, own
        twin._bare = deepcopy(self._bare, memo)
        twin._bare.to(target)
        twin._dmp_wrapped_module = twin._bare
        twin.fused_optimizer = EmbeddingFusedOptimizer(own, self.dense_env.world_size // self.env.world_size)
        for group, new in zip(self.fused_optimizer.param_groups, twin.fused_optimizer.param_groups, strict=True):
            new |= {name: value for name, value in group.items() if name != "params"}
        twin._has_data_parallel, twin._lookup_tracker = False, None
        if self._has_data_parallel:
            twin.init_data_parallel()
        return twin

    # ---- using ----

    @property
    def module(self) -> nn.Module:
        """The sharded model, without the wrapper that replicates its dense part.

        ``dmp._dmp_wrapped_module`` is the model in its wrapper, such as DistributedDataParallel with its ``no_sync()``.
        A `DataParallelWrapper` sets it, by either name.
        """
        return self._bare

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__("_dmp_wrapped_module" if name == "module" else name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on this rank's batch."""
        self.fused_optimizer.push_learning_rates()
        return self._dmp_wrapped_module(*args, **kwargs)

    def dense_parameters(self) -> list[nn.Parameter]:
        """The parameters for a torch optimizer: the replicated ones, and tables on the dense kernel."""
        left_out = {
            id(p)
            for shards in self.table_shards().values()
            if shards.sharding.compute_kernel != "dense" or not shards.local_weights
            for p in shards.parameters()
        }
        return [p for p in self._bare.parameters() if id(p) not in left_out]

    def param_to_pgs(self) -> dict[nn.Parameter, list[ProcessGroup]]:
        """Sharded parameters on the dense kernel -> the group of ranks that store their table.

        This is the argument of `GradientClippingOptimizer`. If any rank stores such a parameter, every rank has an
        entry, so that all ranks take part in the sum of norms.

        Raises:
            ValueError: the tables have several replicas (`DMPCollection`), whose gradients differ.
        """
        tables = [own for own in self._dense_tables().values() if not all(own.sharding.replica_flags)]
        if self.env.pg is None or not tables:
            return {}
        if self.fused_optimizer.replicas > 1:
            raise ValueError(
                f"tables on the dense kernel have {self.fused_optimizer.replicas} replicas with different gradients: "
                f"no norm is common to all ranks. Fix: use DistributedModelParallel"
            )
        sharded: dict[nn.Parameter, list[ProcessGroup]] = {nn.Parameter(torch.empty(0)): [self.env.pg]}
        for shards in tables:
            for position, parameter in shards.local_parameters().items():
                if not shards.sharding.replica_flags[position]:
                    sharded[parameter] = [self.env.pg]
        return sharded

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters with the unsharded model's names.

        A table without a shard on this rank has an empty parameter, so that all ranks have all tables. Several shards
        of a table on a rank have separate names: ``weight_0``, ``weight_1``. Those of cached tables are up to date
        until the next lookup.
        """
        for shards in self.table_shards().values():
            shards.flush()
        return self._bare.named_parameters(prefix, recurse, remove_duplicate)

    def bare_named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """`named_parameters` under TorchRec's second name."""
        return self.named_parameters(prefix, recurse)

    def sparse_grad_parameter_names(self, destination: list[str] | None = None, prefix: str = "") -> list[str]:
        """Names of the weights with sparse gradients: of ``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True``.

        A sharded table has dense gradients, or none because its kernel steps it.

        Args:
            destination: list to which the names are appended. Default: a new one.
            prefix: before each name, with a dot between.

        >>> table = nn.EmbeddingBag(3, 2, sparse=True)
        >>> DistributedModelParallel(nn.Sequential(table)).sparse_grad_parameter_names()
        ['0.weight']
        """
        names = [] if destination is None else destination
        for path, module in self._bare.named_modules(prefix=prefix):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                names.append(f"{path}.weight" if path else "weight")
        return names

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers with the unsharded model's names."""
        return self._bare.named_buffers(prefix, recurse, remove_duplicate)

    def backends(self) -> dict[str, str]:
        """Table name -> its kernel."""
        return {name: kernel for c in self.collections.values() for name, kernel in c.backends.items()}

    def state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        *,
        form: StateForm | None = None,
    ) -> Any:
        """The shards of this rank under the unsharded model's names. Tensors share memory with the model.

        Collective if a dynamic table may still grow: all shards of it get the size of the largest one. Its tensors then
        have the rows that it has now, until it grows again. `load_state_dict` gives a table the size of the state.

        `torch.distributed.checkpoint` saves and loads both forms, also under another plan or on other ranks. Its
        ``async_save`` takes DTensors only. Its ``get_model_state_dict`` and ``set_model_state_dict`` work on this
        model; with ``full_state_dict=True`` they use whole tables, as `full_state_dict` does.

        Args:
            destination, prefix, keep_vars: as in ``nn.Module.state_dict``.
            form: ``"sharded_tensor"``: tables are torch's sharded tensors. ``"dtensor"``: DTensors over torch's
                ``LocalShardsWrapper``, as TorchRec returns them, for tables that are whole or split along one axis.
                Replicated tables, and all tables of a single process, are plain tensors in both. Default: the form
                of each table's sharder, ``"dtensor"`` with ``fused_params={"output_dtensor": True}``.

        Raises:
            ValueError: another form, or a table that a DTensor cannot describe (grid or custom shards, host memory).
        """
        call = torch_call("_get_model_state_dict")
        is_full = call is not None and call["info"].full_state_dict
        with requested("sharded_tensor" if is_full else form):
            state = self._bare.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if call is not None and is_full:  # torch would gather tables as equal row shards
            on_cpu = call["info"].cpu_offload
            whole = self.full_state_dict(rank0_only=on_cpu, cpu_offload=on_cpu)
            for key in [key for key in state if key.startswith(prefix)]:
                del state[key]  # on_cpu, only rank 0 receives it
            state.update({prefix + name: value for name, value in whole.items()})
        return state

    def _fqn_modifiers(self) -> dict[str, str]:
        """torch's checkpoint functions read the names of a model's tensors through this method.

        Raises:
            ValueError: such a function has arguments that it cannot apply to sharded tables.
        """
        call = torch_call("_verify_options")
        if call is not None:
            self._check_torch_call(call["optims"], call["options"], call["optim_only"])
        return {name: "_bare" for name, _ in self._bare.named_children()}

    def _check_torch_call(self, optimizers: Sequence[torch.optim.Optimizer], options: Any, optim_only: bool) -> None:
        keyed = next((type(each).__name__ for each in optimizers if isinstance(each, KeyedOptimizer)), None)
        if keyed is not None:
            raise ValueError(
                f"torch.distributed.checkpoint.state_dict cannot read {keyed}: it requires an optimizer over the "
                f"model's parameters, and each table has one state on all ranks. Fix: optimizer.state_dict() and "
                f"optimizer.load_state_dict(), or save_checkpoint and load_checkpoint"
            )
        split = next((name for name, own in self._dense_tables().items() if not own.is_whole), None)
        if optimizers and split is not None:
            raise ValueError(
                f"torch.distributed.checkpoint.state_dict cannot read the optimizer states of {split!r}, a sharded "
                f"table on the dense kernel: each rank has states of its shards only. Fix: save_checkpoint(path, dmp, "
                f"optimizer) and load_checkpoint(path, dmp, optimizer)"
            )
        if options.broadcast_from_rank0 and not optim_only:
            raise ValueError(
                "set_model_state_dict with broadcast_from_rank0=True cannot fill sharded tables: torch sends each rank "
                "the names of its own shards only. Fix: pass the state dict on every rank, without broadcast_from_rank0"
            )

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Any, prefix: str | bool = "", strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a ``state_dict`` in any form, or one of the unsharded model. Collective.

        Args:
            state_dict: name -> tensor.
            prefix: what all names begin with, such as ``"model."``; other names are left out. A bool is `strict`, as
                in ``nn.Module.load_state_dict``.
            strict: whether the names must be those of the model.
            assign: only False is supported.

        Raises:
            ValueError, RuntimeError: the state dict does not match on any rank; raised on all ranks.
        """
        if isinstance(prefix, bool):
            strict, prefix = prefix, ""
        if prefix and isinstance(state_dict, Mapping):
            state_dict = {
                name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)
            }
        call = torch_call("_load_model_state_dict")

        def load() -> Any:
            if assign:
                raise ValueError("assign=True would detach tables from their kernels. Fix: assign=False")
            if not isinstance(state_dict, Mapping) or not all(isinstance(name, str) for name in state_dict):
                raise ValueError(f"state_dict must map names to tensors, got {type(state_dict).__name__}")
            state = state_dict
            if call is not None and call["info"].full_state_dict:  # torch adds this rank's own shards to it
                shards = {id(p) for table in self.table_shards().values() for p in table.parameters()}
                state = {name: value for name, value in state_dict.items() if id(value) not in shards}
            return self._bare.load_state_dict(self._as_distributed(state), strict=strict)

        return agreed(self.dense_env, load)

    def _as_distributed(self, state_dict: Any) -> Any:
        """The state dict with whole dense tensors as DTensors, where the model's are (FSDP2)."""
        changed, parameters = None, dict[str, Any](self._bare.named_parameters())
        for name, own in parameters.items():
            value = state_dict.get(name)
            if hasattr(own, "placements") and isinstance(value, Tensor) and not hasattr(value, "placements"):
                from torch.distributed.tensor import distribute_tensor

                changed = changed or copy(state_dict)  # with its metadata
                if value.shape == own.shape:  # torch names tensors of another shape
                    whole, placements = value.detach().to(self.device), own.placements
                    changed[name] = distribute_tensor(whole, own.device_mesh, placements, src_data_rank=None)
        return changed or state_dict

    @checks_arguments
    def full_state_dict(self, rank0_only: bool = False, cpu_offload: bool = False) -> dict[str, Tensor]:
        """The unsharded model's state dict. Collective.

        Tables are copies, gathered in messages of at most 8 MB; the dense part shares memory with the model unless
        it is sharded or moves to the CPU. With both arguments, ranks other than 0 and all GPUs need the memory of two
        messages only.

        Args:
            rank0_only: whether only rank 0 receives the tables; all other ranks return ``{}``.
            cpu_offload: whether all tensors are on the CPU. No table is whole on a GPU then.
        """
        self.refuse_user_shards("full_state_dict")
        self.level_tables()
        device = torch.device("cpu") if cpu_offload else self.device
        ranks = range(self.env.world_size) if not rank0_only else range(1 if self.replica == 0 else 0)
        moves, whole = [], {}
        for path, collection in self.collections.items():
            for name, (shards, part) in collection.state_entries(path).items():
                gathering, whole[name] = shards.gather_move(part, ranks, device)
                moves.append(gathering)
        move(moves, self.env, self.device)
        state: dict[str, Tensor] = {}
        with requested("sharded_tensor"):
            local = self._bare.state_dict()
        for name, value in local.items():
            value = whole.get(name, value)
            if hasattr(value, "full_tensor"):  # a DTensor of FSDP2's; one at a time, and on all ranks
                value = value.full_tensor()
            if not rank0_only or self.dense_env.rank == 0:
                state[name] = value.to(device) if cpu_offload else value
        return state

    def memory_bytes(self) -> dict[str, int]:
        """Current bytes on this rank's device by the planner's categories (`Estimate`); buffers of the last step.

        Ranks with dynamic tables have the category "index" too.
        On a GPU this excludes host memory, see `host_memory_bytes`.
        """
        totals = dict.fromkeys(("weights", "optimizer_state", "dense", "input_buffers", "output_buffers"), 0)
        totals |= self._table_bytes(in_host=False)
        for collection in self.collections.values():
            for weights, states in collection.executor.lookup.cache_bytes():
                totals["weights"] += weights
                totals["optimizer_state"] += states
            for name, count in collection.executor.buffer_bytes.items():
                totals[name] += count
        tables = self.sharded_parameter_names()
        dense = [parameter for name, parameter in self._bare.named_parameters() if name not in tables]
        totals["dense"] = sum(_bytes(own) for parameter in dense for own in (parameter, parameter.grad))
        return totals

    def host_memory_bytes(self) -> dict[str, int]:
        """Bytes of this rank's weights and optimizer states in host memory; 0 on CPU ranks, whose memory is counted in
        `memory_bytes`."""
        return self._table_bytes(in_host=True)

    def _table_bytes(self, in_host: bool) -> dict[str, int]:
        totals = {"weights": 0, "optimizer_state": 0}
        for shards in self.table_shards().values():
            indexes = [part.name for part in shards.index_parts]
            for position, weight in shards.local_weights.items():
                if (self.device.type != "cpu" and shards.sharding.shards[position].tier == DDR) is not in_host:
                    continue
                totals["weights"] += _bytes(weight)
                for name, state in shards.states.get(position, {}).items():
                    kind = "index" if name in indexes and not in_host else "optimizer_state"
                    totals[kind] = totals.get(kind, 0) + _bytes(state)
        return totals


def shard_modules(
    module: nn.Module,
    env: ShardingEnv | None = None,
    device: torch.device | str | None = None,
    plan: ShardingPlan | None = None,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
    init_params: bool = False,
) -> nn.Module:
    """Replaces every embedding collection inside a model with a sharded one. The dense part is not replicated.

    Args:
        module: the model, changed in place. For a bare collection, the sharded one is returned.
        env: the ranks. Default: the default process group, or this process alone.
        device: device of the model. Default: this rank's GPU with NCCL, otherwise the CPU.
        plan: the plan. Default: planned on rank 0.
        sharders: sharders of the collections.
        init_params: whether to initialize dense weights on ``meta``.

    Raises:
        PlanError: an invalid plan.
    """
    dmp = DistributedModelParallel(
        module, env, device, plan, sharders, init_data_parallel=False, init_parameters=init_params
    )
    return dmp.module


def _builds(sharder: ModuleSharder[Any]) -> TypeGuard[CollectionSharder]:
    """Whether `shard` is the library's own, so that all collections of a model can be built and filled together."""
    return isinstance(sharder, CollectionSharder) and type(sharder).shard is CollectionSharder.shard


def _bytes(tensor: Any) -> int:
    """Of this rank's shard, if the tensor is distributed; 0 for None."""
    if tensor is None:
        return 0
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()
