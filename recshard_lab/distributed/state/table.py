"""The tensors that move with a table: its weights and its optimizer states.

Each part has one tensor per shard. Its *extent* determines the shape::

    element     one number per weight      [rows, cols]     weights, Adagrad's sums
    row         one number per row         [rows]           row-wise Adagrad's sums; column shards of a row have copies
    table       one number per table       [1] or []        iteration counts; all shards have copies

As matrices they are tilings (with copies) that `moves.move` can move.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, Self, TypeAlias, cast

import torch
from torch import Tensor, nn

from recshard_lab.comm import ShardingEnv, gathered
from recshard_lab.distributed.state.forms import (
    StateForm,
    are_tiers_apart,
    check_placements,
    dtensor,
    form_of,
    shape_of,
    sharded_tensor,
)
from recshard_lab.distributed.state.moves import Move, Tiles, move, primary_rows, region
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.embedding.dynamic.config import SLOTS, DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.kernel import DynamicKernel
from recshard_lab.embedding.kernels import TORCH_DTYPES, LookupKernel
from recshard_lab.embedding.managed_collision.modules import ManagedEmbeddingConfig
from recshard_lab.optim import EmptyFusedOptimizer
from recshard_lab.optim.keyed import local_shards
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding, Shard

Extent: TypeAlias = Literal["element", "row", "table"]


@dataclass(frozen=True)
class TableTensor:
    """One tensor of every shard of a table.

    Args:
        name: "weight", or fbgemm's name of the state ("momentum1").
        extent: "element", "row" or "table".
        dtype: its dtype.
        width: numbers of each row, where ``extent`` is "row".
        ratio: rows of this part, and the rows of the table that they are for, where ``extent`` is "row".
    """

    name: str
    extent: Extent
    dtype: torch.dtype
    width: int = 1
    ratio: tuple[int, int] = (1, 1)

    @property
    def follows_rows(self) -> bool:
        """Whether a table that grows has one row of this part for each of its rows."""
        return self.extent != "table" and self.ratio == (1, 1)

    @property
    def is_matrix(self) -> bool:
        """Whether tensors have two axes."""
        return self.extent == "element" or self.width > 1

    @classmethod
    def of(cls, name: str, tensor: Tensor, num_rows: int, num_cols: int) -> "TableTensor":
        """The part of a shard's tensor.

        Raises:
            ValueError: a shape that is neither ``[rows, cols]``, ``[rows]``, ``[rows, 1]`` nor a single number.

        >>> TableTensor.of("momentum1", torch.zeros(5), num_rows=5, num_cols=4).extent
        'row'
        """
        shape = tuple(tensor.shape)
        extents: list[tuple[Extent, list[tuple[int, ...]]]] = [
            ("element", [(num_rows, num_cols)]),
            ("row", [(num_rows,), (num_rows, 1)]),
            ("table", [(), (1,), (1, 1)]),
        ]
        for extent, shapes in extents:
            if shape in shapes:
                return cls(name, extent, tensor.dtype)
        raise ValueError(
            f"state {name!r} of a {num_rows} x {num_cols} shard has shape {list(shape)}: expected one number per "
            f"weight, row or table"
        )

    def matrix(self, tensor: Tensor) -> Tensor:
        """The tensor as a matrix: ``[rows, cols]``, ``[rows, 1]`` or ``[1, 1]``, as in `shards`."""
        return tensor if self.is_matrix else tensor.view(-1, 1)

    def shards(self, shards: Sequence[Shard]) -> list[Shard]:
        """The matrices of these shards as shards of the whole matrix."""
        if self.extent == "element":
            return list(shards)
        if self.extent == "row":
            many, each = self.ratio
            rows = [(shard.rows[0] * many // each, shard.rows[1] * many // each) for shard in shards]
            return [replace(s, rows=own, cols=(0, self.width)) for s, own in zip(shards, rows, strict=True)]
        return [replace(shard, rows=(0, 1), cols=(0, 1)) for shard in shards]

    def size(self, num_rows: int, num_cols: int) -> tuple[int, int]:
        """Shape of the whole matrix of a table ``[num_rows, num_cols]``."""
        rows = num_rows * self.ratio[0] // self.ratio[1]
        return {"element": (num_rows, num_cols), "row": (rows, self.width), "table": (1, 1)}[self.extent]

    def bytes_of(self, shard: Shard) -> int:
        """Bytes per shard."""
        rows, cols = self.size(shard.num_rows, shard.num_cols)
        return rows * cols * self.dtype.itemsize


# This rank's shards of one table: parameters, and their form in a state dict.


_INIT_ROWS = 8192


class StateEntries(nn.Module):
    """The entries of a state dict that are parts of a table.

    Args:
        entries: name in the state dict -> part.
        shards: the table. Default: this module.
    """

    def __init__(self, entries: Mapping[str, TableTensor], shards: "ShardedTable | None" = None) -> None:
        super().__init__()
        self.entries = dict(entries)
        self._others = () if shards is None else (shards,)  # in a tuple it is no submodule
        self._state_names = SimpleNamespace(**dict.fromkeys(entries, "a name in state dicts"))

    @property
    def of(self) -> "ShardedTable":
        """The table."""
        return self._others[0] if self._others else cast("ShardedTable", self)

    def _fqn_modifiers(self) -> dict[str, str]:
        """torch's checkpoint functions look up each name of a state dict; a rank may store no or several shards."""
        return dict.fromkeys(self.entries, "_state_names")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if getattr(self.of.config, "tiers", ()) and not are_tiers_apart():
            raise ValueError(
                f"table {self.of.config.name!r} has tiers, whose rows are not in its shards. Fix: save_checkpoint and "
                f"load_checkpoint, or dmp.dump and dmp.load, which have them"
            )
        for name, part in self.entries.items():
            destination[prefix + name] = self.of.state(part)

    @torch.no_grad()
    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        table, (_, strict, missing_keys, _, error_msgs) = self.of, arguments
        for name, part in self.entries.items():
            key, problem = prefix + name, None
            if key in state_dict:
                problem = table._copy_from(state_dict[key], part)
            elif strict:
                missing_keys.append(key)
            if problem is not None:
                error_msgs.append(problem)
            copies = [] if table.is_whole else table.replica_moves(part)
            ready = key in state_dict and problem is None
            if copies and all(gathered(table.env, lambda ready=ready: ready)):  # type: ignore[misc]
                move(copies, table.env, table.device)


