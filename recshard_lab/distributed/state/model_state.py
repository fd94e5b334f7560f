"""What a checkpoint holds of a model, sharded or not, under names that do not depend on the plan.

::

    model           name in the unsharded model -> tensor
    fused           name of a table's weight    -> {"movies.momentum1": state of the optimizer fused into backward}
    optimizer       name of a parameter         -> {"exp_avg": state of a torch optimizer}
    settings        learning rates and the like, of both, as bytes
    extra           what the caller added, as bytes

Tensors are the model's own memory wherever they can be, so that a checkpoint is read straight into them.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from recshard_lab.comm import ShardingEnv, agreed, all_gather_object
from recshard_lab.distributed.fused_optimizer import STATE_NAMES
from recshard_lab.distributed.model_parallel import DistributedModelParallel
from recshard_lab.distributed.state.moves import move
from recshard_lab.distributed.state.parts import Part
from recshard_lab.distributed.table_shards import TableShards, sharded_tensor
from recshard_lab.embedding import FusedCollection

Entries: TypeAlias = dict[str, dict[str, Any]]


class ModelState:
    """A model's tensors by section and name, and the way back into it.

    Args:
        model: a `DistributedModelParallel`, or any module, which may hold fused collections.
        optimizer: the torch optimizer over the dense part (over everything, in an unsharded model).

    Raises:
        ValueError: an optimizer over parameters that are not the model's.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.model, self.optimizer = model, optimizer
        self.dense: Entries = {}
        self.sharded = model if isinstance(model, DistributedModelParallel) else None
        self.env = self.sharded.dense_env if self.sharded else ShardingEnv.from_local(1, 0)
        agreed(self.env, self._read)
        self.read_dense()
        self.group_names = self._group_names()

    def _read(self) -> None:
        """What this rank holds; no rank waits for another here."""
        model, optimizer = self.model, self.optimizer
        bare = self.sharded._bare if self.sharded else model
        self.tables = _dense_tables(self.sharded)
        #: parameter -> its name in the unsharded model
        self.names = {id(parameter): name for name, parameter in bare.named_parameters()}
        for key, shards in self.tables.items():
            self.names |= {id(parameter): key for parameter in shards.parameters()}
        self.weights: dict[str, Any] = dict(model.state_dict())
        self.fused = self._fused()
        if optimizer is not None:
            strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in self.names]
            if strangers:
                raise ValueError(
                    f"the optimizer steps a parameter of shape {list(strangers[0].shape)} that is none of the model's: "
                    f"give the optimizer over dense_parameters(); fused states are saved with the model"
                )

    def refuse_replicas_apart(self) -> None:
        """Of several replicas each writes a part, so that they must be alike.

        Raises:
            ValueError: they are not.
        """
        if self.sharded is not None and self.sharded.replicas_apart:
            raise ValueError(
                "the replicas have learned apart since the last sync(): call sync() first, optimizer state included"
            )

    # ---- the fused optimizers ----

    def _fused(self) -> Entries:
        if self.sharded is not None:
            return dict(self.sharded.fused_optimizer.state_dict()["state"])
        entries: Entries = {}
        for path, collection in _fused_collections(self.model):
            for table, states in collection.optimizer_states().items():
                key = f"{path}{collection.tables_name}.{table}.weight"
                entries[key] = {f"{table}.{STATE_NAMES.get(name, name)}": value for name, value in states.items()}
        return entries

    def settings(self) -> dict[str, Any]:
        """Learning rates of the fused tables, and the param groups of the torch optimizer with names for parameters."""
        found: dict[str, Any] = {"fused": {}, "optimizer": []}
        if self.sharded is not None:
            for group in self.sharded.fused_optimizer.param_groups:
                found["fused"] |= {handle.key: group["lr"] for handle in group["params"]}
        if self.optimizer is not None:
            for names, group in zip(self.group_names, self.optimizer.param_groups, strict=True):
                kept = {key: deepcopy(value) for key, value in group.items() if key != "params"}
                found["optimizer"].append({"params": names, **kept})
        return found

    # ---- the torch optimizer ----

    def _group_names(self) -> list[list[str]]:
        """Names in each param group, over all ranks: a rank holds no piece of some tables."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        own = [{self.names[id(parameter)] for parameter in group["params"]} for group in groups]
        told = all_gather_object(own, self.env)
        if len({len(each) for each in told}) > 1:
            raise ValueError(
                f"the optimizer has {[len(each) for each in told]} param groups on the ranks: give every rank the "
                f"same ones, empty where it holds nothing"
            )
        return [sorted(set().union(*each)) for each in zip(*told, strict=True)]

    def read_dense(self) -> None:
        """Reads the torch optimizer's states into `dense`. All ranks must call it."""
        if self.optimizer is None:
            return
        optimizer = self.optimizer
        self.dense = agreed(self.env, lambda: self._whole_states(optimizer))
        for name, shards in self.tables.items():
            if self._is_split(shards):
                states = self._split_states(optimizer, name, shards)
                self.dense |= {name: states} if states else {}

    def _is_split(self, shards: TableShards) -> bool:
        return not shards.sharding.replicated and self.env.pg is not None

    def _whole_states(self, optimizer: torch.optim.Optimizer) -> Entries:
        """States of what every rank holds whole."""
        entries: Entries = {}
        for parameter, state in optimizer.state.items():
            name = self.names[id(parameter)]
            if name not in self.tables:
                entries[name] = {key: _tensor(value, name, key) for key, value in state.items()}
        for name, shards in self.tables.items():
            parameters = list(shards.parameters())
            if self._is_split(shards) or not any(optimizer.state.get(parameter) for parameter in parameters):
                continue
            if len(parameters) > 1:
                raise ValueError(f"table {name!r}: optimizer states of several shards in one process cannot be saved")
            entries[name] = {k: _tensor(v, name, k) for k, v in optimizer.state[parameters[0]].items()}
        return entries

    def _split_states(self, optimizer: torch.optim.Optimizer, name: str, shards: TableShards) -> dict[str, Any]:
        """States about a sharded table: with one number a weight sharded like it, with one a table the first one's."""
        found: dict[str, Any] = {}
        for key, (part, matrices) in self._pieces(optimizer, name, shards).items():
            kept, own = shards.primary_shards(part, matrices)
            found[key] = sharded_tensor(kept, own, part.size(*shards.size), shards.env, part.dtype)
        return found

    def _pieces(
        self, optimizer: torch.optim.Optimizer, name: str, shards: TableShards
    ) -> dict[str, tuple[Part, dict[int, Tensor]]]:
        """State -> what it is, and its matrices on this rank by the position of their shard. All ranks must call it."""

        def read() -> dict[str, dict[int, Tensor]]:
            held: dict[str, dict[int, Tensor]] = {}
            for (position, weight), parameter in zip(shards.local_weights.items(), shards.parameters(), strict=True):
                for key, value in optimizer.state.get(parameter, {}).items():
                    part = Part.of(key, _tensor(value, name, key), weight.shape[0], weight.shape[1])
                    if part.extent == "row":
                        raise ValueError(
                            f"table {name!r}: {key!r} has one number per row, which only fused tables can save"
                        )
                    held.setdefault(key, {})[position] = part.matrix(value)
            return held

        known = self._known(agreed(self.env, read))
        return {key: (Part(key, *kind), pieces) for key, (*kind, pieces) in known.items()}

    def _known(self, held: Mapping[str, dict[int, Tensor]]) -> dict[str, tuple[Any, torch.dtype, dict[int, Tensor]]]:
        """Which states there are, also where this rank holds no piece."""
        told = {
            key: (
                "table" if all(p.numel() == 1 for p in pieces.values()) else "element",
                next(iter(pieces.values())).dtype,
            )
            for key, pieces in held.items()
        }
        every: dict[str, tuple[Any, torch.dtype]] = {}
        for each in all_gather_object(told, self.env):
            for key, (extent, dtype) in each.items():
                if key not in every or extent == "element":
                    every[key] = (extent, dtype)
        return {key: (extent, dtype, held.get(key, {})) for key, (extent, dtype) in sorted(every.items())}

    # ---- back into the model ----

    def adopt(self, settings: Mapping[str, Any] | None, fused: bool) -> None:
        """Once the tensors are filled: tells those who hold copies, and takes settings over."""
        self.model.load_state_dict(self.weights)
        if self.sharded is not None and fused:
            self.sharded.fused_optimizer.adopt(self.fused)
        if self.sharded is not None and self.optimizer is not None:
            self._tell(self.optimizer, self.sharded.device)
        if settings is None:
            return
        if self.sharded is not None and fused:
            for group in self.sharded.fused_optimizer.param_groups:
                rates = [settings["fused"][h.key] for h in group["params"] if h.key in settings["fused"]]
                group["lr"] = rates[0] if rates else group["lr"]
        if self.optimizer is not None:
            for group, given in self.paired_groups(settings):
                group.update({key: value for key, value in given.items() if key != "params"})

    @torch.no_grad()
    def _tell(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Tells replicas of some rows what was read about the first of them, and every piece what a table has once."""
        moves = []
        for name, shards in self.tables.items():
            if not shards.is_whole:
                pieces = self._pieces(optimizer, name, shards).values()
                moves += [told for own in pieces if (told := shards.replica_move(*own)) is not None]
        if moves:
            move(moves, self.env, device)

    def paired_groups(self, settings: Mapping[str, Any]) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
        """Each param group here beside the saved one over the same parameters.

        Raises:
            ValueError: there is none.
        """
        assert self.optimizer is not None
        saved = {tuple(group["params"]): group for group in settings["optimizer"]}
        for names in self.group_names:
            if tuple(names) not in saved:
                raise ValueError(f"no param group over {', '.join(names)} was saved")
        return [
            (group, saved[tuple(names)])
            for names, group in zip(self.group_names, self.optimizer.param_groups, strict=True)
        ]

    def make_dense(self, found: Mapping[tuple[str, ...], Any]) -> None:
        """Makes the torch optimizer's states that were saved and are not there yet. `read_dense` comes next.

        Args:
            found: (parameter name, state name) -> metadata with ``size`` and ``properties.dtype``.
        """
        assert self.optimizer is not None
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for (name, key), entry in found.items():
            for parameter in parameters:
                if self.names[id(parameter)] != name or key in self.optimizer.state[parameter]:
                    continue
                whole = tuple(self.tables[name].size) if name in self.tables else tuple(parameter.shape)
                size = tuple(entry.size)
                if name in self.tables and not self.tables[name].sharding.replicated and self.env.pg is not None:
                    size = tuple(parameter.shape) if size == whole else ()
                one = len(size) == 0 or key == "step"
                device = torch.device("cpu") if one else parameter.device
                self.optimizer.state[parameter][key] = torch.zeros(size, dtype=entry.properties.dtype, device=device)


def _tensor(value: Any, name: str, key: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"the optimizer keeps {key}={value!r:.40} about {name!r}, which is no tensor: it is not saved")
    return value


def _dense_tables(model: DistributedModelParallel | None) -> dict[str, TableShards]:
    """Name of the weight -> table, of those that a torch optimizer steps."""
    return {
        f"{path}.{c.tables_name}.{name}.weight" if path else f"{c.tables_name}.{name}.weight": shards
        for path, c in (model.collections if model is not None else {}).items()
        for name, shards in c.table_shards().items()
        if shards.sharding.compute_kernel == "dense"
    }


def _fused_collections(model: nn.Module) -> list[tuple[str, FusedCollection]]:
    return [
        (f"{path}." if path else "", module)
        for path, module in model.named_modules()
        if isinstance(module, FusedCollection)
    ]
