"""Moves the torch optimizer's states of tables on the dense kernel when the tables move."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.comm import ShardingEnv, all_gather_object
from recshard_lab.distributed.state.moves import Move
from recshard_lab.distributed.state.parts import Part
from recshard_lab.distributed.table_shards import TableShards


def tensor_state(value: Any, name: str, key: str) -> Tensor:
    """An optimizer's state of a parameter, if it is a tensor.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, Tensor):
        raise ValueError(
            f"the optimizer's state {key}={value!r:.40} of {name!r} is not a tensor and cannot be saved or moved"
        )
    return value


_Local = dict[str, tuple[int, int, list[tuple[Part, int, str]]]]


@dataclass
class _Entry:
    """An optimizer's states of one table, the same on all ranks."""

    optimizer: int
    group: int
    states: list[tuple[Part, int, str]]  # part, number of axes, device type


class DenseStates:
    """Replaces the parameters and states of dense tables in the optimizers that step them.

    The constructor reads this rank's optimizers. Call `exchange` and `check`, then `moves`, then `finish`; `undo`
    reverts `finish`.

    Args:
        optimizers: torch optimizers, the same on every rank, in the same order.
        tables: name -> dense table that will move.

    Raises:
        ValueError: a state that is not a tensor.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], tables: Mapping[str, TableShards]) -> None:
        self.optimizers = list(optimizers)
        self.sources: dict[tuple[str, str], dict[int, Tensor]] = {}
        self.replacements: list[tuple[_Entry, list[nn.Parameter], list[nn.Parameter], list[dict[str, Tensor]]]] = []
        self.old = {name: list(shards.parameters()) for name, shards in tables.items()}
        self.old_shards = {name: list(shards.sharding.shards) for name, shards in tables.items()}
        self.entries: dict[str, _Entry] = {}
        self._local: _Local = {}
        self._before: list[tuple[torch.optim.Optimizer, list[list[Any]], dict[Any, Any]]] = []
        for name, shards in tables.items():
            place = self._find(self.old[name])
            if place is not None:
                self._local[name] = (*place, self._read(name, shards, self.optimizers[place[0]]))

    def exchange(self, env: ShardingEnv) -> None:
        """Collects the states of all ranks. Collective."""
        for local in all_gather_object(self._local, env) if self.old else []:
            for name, (optimizer, group, states) in local.items():
                entry = self.entries.setdefault(name, _Entry(optimizer, group, states))
                entry.states = max(entry.states, states, key=len)

    def check(self) -> None:
        """Checks that an optimizer steps each table.

        Raises:
            ValueError: a table that no optimizer of any rank steps.
        """
        for name in self.old:
            if name not in self.entries:
                raise ValueError(
                    f"table {name!r} is on the dense kernel, but none of the optimizers steps it. Fix: pass the torch "
                    f"optimizer over dense_parameters() in optimizers="
                )

    def _find(self, parameters: Sequence[nn.Parameter]) -> tuple[int, int] | None:
        for number, optimizer in enumerate(self.optimizers):
            for group_number, group in enumerate(optimizer.param_groups):
                if any(parameter is other for parameter in parameters[:1] for other in group["params"]):
                    return number, group_number
        return None

    def _read(self, name: str, shards: TableShards, optimizer: torch.optim.Optimizer) -> list[tuple[Part, int, str]]:
        states: list[tuple[Part, int, str]] = []
        for position, parameter in shards.local_parameters().items():
            weight = shards.local_weights[position]
            for key, value in optimizer.state.get(parameter, {}).items():
                part = Part.of(key, tensor_state(value, name, key), weight.shape[0], weight.shape[1])
                if all(part.name != other.name for other, _, _ in states):
                    states.append((part, value.dim(), value.device.type))
                self.sources.setdefault((name, part.name), {})[position] = part.matrix(value)
        return states

    def moves(self, tables: Mapping[str, TableShards], device: torch.device) -> list[Move]:
        """Moves that fill the states of the new tables."""
        moves = []
        for name, shards in tables.items():
            entry = self.entries[name]
            new = list(shards.local_parameters().values())
            states: list[dict[str, Tensor]] = [{} for _ in new]
            for part, axes, kind in entry.states:
                tensors: dict[int, Tensor] = {}
                for (position, weight), state in zip(shards.local_weights.items(), states, strict=True):
                    target = "cpu" if kind == "cpu" else device
                    state[part.name] = torch.empty(_shape(part, axes, weight), dtype=part.dtype, device=target)
                    tensors[position] = part.matrix(state[part.name])
                sources = part.shards(self.old_shards[name])
                targets = part.shards(shards.sharding.shards)
                moves.append(Move(part.dtype, sources, targets, self.sources.get((name, part.name), {}), tensors))
            self.replacements.append((entry, self.old[name], new, states))
        return moves

    def finish(self) -> None:
        """Replaces the old parameters and states with the new ones."""
        self._before = [(o, [list(g["params"]) for g in o.param_groups], dict(o.state)) for o in self.optimizers]
        for entry, old, new, states in self.replacements:
            optimizer = self.optimizers[entry.optimizer]
            replaced = {id(parameter) for parameter in old}
            members: list[Any] = optimizer.param_groups[entry.group]["params"]
            place = next((n for n, member in enumerate(members) if id(member) in replaced), len(members))
            kept = [member for member in members[place:] if id(member) not in replaced]
            members[place:] = [*new, *kept]
            for parameter in old:
                optimizer.state.pop(parameter, None)
            for parameter, state in zip(new, states, strict=True):
                if state:
                    optimizer.state[parameter] = state

    def undo(self) -> None:
        """Reverts `finish`."""
        for optimizer, groups, state in self._before:
            for group, members in zip(optimizer.param_groups, groups, strict=True):
                group["params"][:] = members
            optimizer.state.clear()
            optimizer.state.update(state)
        self._before, self.replacements = [], []


def _shape(part: Part, axes: int, weight: Tensor) -> tuple[int, ...]:
    rows, cols = part.size(weight.shape[0], weight.shape[1])
    if part.extent == "element":
        return rows, cols
    return {0: (), 1: (rows,), 2: (rows, 1)}[axes]
