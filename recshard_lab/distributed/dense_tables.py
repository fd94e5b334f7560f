"""Tables on the dense kernel are stepped by a torch optimizer: when they move, so does what it keeps about them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.comm import ShardingEnv, all_gather_object
from recshard_lab.distributed.parts import Part
from recshard_lab.distributed.reshard import Move
from recshard_lab.distributed.table_shards import TableShards

_Told = dict[str, tuple[int, int, list[tuple[Part, int, str]]]]


@dataclass
class _Entry:
    """What an optimizer keeps about one table, as all ranks know it."""

    optimizer: int
    group: int
    states: list[tuple[Part, int, str]]  # part, number of its axes, kind of device it lives on


class DenseStates:
    """Takes dense tables out of the optimizers that step them, and puts their successors in.

    Args:
        optimizers: torch optimizers, the same on every rank, in the same order.
        tables: name -> the dense tables that are about to move.
        env: the ranks.

    Raises:
        ValueError: a table that none of the optimizers steps, or about which one keeps what is no tensor.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], tables: Mapping[str, TableShards], env: ShardingEnv
    ) -> None:
        self.optimizers = list(optimizers)
        self.held: dict[tuple[str, str], dict[int, Tensor]] = {}
        self.made: list[tuple[_Entry, list[nn.Parameter], list[nn.Parameter], list[dict[str, Tensor]]]] = []
        self.old = {name: list(shards.parameters()) for name, shards in tables.items()}
        self.old_shards = {name: list(shards.sharding.shards) for name, shards in tables.items()}
        told: _Told = {}
        for name, shards in tables.items():
            place = self._find(self.old[name])
            if place is not None:
                told[name] = (*place, self._read(name, shards, self.optimizers[place[0]]))
        self.entries: dict[str, _Entry] = {}
        for each in all_gather_object(told, env) if tables else []:
            for name, (optimizer, group, states) in each.items():
                entry = self.entries.setdefault(name, _Entry(optimizer, group, states))
                entry.states = max(entry.states, states, key=len)
        for name in tables:
            if name not in self.entries:
                raise ValueError(f"none of the optimizers given steps table {name!r}, which is on the dense kernel")

    def _find(self, parameters: Sequence[nn.Parameter]) -> tuple[int, int] | None:
        for number, optimizer in enumerate(self.optimizers):
            for group_number, group in enumerate(optimizer.param_groups):
                if any(parameter is other for parameter in parameters[:1] for other in group["params"]):
                    return number, group_number
        return None

    def _read(self, name: str, shards: TableShards, optimizer: torch.optim.Optimizer) -> list[tuple[Part, int, str]]:
        states: list[tuple[Part, int, str]] = []
        for (position, weight), parameter in zip(shards.held.items(), self.old[name], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    raise ValueError(
                        f"{type(optimizer).__name__} keeps {key}={value!r:.40} about table {name!r}, which is no "
                        f"tensor: it cannot be moved"
                    )
                part = Part.of(key, value, weight.shape[0], weight.shape[1])
                if all(part.name != other.name for other, _, _ in states):
                    states.append((part, value.dim(), value.device.type))
                self.held.setdefault((name, key), {})[position] = part.matrix(value)
        return states

    def moves(self, tables: Mapping[str, TableShards], device: torch.device) -> list[Move]:
        """What must move to fill the states of the new tables."""
        moves = []
        for name, shards in tables.items():
            entry = self.entries[name]
            new = list(shards.parameters())
            states: list[dict[str, Tensor]] = [{} for _ in new]
            for part, axes, kind in entry.states:
                wanted: dict[int, Tensor] = {}
                for (position, weight), own in zip(shards.held.items(), states, strict=True):
                    where = "cpu" if kind == "cpu" else device
                    own[part.name] = torch.empty(_shape(part, axes, weight), dtype=part.dtype, device=where)
                    wanted[position] = part.matrix(own[part.name])
                sources = part.shards(self.old_shards[name])
                targets = part.shards(shards.sharding.shards)
                moves.append(Move(part.dtype, sources, targets, self.held.get((name, part.name), {}), wanted))
            self.made.append((entry, self.old[name], new, states))
        return moves

    def finish(self) -> None:
        """Puts the new parameters and states in the place of the old ones."""
        for entry, old, new, states in self.made:
            optimizer = self.optimizers[entry.optimizer]
            gone = {id(parameter) for parameter in old}
            members: list[Any] = optimizer.param_groups[entry.group]["params"]
            place = next((n for n, member in enumerate(members) if id(member) in gone), len(members))
            kept = [member for member in members[place:] if id(member) not in gone]
            members[place:] = [*new, *kept]
            for parameter in old:
                optimizer.state.pop(parameter, None)
            for parameter, own in zip(new, states, strict=True):
                if own:
                    optimizer.state[parameter] = own


def _shape(part: Part, axes: int, weight: Tensor) -> tuple[int, ...]:
    rows, cols = part.size(weight.shape[0], weight.shape[1])
    if part.extent == "element":
        return rows, cols
    return {0: (), 1: (rows,), 2: (rows, 1)}[axes]
