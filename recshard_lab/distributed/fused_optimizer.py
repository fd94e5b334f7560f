"""A torch optimizer's face for the optimizers that run inside backward, their states named as TorchRec names them.

::

    state_dict()["state"]["ebc.embedding_bags.movies.weight"]["movies.momentum1"]    torch's ShardedTensor

Names are the same on all ranks and under all plans, and so are the param groups: one for each distinct setting.
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
from recshard_lab.optim import FusedOptimizer as KeyedFusedOptimizer
from recshard_lab.optim.state import load_entry

STATE_NAMES = {"momentum2": "exp_avg_sq"}
"""States that TorchRec names otherwise than fbgemm's kernels; the others have one name in both."""


class FusedOptimizer(KeyedFusedOptimizer):
    """Learning rates and states of the optimizers that step tables in backward.

    ``param_groups`` is where learning-rate schedulers look: a changed ``lr`` holds from the next forward on. States
    are the kernels' own memory: reading a state dict copies nothing, loading one fills the kernels. A state with one
    number a row is held by every column piece of that row; in state dicts the first of them speaks for all, and
    loading tells the others, so that all ranks must load together.

    Args:
        collections: module path -> sharded collection.
    """

    def __init__(self, collections: Mapping[str, ShardedCollection]) -> None:
        self._prepare()
        specs = [kind.optimizer for c in collections.values() for kind in c.kinds.values() if kind.optimizer]
        self._specs: list[OptimizerSpec] = list(dict.fromkeys(specs))
        self.param_groups = [{"params": [], "lr": spec.learning_rate} for spec in self._specs]
        if not self.param_groups:
            self.param_groups = [{"params": [], "lr": 0.0}]  # a scheduler over no table at all has nothing to do
        self.bind(collections)

    def bind(self, collections: Mapping[str, ShardedCollection]) -> None:
        """Serves these collections from now on, which may lie elsewhere than before; learning rates stay."""
        self.let_go()
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

    def let_go(self) -> None:
        """Forgets the collections, so that their kernels can be freed; `bind` comes next."""
        self._handles: dict[str, TableHandle] = {}
        self._kernels: list[tuple[int, KernelGroup]] = []
        self._pushed: list[float] = []
        for group in self.param_groups:
            group["params"] = []

    @property
    def params(self) -> "dict[str, TableHandle]":  # type: ignore[override]
        """Name in the model's state dict -> the table."""
        return self._handles

    @property
    def state(self) -> "dict[TableHandle, dict[str, Any]]":  # type: ignore[override]
        """Table -> state name -> sharded tensor (plain where there is one process, or the table is replicated)."""
        return {handle: handle.states() for handle in self._handles.values()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Fills the kernels' states from what `state_dict` gave under the same plan. All ranks must call it.

        Raises:
            ValueError: as `check_state_dict`; then nothing has changed.
        """
        self.check_state_dict(state_dict)
        held = self.state_dict()
        for key, entry in held["state"].items():
            load_entry(entry, state_dict["state"][key])
        if self.defaults["_save_param_groups"]:
            for group, given in self._paired_groups(state_dict["param_groups"]):
                group.update({key: value for key, value in given.items() if key != "params"})
        self.adopt(held["state"])

    @torch.no_grad()
    def adopt(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Spreads what was read straight into the tensors of `state_dict`. All ranks must call it.

        Args:
            entries: ``state_dict()["state"]``.
        """
        moves = [own for key, handle in self._handles.items() for own in handle.spread(entries[key])]
        if moves:
            move(moves, next(iter(self._handles.values())).shards.env, self._device)

    def push_learning_rates(self) -> None:
        """Hands changed learning rates to the kernels."""
        for position, (number, kernels) in enumerate(self._kernels):
            rate = self.param_groups[number]["lr"]
            if rate != self._pushed[position]:
                kernels.kernel.set_learning_rate(float(rate))
                self._pushed[position] = rate

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps nothing: backward has done it. Runs ``closure`` if given."""
        return closure() if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Fused tables have no ``.grad``."""


class TableHandle:
    """One fused table as the optimizer's parameter: its name, and this rank's rectangles.

    Args:
        key: its weight's name in the model's state dict.
        shards: what this rank holds of it.
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
        """State name -> the kernels' own memory as one tensor over all ranks."""
        return {self.state_name(part): self._state(part) for part in self.shards.state_parts}

    def _state(self, part: Part) -> Any:
        shards = self.shards
        matrices = shards.matrices(part)
        if shards.is_whole and len(matrices) == 1:
            return _plain(part, next(iter(matrices.values())))
        if shards.is_whole:
            return _plain(part, shards.joined(part))
        speakers, held = shards.spoken_for(part)
        return sharded_tensor(speakers, held, part.size(*shards.size), shards.env, part.dtype, part.extent == "element")

    def spread(self, entry: Mapping[str, Any]) -> list[Move]:
        """After a load: fills what the loaded tensors do not share memory with, at once or by the moves returned."""
        shards, moves = self.shards, []
        for part in shards.state_parts:
            matrices = shards.matrices(part)
            if shards.is_whole and len(matrices) > 1:
                where = part.shards(shards.sharding.shards)
                whole: Tensor = part.matrix(entry[self.state_name(part)])
                for position, matrix in matrices.items():
                    matrix.copy_(whole[slice(*where[position].rows), slice(*where[position].cols)])
            elif (told := shards.told(part)) is not None:
                moves.append(told)
        return moves


def _plain(part: Part, matrix: Tensor) -> Tensor:
    return matrix if part.extent == "element" else matrix.view(-1)
