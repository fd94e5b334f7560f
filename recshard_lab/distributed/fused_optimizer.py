"""The optimizers fused into backward, as one torch optimizer with TorchRec's state names.

::

    state_dict()["state"]["ebc.embedding_bags.movies.weight"]["movies.momentum1"]    torch's ShardedTensor

Names and param groups are the same on all ranks and under all plans. Each distinct setting has one param group.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from recshard_lab.comm import all_reduce
from recshard_lab.distributed.awaitable import eager
from recshard_lab.distributed.sharded_collections import ShardedCollection
from recshard_lab.distributed.state.forms import StateForm, requested
from recshard_lab.distributed.state.moves import move
from recshard_lab.distributed.state.table import ShardedTable, TableTensor
from recshard_lab.distributed.step.gradients import Deferred
from recshard_lab.distributed.step.lookup import ShardLookup
from recshard_lab.embedding import OptimizerSpec
from recshard_lab.optim import FusedOptimizer
from recshard_lab.optim.keyed import checked_copies

STATE_NAMES = {"momentum2": "exp_avg_sq"}
"""fbgemm's state name -> TorchRec's, for the states whose names differ."""


class EmbeddingFusedOptimizer(FusedOptimizer):
    """Learning rates and states of the optimizers that step tables in backward.

    Any ``torch.optim.lr_scheduler`` changes ``param_groups``; a changed ``lr`` applies from the next forward on. State
    dicts contain learning rates after ``save_param_groups(True)``. Schedulers that also change momentum (OneCycleLR and
    CyclicLR with ``cycle_momentum=True``) raise a ValueError: kernels take a new learning rate only. States share
    memory with the kernels: reading a state dict copies nothing, loading one fills the kernels. All column shards of a
    row have a copy of its row-wise state. State dicts contain the first copy, and loading fills the others, so all
    ranks must load together.

    Args:
        collections: module path -> sharded collection.
        replicas: number of replicas of the tables that learn from separate batches.
    """

    def __init__(self, collections: Mapping[str, ShardedCollection], replicas: int = 1) -> None:
        self._prepare()
        self.replicas, self._deferred = replicas, False
        specs = [kind.optimizer for c in collections.values() for kind in c.kinds.values() if kind.optimizer]
        self._specs: list[OptimizerSpec] = list(dict.fromkeys(specs))
        self.param_groups = [{"params": [], "lr": spec.learning_rate} for spec in self._specs]
        if not self.param_groups:
            self.param_groups = [{"params": [], "lr": 0.0}]  # schedulers require a group
        self.bind(collections)

    def bind(self, collections: Mapping[str, ShardedCollection]) -> None:
        """Replaces the collections, for example after resharding. Learning rates stay."""
        self.release()
        self._collections = list(collections.values())
        self._device = next((collection.device for collection in self._collections), torch.device("cpu"))
        for path, collection in collections.items():
            for key, shards in collection.shards_by_weight(path).items():
                spec = collection.kinds[shards.config.name].optimizer
                if spec is not None:
                    self._handles[key] = handle = TableHandle(key, shards)
                    self.param_groups[self._specs.index(spec)]["params"].append(handle)
            for group in collection.executor.lookup.groups:
                if group.kind.optimizer is not None:
                    self._kernels.append((self._specs.index(group.kind.optimizer), group))
        self._pushed = [self._specs[number].learning_rate for number, _ in self._kernels]
        if self._deferred:
            self.defer_steps()

    def release(self) -> None:
        """Drops the references to the collections, so that their kernels can be freed. Call `bind` next."""
        self._handles: dict[str, TableHandle] = {}
        self._kernels: list[tuple[int, ShardLookup]] = []
        self._pushed = []
        self._collections = []
        for group in self.param_groups:
            group["params"] = []

    @property
    def params(self) -> "dict[str, TableHandle]":  # type: ignore[override]
        """Name in the model's state dict -> table."""
        return self._handles

    @property
    def state(self) -> "dict[TableHandle, dict[str, Any]]":  # type: ignore[override]
        """Table -> state name -> sharded tensor (plain for one process or a replicated table)."""
        return {handle: handle.states() for handle in self._handles.values()}

    def state_dict(self, form: StateForm | None = None) -> dict[str, Any]:
        """``{"state": {name: states}}``, with ``"param_groups"`` if requested by `save_param_groups`.

        Args:
            form: ``"sharded_tensor"`` or ``"dtensor"``, as in `DistributedModelParallel.state_dict`. Default: that of
                each table's sharder.

        Raises:
            ValueError: another form, or a table that a DTensor cannot describe.
        """
        for collection in self._collections:
            collection.level_tables()
        with requested(form):
            return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Fills the kernels' states from a `state_dict` of the same plan, in any form. Collective.

        A dynamic table that grows must have the size of the state: load the model's state dict first.

        Raises:
            ValueError: as `check_state_dict`; then nothing has changed.
        """
        with requested("sharded_tensor"):
            self.check_state_dict(state_dict)
            current = self.state_dict()
        for key, entry in current["state"].items():
            for copy in checked_copies(entry, state_dict["state"][key], key):
                copy()
        if self.defaults["_save_param_groups"]:
            self._load_groups(state_dict["param_groups"])
        self.adopt(current["state"])

    @torch.no_grad()
    def adopt(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Copies states that were read into the tensors of `state_dict` to their other copies. Collective.

        Args:
            entries: ``state_dict()["state"]``.
        """
        moves = []
        for key, handle in self._handles.items():
            shards = handle.shards
            for part in shards.state_parts:
                if shards.is_whole:  # several shards have copies of what was read
                    shards._copy_from(entries[key][handle.state_name(part)], part)
                else:
                    moves += shards.replica_moves(part)
        if moves:
            move(moves, self._collections[0].env, self._device)

    @eager
    def push_learning_rates(self) -> None:
        """Passes changed learning rates to the kernels."""
        for position, (number, kernels) in enumerate(self._kernels):
            rate = float(self.param_groups[number]["lr"])  # schedulers change tensors in place
            if rate != self._pushed[position]:
                kernels.kernel.set_learning_rate(rate)
                self._pushed[position] = rate

    def defer_steps(self) -> None:
        """From now on backward keeps the gradients of the tables, and `step` steps them.

        Gradients of several batches accumulate, as ``.grad`` does: a row steps once, with its summed gradient.
        `zero_grad` drops them. Until `step`, a rank keeps the ids and gradients of its lookups:
        ``ids + rows x columns x 4`` bytes for each batch. Every rank must call `step` alike.
        """
        self._deferred = True
        for collection in self._collections:
            collection.executor.kernels.deferred = collection.executor.kernels.deferred or Deferred()

    @property
    def _waiting(self) -> list[Deferred]:
        """Gradients that wait for `step`, of each collection."""
        return [own.executor.kernels.deferred for own in self._collections if own.executor.kernels.deferred is not None]

    @property
    def deferred_batches(self) -> int:
        """The number of batches whose gradients wait for `step`."""
        return max((deferred.batches for deferred in self._waiting), default=0)

    def refuse_deferred(self, action: str) -> None:
        """Raises ValueError if gradients wait for `step`."""
        if self.deferred_batches:
            raise ValueError(
                f"{action} would lose the gradients of {self.deferred_batches} batches, which wait for the step of the "
                f"tables. Fix: call the optimizer's step() or zero_grad() before"
            )

    def fused_norm_power(self, norm_type: float) -> list[Tensor]:
        """``[sum of |g|^p]`` of the deferred gradients of all tables and ranks; the maximum for ``p = inf``.

        Collective. Duplicates of a row are summed first, and replicas count once.

        Raises:
            ValueError: replicas of the tables have different gradients (`DMPCollection`).
        """
        if self.replicas > 1:
            raise ValueError(
                f"the tables have {self.replicas} replicas with different gradients, so their norm would scale each "
                f"replica of the dense part differently. Fix: clip values in the kernels (fused_params="
                f'{{"gradient_clipping": True, "max_gradient": ...}}), or use DistributedModelParallel'
            )
        if not self._collections:
            return []
        env, total = self._collections[0].env, torch.zeros((), device=self._device)
        for deferred in self._waiting:
            total = deferred.norm_power(norm_type, env.rank == 0, total)
        return [all_reduce(total, env, "grad_norm", maximum=norm_type == float("inf"))]

    def scale_fused_gradients(self, factor: Tensor) -> None:
        """Multiplies the deferred gradients by a 0-d tensor."""
        for deferred in self._waiting:
            deferred.scale(factor)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs ``closure`` if passed, then steps the tables if `defer_steps` was called. Collective in that case.

        Otherwise the tables were already stepped in backward.
        """
        loss = closure() if closure is not None else None
        if self._deferred:
            self.push_learning_rates()
            for collection in self._collections:
                collection.executor.step_deferred()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops deferred gradients. Fused tables have no ``.grad``."""
        for deferred in self._waiting:
            deferred.take()


class TableHandle:
    """One fused table as the optimizer's parameter.

    Args:
        key: the name of its weight in the model's state dict.
        shards: this rank's shards of it.
    """

    def __init__(self, key: str, shards: ShardedTable) -> None:
        self.key, self.shards = key, shards

    def __repr__(self) -> str:
        rows, cols = self.shards.size
        return f"<table {self.key} ({rows:,} x {cols:,})>"

    def state_name(self, part: TableTensor) -> str:
        """``movies.momentum1``."""
        return f"{self.shards.config.name}.{STATE_NAMES.get(part.name, part.name)}"

    def states(self) -> dict[str, Any]:
        """State name -> one tensor over all ranks, which shares memory with the kernels."""
        return {self.state_name(part): self.shards.state(part) for part in self.shards.state_parts}
