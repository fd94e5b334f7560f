"""What a rank holds of one table: parameters, and how they appear in a state dict."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Self

import torch
from torch import Tensor, nn

from recshard_lab.comm import ShardingEnv, gathered
from recshard_lab.distributed.state.moves import Move, move
from recshard_lab.distributed.state.parts import Part, owned
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.embedding.kernels import TORCH_DTYPES
from recshard_lab.optim import EmptyFusedOptimizer
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding, Shard
from recshard_lab.sharding.plan.types import DDR

_INIT_ROWS = 8192


class TableShards(nn.Module):
    """This rank's rectangles of one table.

    Where some rows are replicated and others are not, state dicts tell a replica once, by the first rank that holds it,
    and loading one tells the other replicas, so that all ranks must load together.

    A single rectangle is the parameter ``weight``; several are ``weight_0``, ``weight_1``, ... In state dicts the table
    always has its ordinary name, ``weight``, and is one of torch's sharded tensors (a plain tensor when replicated or
    when there is no process group).

    Args:
        config: the table.
        sharding: all its rectangles, on all ranks.
        weights: position of a rectangle -> its weights ``[rows, cols]``, for those on this rank.
        states: position -> its optimizer state.
        env: the ranks.
        state_parts: which optimizer state every rectangle has, also where none lies on this rank.
        device: of the rank, by which messages go; that of the weights when left out.
    """

    def __init__(
        self,
        config: BaseEmbeddingConfig,
        sharding: ParameterSharding,
        weights: Mapping[int, Tensor],
        states: Mapping[int, dict[str, Tensor]],
        env: ShardingEnv,
        state_parts: Sequence[Part] = (),
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.device = device or next((weight.device for weight in weights.values()), torch.device("cpu"))
        self.config, self.sharding, self.env = config, sharding, env
        self.state_parts = tuple(state_parts)
        self.held = dict(weights)
        self.states = dict(states)
        for number, weight in enumerate(self.held.values()):
            name = "weight" if len(self.held) == 1 else f"weight_{number}"
            self.register_parameter(name, nn.Parameter(weight))
        self._mark()

    def shards(self) -> Iterator[tuple[Shard, Tensor]]:
        """(rectangle, weights) of those on this rank."""
        for position, weight in self.held.items():
            yield self.sharding.shards[position], weight

    @property
    def size(self) -> tuple[int, int]:
        """``(E, D)``."""
        return self.config.num_embeddings, self.config.embedding_dim

    def parts(self) -> list[Part]:
        """The weights and every optimizer state."""
        return [Part("weight", "element", whole_dtype(self.config)), *self.state_parts]

    def matrices(self, part: Part) -> dict[int, Tensor]:
        """Position of a rectangle -> its matrix of a part, for those on this rank."""
        if part.name == "weight":
            return self.held
        return {position: part.matrix(state[part.name]) for position, state in self.states.items()}

    @property
    def is_whole(self) -> bool:
        """Whether this rank alone can tell the whole table: every rank holds it, or there is no other."""
        return self.sharding.replicated or self.env.pg is None

    def spoken_for(
        self, part: Part, matrices: Mapping[int, Tensor] | None = None
    ) -> tuple[list[Shard], dict[int, Tensor]]:
        """A part without its copies, as state dicts tell it: every cell once, and those of them on this rank.

        Of several rectangles that hold the same numbers, which are replicas, and under column splits what has one
        number a row or a table, the first in the list speaks for all.
        """
        where = part.shards(self.sharding.shards)
        matrices = self.matrices(part) if matrices is None else matrices
        speakers, held = [], {}
        for number, (position, shard) in enumerate(owned(where, part.extent)):
            speakers.append(shard)
            if position in matrices:
                top = where[position].rows[0]
                held[number] = matrices[position][shard.rows[0] - top : shard.rows[1] - top]
        return speakers, held

    def told(self, part: Part, matrices: Mapping[int, Tensor] | None = None) -> Move | None:
        """What tells the other rectangles what those that speak for them hold; None where all speak for themselves.

        Args:
            part: what is told.
            matrices: where it lies on this rank; `matrices` of this part when left out.
        """
        where = part.shards(self.sharding.shards)
        matrices = self.matrices(part) if matrices is None else matrices
        speaking = {position: shard.rows for position, shard in owned(where, part.extent)}
        listening = [at for at, shard in enumerate(where) if speaking.get(at) != shard.rows]
        if self.is_whole or not listening:
            return None
        speakers, held = self.spoken_for(part, matrices)
        wanted = {number: matrices[at] for number, at in enumerate(listening) if at in matrices}
        return Move(part.dtype, speakers, [where[at] for at in listening], held, wanted)

    def from_first_replicas(self) -> Move | None:
        """What makes replicas as the first of them is; None where there are no others."""
        where, part = self.sharding.shards, self.parts()[0]
        first = {position for position, _ in owned(where, "element")}
        others = [at for at in range(len(where)) if at not in first]
        if not others:
            return None
        sources = {at: where[at] for at in sorted(first)}
        held = {number: self.held[at] for number, at in enumerate(sources) if at in self.held}
        wanted = {number: self.held[at] for number, at in enumerate(others) if at in self.held}
        return Move(part.dtype, list(sources.values()), [where[at] for at in others], held, wanted)

    def keep(self, parameters: Sequence[nn.Parameter]) -> None:
        """Goes on with these parameter objects, which now show this module's weights."""
        for (name, own), parameter in zip(list(self._parameters.items()), parameters, strict=True):
            assert own is not None
            parameter.grad = None
            parameter.data = own.data
            self._parameters[name] = parameter
        self._mark()

    def _mark(self) -> None:
        """Tells `in_backward_optimizer_filter` which parameters backward steps."""
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
        rank_probe = torch.empty(0, dtype=whole_dtype(self.config), device=self.device)
        moved = fn(rank_probe)  # the same on ranks without a shard
        if moved.dtype != rank_probe.dtype or moved.device != rank_probe.device:
            raise ValueError(self._immovable(moved))
        for weight in self.held.values():
            if fn(weight.new_empty(0)).device != weight.device:
                continue  # a shard in host memory
            moved = fn(weight)
            if moved.data_ptr() != weight.data_ptr():
                raise ValueError(self._immovable(moved))
        return self

    def _immovable(self, moved: Tensor) -> str:
        return (
            f"table {self.config.name!r} cannot become {moved.dtype} on {moved.device}: its kernel holds it as "
            f"{whole_dtype(self.config)} on {self.device}. Fix: convert the dense modules alone, or build the model "
            f"with that device, and the tables with that data_type"
        )

    def let_go(self) -> None:
        """Frees the memory behind the parameters, whoever else knows them, and forgets the rest."""
        for parameter in self.parameters():
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)
        self.held, self.states = {}, {}

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draws this rank's part of the initial weights, the same numbers under every plan.

        ``init_fn``, where the table has one, is called with each rectangle.
        """
        low, high = self.config.get_weight_init_min(), self.config.get_weight_init_max()
        for shard, weight in self.shards():
            if self.config.init_fn is not None:
                self.config.init_fn(weight)
                continue
            for block in range(shard.rows[0] // _INIT_ROWS, -(-shard.rows[1] // _INIT_ROWS)):
                digest = blake2b(f"{seed}/{self.config.name}/{block}".encode(), digest_size=7).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
                start, end = (min(max(row - block * _INIT_ROWS, 0), _INIT_ROWS) for row in shard.rows)
                # as far as needed: the numbers of a generator do not hang on how many are drawn
                rows = torch.empty(end, self.config.embedding_dim).uniform_(low, high, generator=generator)
                at = block * _INIT_ROWS + start - shard.rows[0]
                weight[at : at + end - start] = rows[start:, slice(*shard.cols)]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        part = self.parts()[0]
        if self.is_whole and len(self.held) == 1:
            destination[prefix + "weight"] = next(iter(self.held.values()))
        elif self.is_whole:
            destination[prefix + "weight"] = self.joined(part)
        else:
            shards, held = self.spoken_for(part)
            destination[prefix + "weight"] = sharded_tensor(shards, held, self.size, self.env, part.dtype)

    @torch.no_grad()
    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        problem = self._copy_from(state_dict[key]) if key in state_dict else None
        told = self.told(self.parts()[0])
        if told is not None and all(gathered(self.env, lambda: key in state_dict and problem is None)):
            move([told], self.env, self.device)
        if key not in state_dict and strict:
            missing_keys.append(key)
        if problem is not None:
            error_msgs.append(problem)

    def _copy_from(self, value: Any) -> str | None:
        """Fills this rank's shards from a tensor or a sharded one, duplicates excepted; says why if it cannot."""
        sharded = hasattr(value, "local_shards")
        found = tuple(value.metadata().size if sharded else value.shape)
        if found != self.size:
            return f"table {self.config.name!r} is {self.size[0]} x {self.size[1]}, the state has {found}"
        if not sharded:
            for shard, weight in self.shards():
                weight.copy_(value[slice(*shard.rows), slice(*shard.cols)])
            return None
        if self.told(self.parts()[0]) is not None and not self._lies_here(value):
            return self._elsewhere()
        arrived = {tuple(local.metadata.shard_offsets): local.tensor for local in value.local_shards()}
        speakers, held = self.spoken_for(self.parts()[0])
        for number, weight in held.items():
            shard = speakers[number]
            local = arrived.get((shard.rows[0], shard.cols[0]))
            if local is None or local.shape != weight.shape:
                return self._elsewhere()
            if local.data_ptr() != weight.data_ptr():
                weight.copy_(local)
        return None

    def _elsewhere(self) -> str:
        return (
            f"table {self.config.name!r}: the state lies under another plan; load it with "
            f"torch.distributed.checkpoint, which moves the rectangles"
        )

    def _lies_here(self, value: Any) -> bool:
        """Whether a sharded tensor lies as this table's state does, on every rank."""
        ranks = torch.distributed.get_process_group_ranks(self.env.pg)
        speakers, _ = self.spoken_for(self.parts()[0])
        own = {(ranks[s.rank], s.rows[0], s.cols[0], s.num_rows, s.num_cols) for s in speakers}
        return own == {(m.placement.rank(), *m.shard_offsets, *m.shard_sizes) for m in value.metadata().shards_metadata}

    def joined(self, part: Part) -> Tensor:
        """A part of the whole table as one matrix, where all rectangles are on this rank. A copy."""
        shards, matrices = part.shards(self.sharding.shards), self.matrices(part)
        whole = next(iter(matrices.values())).new_empty(part.size(*self.size))
        for position, matrix in matrices.items():
            whole[slice(*shards[position].rows), slice(*shards[position].cols)] = matrix
        return whole