class ShardedTable(StateEntries):
    """This rank's shards of one table.

    If only some rows are replicated, a state dict contains each replica once, from the first rank that stores it.
    Loading a state dict copies it to the other replicas, so all ranks must load together.

    A single shard is the parameter ``weight``; several are ``weight_0``, ``weight_1``, ... If this rank stores no
    shard, ``weight`` is an empty parameter ``[0]``: every rank has a parameter of every table. In state dicts the
    table is always ``weight``: torch's sharded tensor, or a plain tensor for a replicated table or a single process.
    State dicts also have the index of a dynamic table, because rows without it belong to no id.

    Args:
        config: the table.
        sharding: its shards on all ranks.
        weights: position of a shard -> weights ``[rows, cols]``, for the shards on this rank.
        states: position -> optimizer state.
        env: the ranks.
        state_parts: the optimizer states of every shard, also if this rank stores no shard.
        device: the rank's device, for messages. Default: the device of the weights.
        form: the form of the table in state dicts that request none.
        index_parts: the tensors of a dynamic table's index.
        kernels: position -> the kernel that has weights and states, and the number of the shard there. `local_weights`
            and `states` bring those of cached shards up to date, but not parameters that you have read before. Shards
            of dynamic tables get new memory when they grow.
        sizes: table that grows -> buckets of each partition, which this module changes.

    The shards of a dynamic table that grows have rows that ids have had so far: ``sharding`` and ``config`` are those
    of `sized`, as of the last `ShardedCollection.level_tables`.
    """

    def __init__(
        self,
        config: BaseEmbeddingConfig,
        sharding: ParameterSharding,
        weights: Mapping[int, Tensor],
        states: Mapping[int, dict[str, Tensor]],
        env: ShardingEnv,
        state_parts: Sequence[TableTensor] = (),
        device: torch.device | None = None,
        form: StateForm = "sharded_tensor",
        index_parts: Sequence[TableTensor] = (),
        kernels: Mapping[int, tuple[LookupKernel, int]] = MappingProxyType({}),
        sizes: dict[str, int] | None = None,
    ) -> None:
        own = () if isinstance(config, ManagedEmbeddingConfig) else index_parts  # `OwnerEntries` has them
        super().__init__({part.name: part for part in (_weight_part(config), *own)})
        self.form = form
        self.device = device or next((weight.device for weight in weights.values()), torch.device("cpu"))
        self.config, self.sharding, self.env = config, sharding, env
        self.state_parts, self.index_parts = tuple(state_parts), tuple(index_parts)
        self._weights, self._states = dict(weights), dict(states)
        self._kernels, self._sizes = dict(kernels), {} if sizes is None else sizes
        self._read(self._kernels)
        for number, weight in enumerate(self._weights.values()):
            name = "weight" if len(self._weights) == 1 else f"weight_{number}"
            self.register_parameter(name, nn.Parameter(weight, requires_grad=weight.is_floating_point()))
        if not self._weights:
            empty = torch.empty(0, dtype=table_dtype(config), device=self.device)
            self.register_parameter("weight", nn.Parameter(empty, requires_grad=empty.is_floating_point()))
        self._mark()

    def local_parameters(self) -> dict[int, nn.Parameter]:
        """Position of a shard -> its parameter, for the shards on this rank."""
        return dict(zip(self._weights, self.parameters(), strict=False))  # without the empty one

    @property
    def is_frozen(self) -> bool:
        """Whether a parameter of this table has ``requires_grad=False``: forwards that record gradients refuse it."""
        return not all(parameter.requires_grad for parameter in self.parameters())

    @property
    def local_weights(self) -> dict[int, Tensor]:
        """Position of a shard -> its weights ``[rows, cols]``, for the shards on this rank."""
        self.flush()
        return self._weights

    @property
    def states(self) -> dict[int, dict[str, Tensor]]:
        """Position of a shard -> its optimizer states, for the shards on this rank."""
        self.flush()
        return self._states

    def flush(self) -> None:
        """Brings weights and states of cached and dynamic shards up to date."""
        for kernel, number in self._kernels.values():
            kernel.flush(number)
        dynamic = self.dynamic
        self._read(dynamic)
        for position in dynamic:
            parameter, weight = self.local_parameters()[position], self._weights[position]
            if parameter.data_ptr() != weight.data_ptr():
                parameter.data = weight

    def _read(self, positions: Iterable[int]) -> None:
        for position in positions:
            kernel, number = self._kernels[position]
            self._weights[position] = kernel.weights()[number]
            self._states[position] = kernel.index_tensors()[number] | kernel.optimizer_states()[number]

    @property
    def dynamic(self) -> dict[int, tuple[DynamicKernel, int]]:
        """Position of a shard of a dynamic table on this rank -> its kernel, and the number of the shard there."""
        return {n: (own, slot) for n, (own, slot) in self._kernels.items() if isinstance(own, DynamicKernel)}

    def shards(self) -> Iterator[tuple[Shard, Tensor]]:
        """(shard, weights) of the shards on this rank."""
        for position, weight in self.local_weights.items():
            yield self.sharding.shards[position], weight

    def optimizer_tensors(self) -> list[Tensor]:
        """The fused optimizer's states on this rank, for measured memory."""
        return [tensor for state in self.states.values() for tensor in state.values()]

    @property
    def size(self) -> tuple[int, int]:
        """``(E, D)``."""
        return self.config.num_embeddings, self.config.embedding_dim

    def model_parts(self) -> list[TableTensor]:
        """The weights, and the index of a dynamic table: what a state dict of the model has."""
        return [_weight_part(self.config), *self.index_parts]

    def parts(self) -> list[TableTensor]:
        """The weights, the index and every optimizer state."""
        return [*self.model_parts(), *self.state_parts]

    def matrices(self, part: TableTensor) -> dict[int, Tensor]:
        """Position of a shard -> its matrix of a part, for the shards on this rank."""
        if part.name == "weight":
            return self.local_weights
        return {position: part.matrix(state[part.name]) for position, state in self.states.items()}

    @property
    def is_whole(self) -> bool:
        """Whether this rank stores the whole table: it is replicated, or this is the only rank."""
        return self.sharding.replicated or self.env.pg is None

    def tiles(self, part: TableTensor, matrices: Mapping[int, Tensor] | None = None) -> Tiles:
        """A part over all ranks. ``matrices``: this rank's tensors of it. Default: `matrices`."""
        tensors = self.matrices(part) if matrices is None else matrices
        return Tiles(part.dtype, part.shards(self.sharding.shards), tensors)

    def replica_moves(self, part: TableTensor, matrices: Mapping[int, Tensor] | None = None) -> list[Move]:
        """Copies each primary shard to its replicas, also if every rank stores the whole table. Empty without replicas.

        Args:
            part: the part to copy.
            matrices: this rank's tensors of the part. Default: `matrices`.
        """
        return self.tiles(part, matrices).replicas(part.extent)

    def whole_on(self, rank: int) -> Shard:
        """The whole table as one shard on a rank."""
        return Shard(rank, (0, self.size[0]), (0, self.size[1]))

    def gather_move(self, part: TableTensor, ranks: Sequence[int], device: torch.device) -> tuple[Move, Tensor | None]:
        """Gathers a part of the whole table on ``ranks``: the move, and the tensor that it fills on this rank.

        Args:
            part: the part. For the weights, the tensor is ``[E, D]``.
            ranks: the ranks that receive it. All others receive None.
            device: device of the tensor.
        """
        everywhere = part.shards([self.whole_on(rank) for rank in ranks])
        if self.env.rank not in ranks:
            return Move(self.tiles(part), Tiles(part.dtype, everywhere, {})), None
        whole = torch.empty(part.size(*self.size), dtype=part.dtype, device=device)
        gathering = Tiles(part.dtype, everywhere, {ranks.index(self.env.rank): whole})
        return Move(self.tiles(part), gathering), whole if part.is_matrix else whole.view(-1)

    def scatter_move(self, part: TableTensor, whole: Tensor | None, rank: int) -> Move:
        """Fills the shards of a part from its whole matrix on one rank. Other ranks' matrices are not read."""
        held = {0: whole} if whole is not None and self.env.rank == rank else {}
        return Move(Tiles(part.dtype, part.shards([self.whole_on(rank)]), held), self.tiles(part))

    def keep(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replaces this module's parameter objects with these, which then share its weights."""
        for (name, current), parameter in zip(list(self._parameters.items()), parameters, strict=True):
            assert current is not None
            parameter.grad = None
            parameter.data = current.data
            self._parameters[name] = parameter
        self._mark()

    def _mark(self) -> None:
        """Marks the parameters that backward steps, for `in_backward_optimizer_filter`."""
        for parameter in self.parameters():
            if self.sharding.compute_kernel != "dense":
                parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]
            elif hasattr(parameter, "_in_backward_optimizers"):
                del parameter._in_backward_optimizers

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Leaves the parameters where they are: they are the memory of kernels. Shards in host memory stay there.

        Raises:
            ValueError: ``.half()``, ``.to(device)`` and the like would change the format or the rank's device.
        """
        probe = torch.empty(0, dtype=table_dtype(self.config), device=self.device)  # on ranks without a shard, too
        for weight in (probe, *self.local_weights.values()):
            if weight is not probe and fn(weight.new_empty(0)).device != weight.device:
                continue  # a shard in host memory
            moved = fn(weight)
            if (moved.dtype, moved.device, moved.data_ptr()) != (weight.dtype, weight.device, weight.data_ptr()):
                raise ValueError(
                    f"table {self.config.name!r} cannot become {moved.dtype} on {moved.device}: its kernel stores it "
                    f"as {probe.dtype} on {self.device}. Fix: convert the dense modules alone, or build the model with "
                    f"that device, and the tables with that data_type"
                )
        return self

    def release(self) -> None:
        """Frees the memory of the parameters, even if they have other references."""
        for parameter in self.parameters():
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)
        self._weights, self._states, self._kernels = {}, {}, {}

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draws the initial weights of this rank's shards, with the same values under every plan.

        GPUs draw their own, other values than CPUs: 16 GB take seconds on one core. A table with ``init_fn`` calls it
        with each shard.
        """
        device = self.device if self.device.type == "cuda" else torch.device("cpu")
        low, high = self.config.get_weight_init_min(), self.config.get_weight_init_max()
        for shard, weight in self.shards():
            if self.config.init_fn is not None:
                self.config.init_fn(weight)
                continue
            for block in range(shard.rows[0] // _INIT_ROWS, -(-shard.rows[1] // _INIT_ROWS)):
                digest = blake2b(f"{seed}/{self.config.name}/{block}".encode(), digest_size=7).digest()
                generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
                start, end = (min(max(row - block * _INIT_ROWS, 0), _INIT_ROWS) for row in shard.rows)
                # a CPU draws the needed rows alone; on a GPU, values depend on how many are drawn
                drawn = _INIT_ROWS if device.type == "cuda" else end
                rows = torch.empty(drawn, self.config.embedding_dim, device=device)
                rows.uniform_(low, high, generator=generator)
                at = block * _INIT_ROWS + start - shard.rows[0]
                weight[at : at + end - start] = rows[start:end, slice(*shard.cols)]

    def state(self, part: TableTensor) -> Any:
        """The weights or an optimizer state of the whole table, as in state dicts, in the requested form.

        It shares memory with the kernels if possible.

        Returns:
            torch's sharded tensor or DTensor ``[E, D]`` (or ``[E]`` or ``[1]``, see `TableTensor`). A plain tensor for
            a replicated table and for a single process; a copy if a process stores several shards of it.

        Raises:
            ValueError: a DTensor cannot describe the shards.
        """
        tiles, size = self.tiles(part), part.size(*self.size)
        self._check_level()
        if self.is_whole:
            whole = next(iter(tiles.tensors.values())) if len(tiles.tensors) == 1 else tiles.whole(size)
            return whole if part.is_matrix else whole.view(-1)
        primary = tiles.primary(part.extent)
        if form_of(self.form) == "sharded_tensor":
            return sharded_tensor(primary, size, self.env, part.is_matrix)
        weights = [shard for _, shard in primary_rows(self.sharding.shards, "element")]
        check_placements(self.config.name, self.sharding.sharding_type, weights, self.device)
        return dtensor(primary, size, self.env, self.device, part.is_matrix)

    # ---- growth ----

    @property
    def buckets(self) -> int | None:
        """Buckets of each partition of a table that grows, as the ranks last agreed. None for others."""
        return self._sizes.get(self.config.name)

    @property
    def max_buckets(self) -> int:
        """The most buckets of a partition of a dynamic table."""
        return cast(DynamicEmbeddingConfig, self.config).max_buckets

    @property
    def largest(self) -> int:
        """The most buckets of a partition of the shards on this rank."""
        return max([self._sizes[self.config.name], *(own.tables[n].index.buckets for own, n in self.dynamic.values())])

    def rows_of(self, buckets: int) -> int:
        """Rows of the table with so many buckets of each partition."""
        return buckets * SLOTS * cast(DynamicEmbeddingConfig, self.config).partitions

    def buckets_for(self, rows: int) -> int | None:
        """Buckets of each partition of a table with so many rows. None if it does not grow or cannot have them."""
        if self.buckets is None:
            return None
        buckets, rest = divmod(rows, self.rows_of(1))
        return buckets if not rest and 1 <= buckets <= self.max_buckets else None

    def resize(self, buckets: int) -> None:
        """Replaces the config and the shards by those with so many buckets, see `sized`. Alike on all ranks."""
        self._sizes[self.config.name] = buckets
        self.config, self.sharding = sized(self.config, self.sharding, buckets)
        self.index_parts = tuple(
            part if part.ratio == (1, 1) else replace(part, ratio=(part.ratio[0], buckets)) for part in self.index_parts
        )
        self.entries |= {part.name: part for part in self.index_parts}

    def grow(self) -> None:
        """Grows the shards on this rank to `buckets`. Every id keeps its row."""
        for kernel, number in self.dynamic.values():
            kernel.tables[number].grow(self._sizes[self.config.name])

    def clear(self, buckets: int) -> None:
        """Empties the table, in memory for so many buckets of each partition. Alike on all ranks."""
        self.resize(buckets)
        for kernel, number in self.dynamic.values():
            kernel.tables[number].clear(buckets)

    def _check_level(self) -> None:
        """Raises RuntimeError if this rank's shards have grown since the ranks agreed on their size."""
        for position, weight in self._weights.items():
            rows = self.sharding.shards[position].num_rows
            if len(weight) != rows:
                raise RuntimeError(
                    f"table {self.config.name!r} has a shard of {len(weight):,} rows here, and of {rows:,} when the "
                    f"ranks last agreed on its size. Fix: call state_dict() on all ranks instead, which agrees anew"
                )

    def _copy_from(self, value: Any, part: TableTensor) -> str | None:
        """Fills this rank's primary shards of a part from a tensor in any form. Returns an error text or None.

        Gives a table that grows the size of the tensor first.
        """
        axes, (size, _) = 2 if part.is_matrix else 1, shape_of(value)
        if part.follows_rows and size and size[0] != self.size[0] and size[1:] == part.size(*self.size)[1 : len(size)]:
            buckets = self.buckets_for(size[0])
            if buckets is not None:
                self.clear(buckets)
        expected = part.size(*self.size)[:axes]
        if size != expected:
            if part.name == "weight":
                return f"table {self.config.name!r} is {self.size[0]} x {self.size[1]}, the state has {size}"
            return f"{part.name!r} of table {self.config.name!r} is {expected}, the state has {size}"
        saved, tiles = local_shards(value), self.tiles(part)
        if saved is None:
            for position, matrix in tiles.tensors.items():
                matrix.copy_(region(part.matrix(value), tiles.shards[position]))
            return None
        primary = tiles.primary(part.extent)
        local: dict[tuple[int, ...], Tensor] = {
            (primary.shards[n].rows[0], primary.shards[n].cols[0])[:axes]: tensor if part.is_matrix else tensor.view(-1)
            for n, tensor in primary.tensors.items()
        }
        if {offsets: tensor.shape for offsets, tensor in saved} != {at: weight.shape for at, weight in local.items()}:
            return (
                f"table {self.config.name!r}: the state has another sharding. Fix: load it with "
                f"torch.distributed.checkpoint, which reshards"
            )
        for offsets, tensor in saved:
            if tensor.data_ptr() != local[offsets].data_ptr():
                local[offsets].copy_(tensor)
        return None


def sized(
    config: BaseEmbeddingConfig, sharding: ParameterSharding, buckets: int | None
) -> tuple[BaseEmbeddingConfig, ParameterSharding]:
    """A table whose partitions have this many buckets each, and its shards. None for a table that does not grow.

    >>> from recshard_lab.sharding import row_wise
    >>> from recshard_lab.embedding import DynamicEmbeddingConfig
    >>> user = DynamicEmbeddingConfig("user", 4, capacity=1024, max_capacity=8192)
    >>> halves = ParameterSharding("row_wise", shards=[Shard(0, (0, 4096), (0, 4)), Shard(1, (4096, 8192), (0, 4))])
    >>> config, sharding = sized(user, halves, 2)
    >>> config.num_embeddings, sharding.shards[1].rows
    (2048, (1024, 2048))
    """
    if buckets is None or not isinstance(config, DynamicEmbeddingConfig):
        return config, sharding
    rows = buckets * SLOTS  # of a partition
    shards = [
        replace(shard, rows=(shard.rows[0] // config.row_unit * rows, shard.rows[1] // config.row_unit * rows))
        for shard in sharding.shards
    ]
    return config.changed(num_embeddings=config.partitions * rows), replace(sharding, shards=tuple(shards))


def _weight_part(table: BaseEmbeddingConfig) -> TableTensor:
    return TableTensor("weight", "element", table_dtype(table))


def table_dtype(table: BaseEmbeddingConfig) -> torch.dtype:
    """The dtype of a table's weights; that of bytes for packed rows."""
    return TORCH_DTYPES.get(table.data_type, torch.uint8)
