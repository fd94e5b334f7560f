"""The content of a checkpoint of a model, sharded or not. Names do not depend on the plan.

::

    model           name in the unsharded model -> tensor
    fused           name of a table's weight    -> {"movies.momentum1": state of the optimizer fused into backward}
    optimizer       name of a parameter         -> {"exp_avg": state of a torch optimizer}
    settings        learning rates and other settings of both optimizers, as bytes
    tiers           name of a table's weight    -> {"weight": rows in tiers below the fast one, see `TierRows`}
    extra           the caller's values, as bytes

Tensors share memory with the model where possible, so a checkpoint is read directly into the model.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from recshard_lab.comm import ShardingEnv, agreed, all_gather_object
from recshard_lab.distributed.fused_optimizer import STATE_NAMES
from recshard_lab.distributed.model_parallel import DistributedModelParallel
from recshard_lab.distributed.state.dumps import TierRows
from recshard_lab.distributed.state.forms import requested, sharded_tensor, tiers_apart
from recshard_lab.distributed.state.moves import move
from recshard_lab.distributed.state.reshard import DenseStates, tensor_state
from recshard_lab.distributed.state.table import ShardedTable, TableTensor
from recshard_lab.embedding import FusedCollection

Entries: TypeAlias = dict[str, dict[str, Any]]


class ModelState:
    """A model's tensors by section and name; `adopt` completes a load.

    Args:
        model: a `DistributedModelParallel`, or any module, which may hold fused collections.
        optimizer: the torch optimizer over the dense part (over everything, in an unsharded model).

    Raises:
        ValueError: the optimizer steps parameters that do not belong to the model.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.model, self.optimizer = model, optimizer
        self.dense: Entries = {}
        self.sharded = model if isinstance(model, DistributedModelParallel) else None
        self.collections = self.sharded.collections if self.sharded else {}
        self.env = self.sharded.dense_env if self.sharded else ShardingEnv.from_local(1, 0)
        if self.sharded:
            self.sharded.level_tables()
        agreed(self.env, self._read)
        self.read_dense()
        self.group_names = self._group_names()

    def _read(self) -> None:
        """Reads this rank's tensors. Not collective."""
        model, optimizer = self.model, self.optimizer
        if self.sharded:
            self.sharded.refuse_user_shards("a checkpoint")
        bare = self.sharded._bare if self.sharded else model
        self.tables: dict[str, ShardedTable] = self.sharded._dense_tables() if self.sharded else {}
        #: parameter -> its name in the unsharded model
        self.names = {id(parameter): name for name, parameter in bare.named_parameters()}
        for key, shards in self.tables.items():
            self.names |= {id(parameter): key for parameter in shards.parameters()}
        with requested("sharded_tensor"), tiers_apart():  # describes every tiling
            self.weights: dict[str, Any] = dict(model.state_dict())
            self.fused = self._fused()
        if optimizer is not None:
            foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in self.names]
            if foreign:
                raise ValueError(
                    f"the optimizer steps a parameter of shape {list(foreign[0].shape)} that does not belong to the "
                    f"model. Fix: pass the optimizer over dense_parameters(); fused states are saved with the model"
                )

    def refuse_replicas_apart(self) -> None:
        """Checks that all replicas are equal, because each one writes a part.

        Raises:
            ValueError: they may differ.
        """
        if self.sharded is not None and self.sharded.replicas_apart:
            raise ValueError(
                "the replicas may differ because they have trained since the last sync(). Fix: call sync() first, with "
                "include_optimizer_state=True"
            )

    # ---- the fused optimizers ----

    def _fused(self) -> Entries:
        if self.sharded is not None:
            return dict(self.sharded.fused_optimizer.state_dict("sharded_tensor")["state"])
        entries: Entries = {}
        fused = ((path, own) for path, own in self.model.named_modules() if isinstance(own, FusedCollection))
        for path, collection in fused:
            for table, states in collection.optimizer_states().items():
                key = f"{path}." * bool(path) + f"{collection.tables_name}.{table}.weight"
                entries[key] = {f"{table}.{STATE_NAMES.get(name, name)}": value for name, value in states.items()}
        return entries

    def settings(self) -> dict[str, Any]:
        """Learning rates of the fused tables, and the torch optimizer's param groups with parameter names."""
        settings: dict[str, Any] = {"fused": {}, "optimizer": []}
        if self.sharded is not None:
            for group in self.sharded.fused_optimizer.param_groups:
                settings["fused"] |= {handle.key: group["lr"] for handle in group["params"]}
        if self.optimizer is not None:
            for names, group in zip(self.group_names, self.optimizer.param_groups, strict=True):
                values = {key: deepcopy(value) for key, value in group.items() if key != "params"}
                settings["optimizer"].append({"params": names, **values})
        return settings

    # ---- dynamic tables that grow ----

    def other_sizes(self, rows: Mapping[str, int]) -> dict[str, int]:
        """Name of a weight -> buckets of each partition, for tables that have another size in a checkpoint.

        Args:
            rows: name of a weight -> its rows in the checkpoint.
        """
        tables = {} if self.sharded is None else self.sharded.table_shards()
        found = {key: own.buckets_for(rows[key]) for key, own in tables.items() if rows.get(key) != own.size[0]}
        return {key: buckets for key, buckets in found.items() if buckets is not None}

    def rows_at(self, sizes: Mapping[str, int]) -> dict[tuple[str, ...], int]:
        """Key of a tensor in the checkpoint -> its rows after `set_sizes`, where these differ."""
        found: dict[tuple[str, ...], int] = {}
        for key, buckets in sizes.items():
            assert self.sharded is not None
            shards, handle = self.sharded.table_shards()[key], self.sharded.fused_optimizer.params.get(key)
            prefix = key.removesuffix("weight")
            names: dict[tuple[str, ...], TableTensor] = {("model", prefix + n): p for n, p in shards.entries.items()}
            if handle is not None:
                names |= {("fused", key, handle.state_name(part)): part for part in shards.state_parts}
            found |= {name: shards.rows_of(buckets) for name, part in names.items() if part.follows_rows}
        return found

    def set_sizes(self, sizes: Mapping[str, int]) -> None:
        """Empties these tables, gives them other sizes, and reads their tensors anew. Alike on all ranks."""
        for key, buckets in sizes.items():
            assert self.sharded is not None
            self.sharded.table_shards()[key].clear(buckets)
        if sizes:
            self._read()

    # ---- the torch optimizer ----

    def _group_names(self) -> list[list[str]]:
        """Names in each param group over all ranks. A rank may store no shard of a table."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        local = [{self.names[id(parameter)] for parameter in group["params"]} for group in groups]
        by_rank = all_gather_object(local, self.env)
        counts = [len(rank_groups) for rank_groups in by_rank]
        if len(set(counts)) > 1:
            raise ValueError(
                f"the optimizer has {counts} param groups on the ranks. Fix: use the same groups on every rank, empty "
                f"if it has no parameters"
            )
        return [sorted(set().union(*names)) for names in zip(*by_rank, strict=True)]

    def read_dense(self) -> None:
        """Reads the torch optimizer's states into `dense`. Collective."""
        if self.optimizer is None:
            return
        optimizer = self.optimizer
        self.dense = agreed(self.env, lambda: self._whole_states(optimizer))
        for name, parts in self._split_states(optimizer).items():
            shards, states = self.tables[name], self.dense.setdefault(name, {})
            for part, matrices in parts:
                primary = shards.tiles(part, matrices).primary(part.extent)
                states[part.name] = sharded_tensor(primary, part.size(*shards.size), shards.env)

    def _whole_states(self, optimizer: torch.optim.Optimizer) -> Entries:
        """States of the parameters that every rank stores whole."""
        entries: Entries = {}
        for parameter, state in optimizer.state.items():
            name = self.names[id(parameter)]
            if name not in self.tables:
                entries[name] = {key: tensor_state(value, name, key) for key, value in state.items()}
        for name, shards in self.tables.items():
            parameters = list(shards.parameters())
            if not shards.is_whole or not any(optimizer.state.get(parameter) for parameter in parameters):
                continue
            if len(parameters) > 1:
                raise ValueError(f"table {name!r}: optimizer states of several shards in one process cannot be saved")
            entries[name] = {k: tensor_state(v, name, k) for k, v in optimizer.state[parameters[0]].items()}
        return entries

    def _split_states(self, optimizer: torch.optim.Optimizer) -> dict[str, list[tuple[TableTensor, dict[int, Tensor]]]]:
        """Table that no rank stores whole -> its states, each with this rank's matrices by position. Collective.

        Raises:
            ValueError: a state with one number per row.
        """
        split = {name: shards for name, shards in self.tables.items() if not shards.is_whole}
        states = agreed(self.env, lambda: DenseStates([optimizer], split))
        states.exchange(self.env)
        for name, entry in states.entries.items():
            for part, *_ in entry.states:
                if part.extent == "row":
                    raise ValueError(
                        f"table {name!r}: state {part.name!r} has one number per row, which only fused tables support"
                    )
        return {
            name: [(part, states.sources.get((name, part.name), {})) for part, *_ in entry.states]
            for name, entry in states.entries.items()
            if entry.states
        }

    # ---- back into the model ----

    def adopt_tiers(self, tiers: TierRows) -> None:
        """Makes rows that were read those of the tiers. Collective, after `adopt`."""
        if self.sharded is not None:
            move(tiers.copies(), self.env, self.sharded.device)
            agreed(self.env, tiers.replace)
            for collection in self.collections.values():
                collection.recount()

    def adopt(self, settings: Mapping[str, Any] | None, fused: bool) -> None:
        """After the tensors are filled, fills their copies and applies the settings. Collective."""
        with tiers_apart():
            self.model.load_state_dict(self.weights)
        if self.sharded is not None and fused:
            self.sharded.fused_optimizer.adopt(self.fused)
        if self.sharded is not None and self.optimizer is not None:
            moves = [
                copies
                for name, states in self._split_states(self.optimizer).items()
                for part, matrices in states
                for copies in self.tables[name].replica_moves(part, matrices)
            ]
            move(moves, self.sharded.env, self.sharded.device)  # each replica by itself
        if settings is None:
            return
        if self.sharded is not None and fused:
            for group in self.sharded.fused_optimizer.param_groups:
                rates = [settings["fused"][h.key] for h in group["params"] if h.key in settings["fused"]]
                group["lr"] = rates[0] if rates else group["lr"]
        if self.optimizer is not None:
            for group, saved in self.paired_groups(settings):
                group.update({key: value for key, value in saved.items() if key != "params"})

    def paired_groups(self, settings: Mapping[str, Any]) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
        """(param group, saved group over the same parameters) for each group.

        Raises:
            ValueError: a group without a saved one.
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

    def make_dense(self, saved: Mapping[tuple[str, ...], Any]) -> None:
        """Creates missing states of the torch optimizer that the checkpoint has. Call `read_dense` next.

        Args:
            saved: (parameter name, state name) -> metadata with ``size`` and ``properties.dtype``.
        """
        assert self.optimizer is not None
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for (name, key), entry in saved.items():
            for parameter in parameters:
                if self.names[id(parameter)] != name or key in self.optimizer.state[parameter]:
                    continue
                whole = tuple(self.tables[name].size) if name in self.tables else tuple(parameter.shape)
                size = tuple(entry.size)
                if name in self.tables and not self.tables[name].is_whole:
                    size = tuple(parameter.shape) if size == whole else ()
                scalar, dtype = len(size) == 0 or key == "step", entry.properties.dtype
                if not scalar and size == tuple(parameter.shape):
                    state = torch.zeros_like(parameter.detach(), dtype=dtype)  # a DTensor under FSDP2
                else:
                    state = torch.zeros(size, dtype=dtype, device="cpu" if scalar else parameter.device)
                self.optimizer.state[parameter][key] = state