def whole_dtype(table: BaseEmbeddingConfig) -> torch.dtype:
    """The number format of a table's weights."""
    return TORCH_DTYPES[table.data_type]


def sharded_tensor(
    shards: Sequence[Shard],
    held: Mapping[int, Tensor],
    size: tuple[int, int],
    env: ShardingEnv,
    dtype: torch.dtype,
    matrix: bool = True,
) -> Any:
    """torch's own ``ShardedTensor`` over these rectangles, sharing memory with ``held``.

    Args:
        shards: the rectangles, on all ranks.
        held: position -> matrix, for those on this rank.
        size: of the whole.
        env: the ranks.
        dtype: number format, also where nothing is held.
        matrix: two axes; False shows a single column as one axis.
    """
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

    kind = next((tensor.device.type for tensor in held.values() if tensor.device.type != "cpu"), "cpu")
    ranks = torch.distributed.get_process_group_ranks(env.pg)  # placements name ranks of the default group
    axes = 2 if matrix else 1
    metadata = []
    for position, shard in enumerate(shards):
        device = "cpu" if kind == "cpu" or shard.tier == DDR else f"{kind}:{shard.rank % env.local_world_size}"
        if position in held:  # a process may see one device of its node alone, as number 0
            device = str(held[position].device)
        metadata.append(
            ShardMetadata(
                shard_offsets=[shard.rows[0], shard.cols[0]][:axes],
                shard_sizes=[shard.num_rows, shard.num_cols][:axes],
                placement=f"rank:{ranks[shard.rank]}/{device}",
            )
        )
    local = [LocalShard(tensor if matrix else tensor.view(-1), metadata[position]) for position, tensor in held.items()]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local,
        ShardedTensorMetadata(
            shards_metadata=metadata,
            size=torch.Size(size[:axes]),
            tensor_properties=TensorProperties(dtype=dtype, requires_grad=False),
        ),
        process_group=env.pg,
    )
