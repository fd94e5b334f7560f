"""The optimizers fused into backward, as one torch optimizer with TorchRec's state names.

::

    state_dict()["state"]["ebc.embedding_bags.movies.weight"]["movies.momentum1"]    torch's ShardedTensor

Names and param groups are the same on all ranks and under all plans. Each distinct setting has one param group.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from recshard_lab.distributed.sharded_collections import ShardedCollection
from recshard_lab.distributed.state.moves import Move, move
from recshard_lab.distributed.state.parts import Part
from recshard_lab.distributed.step.lookup import KernelGroup
from recshard_lab.distributed.table_shards import TableShards, sharded_tensor
from recshard_lab.embedding import OptimizerSpec
from recshard_lab.optim import FusedOptimizer
from recshard_lab.optim.state import load_entry

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
    """

    def __init__(self, collections: Mapping[str, ShardedCollection]) -> None:
        self._prepare()
        specs = [kind.optimizer for c in collections.values() for kind in c.kinds.values() if kind.optimizer]
        self._specs: list[OptimizerSpec] = list(dict.fromkeys(specs))
        self.param_groups = [{"params": [], "lr": spec.learning_rate} for spec in self._specs]
        if not self.param_groups:
            self.param_groups = [{"params": [], "lr": 0.0}]  # schedulers require a group
        self.bind(collections)

    def bind(self, collections: Mapping[str, ShardedCollection]) -> None:
        """Replaces the collections, for example after resharding. Learning rates stay."""
        self.release()
        self._device = next((collection.device for collection in collections.values()), torch.device("cpu"))
        for path, collection in collections.items():
            prefix = f"{path}." if path else ""
            for name, shards in collection.table_shards().items():
                spec = collection.kinds[name].optimizer
                if spec is not None:
                    key = f"{prefix}{collection.tables_name}.{name}.weight"
                    handle = TableHandle(key, shards)
                    self._handles[key] = handle
                    self.param_groups[self._specs.index(spec)]["params"].append(handle)
            for group in collection.executor.lookup.groups:
                if group.kind.optimizer is not None:
                    self._kernels.append((self._specs.index(group.kind.optimizer), group))
        self._pushed += [self._specs[number].learning_rate for number, _ in self._kernels]

    def release(self) -> None:
        """Drops the references to the collections, so that their kernels can be freed. Call `bind` next."""
        self._handles: dict[str, TableHandle] = {}
        self._kernels: list[tuple[int, KernelGroup]] = []
        self._pushed: list[float] = []
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

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Fills the kernels' states from a `state_dict` of the same plan. Collective.

        Raises:
            ValueError: as `check_state_dict`; then nothing has changed.
        """
        self.check_state_dict(state_dict)
        current = self.state_dict()
        for key, entry in current["state"].items():
            load_entry(entry, state_dict["state"][key])
        if self.defaults["_save_param_groups"]:
            self._load_groups(state_dict["param_groups"])
        self.adopt(current["state"])

    @torch.no_grad()
    def adopt(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Copies states that were read into the tensors of `state_dict` to their other copies. Collective.

        Args:
            entries: ``state_dict()["state"]``.
        """
        moves = [copies for key, handle in self._handles.items() for copies in handle.spread(entries[key])]
        if moves:
            move(moves, next(iter(self._handles.values())).shards.env, self._device)

    def push_learning_rates(self) -> None:
        """Passes changed learning rates to the kernels."""
        for position, (number, kernels) in enumerate(self._kernels):
            rate = float(self.param_groups[number]["lr"])  # schedulers change tensors in place
            if rate != self._pushed[position]:
                kernels.kernel.set_learning_rate(rate)
                self._pushed[position] = rate

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs ``closure`` if passed. The tables were already stepped in backward."""
        return closure() if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Fused tables have no ``.grad``."""


class TableHandle:
    """One fused table as the optimizer's parameter.

    Args:
        key: the name of its weight in the model's state dict.
        shards: this rank's shards of it.
    """

    def __init__(self, key: str, shards: TableShards) -> None:
        self.key, self.shards = key, shards

    def __repr__(self) -> str:
        rows, cols = self.shards.size
        return f"<table {self.key} ({rows:,} x {cols:,})>"

    def state_name(self, part: Part) -> str:
        """``movies.momentum1``."""
        return f"{self.shards.config.name}.{STATE_NAMES.get(part.name, part.name)}"

    def states(self) -> dict[str, Any]:
        """State name -> one tensor over all ranks, which shares memory with the kernels."""
        return {self.state_name(part): self._state(part) for part in self.shards.state_parts}

    def _state(self, part: Part) -> Any:
        shards = self.shards
        matrices = shards.matrices(part)
        if shards.is_whole and len(matrices) == 1:
            return _plain(part, next(iter(matrices.values())))
        if shards.is_whole:
            return _plain(part, shards.joined(part))
        primaries, tensors = shards.primary_shards(part)
        return sharded_tensor(
            primaries, tensors, part.size(*shards.size), shards.env, part.dtype, part.extent == "element"
        )

    def spread(self, entry: Mapping[str, Any]) -> list[Move]:
        """After a load, fills the other copies of the states: local ones now, remote ones by the returned moves."""
        shards, moves = self.shards, []
        for part in shards.state_parts:
            matrices = shards.matrices(part)
            if shards.is_whole and len(matrices) > 1:
                where = part.shards(shards.sharding.shards)
                whole: Tensor = part.matrix(entry[self.state_name(part)])
                for position, matrix in matrices.items():
                    matrix.copy_(whole[slice(*where[position].rows), slice(*where[position].cols)])
            elif (copies := shards.replica_move(part)) is not None:
                moves.append(copies)
        return moves


def _plain(part: Part, matrix: Tensor) -> Tensor:
    return matrix if part.extent == "element" else matrix.view(-1)
