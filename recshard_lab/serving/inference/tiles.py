"""One collection whose tiles are on several devices of this process.

::

    batch   ->  each device selects the ids of its tiles  ->  one lookup a device and number format  ->  output device
                rows of other tiles are left out              rows [B, columns of its tiles]             sums, joins

Each tile stores one row more than its shard: zeros. In sequences, an id of another tile reads it, so that the rows of
all tiles add up to the output.

Shape letters: B batch, D columns, L tile features of a group, N ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.distributed.sharded_collections import blocks_of
from recshard_lab.embedding import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)
from recshard_lab.embedding.inputs import OutOfRange, check_weights, fit_features, put_back
from recshard_lab.embedding.kernels import KernelInput, KernelSpec, LookupKernel, ShardSpec, choose_kernel
from recshard_lab.embedding.quantized.kernels import PackedKernel
from recshard_lab.serving.inference.capture import at_fixed_shapes
from recshard_lab.serving.inference.devices import Device
from recshard_lab.serving.inference.packed import Chunks, fill_shards
from recshard_lab.serving.inference.sources import Source
from recshard_lab.sharding import ParameterSharding, Shard
from recshard_lab.sharding.plan.types import DDR
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from recshard_lab.sparse.ops import complete_cumsum, gather_segments


@dataclass(frozen=True)
class Tile:
    """One shard, on a device of this process. ``table`` is the position of its table."""

    table: int
    shard: Shard


@dataclass(frozen=True)
class Batch:
    """The bags that every device reads.

    Attributes:
        values: ids ``[N]``, segment by segment.
        lengths: ``[segments, B]``.
        weights: ``[N]`` or None.
        segment: for each block, the segment of its feature.
        counts: ids of each segment.
    """

    values: Tensor
    lengths: Tensor
    weights: Tensor | None
    segment: list[int]
    counts: list[int]


class TileGroup:
    """The tiles of one number format on one device, in one kernel.

    Args:
        device: runs the lookups.
        place: where the rows are stored: the device, or the host for shards of tier "ddr".
        tables: the tables.
        tiles: the shards.
        blocks: for each block its table.
        pooled, weighted: of the collection.
        packed: whether rows are stored as `QuantEmbeddingBagCollection` stores them.
    """

    def __init__(
        self,
        device: Device,
        place: torch.device,
        tables: Sequence[BaseEmbeddingConfig],
        tiles: Sequence[Tile],
        blocks: Sequence[int],
        *,
        pooled: bool,
        weighted: bool,
        packed: bool,
    ) -> None:
        self.device, self.place, self.tiles, self.pooled = device, place, list(tiles), pooled
        #: (block, tile) of each tile feature, in the order of the kernel's columns
        self.features = [
            (j, n) for j, table in enumerate(blocks) for n, tile in enumerate(tiles) if tile.table == table
        ]
        self.columns = list(accumulate((tiles[n].shard.num_cols for _, n in self.features), initial=0))
        specs = []
        for tile in tiles:
            config, shard = tables[tile.table], tile.shard
            name, rows = config.name, shard.num_rows + 1
            specs.append(ShardSpec(name, rows, shard.num_cols, config.data_type, config.embedding_dim, shard.rows[0]))
        spec = KernelSpec(specs, [n for _, n in self.features], None, pooled, place, weighted)
        self.kernel: LookupKernel = choose_kernel(spec, PackedKernel.name if packed else None)(spec)
        shards = [tiles[n].shard for _, n in self.features]
        #: whether some ids have their rows in another tile
        self.split = any(tile.shard.num_rows < tables[tile.table].num_embeddings for tile in tiles)
        self.first = torch.tensor([shard.rows[0] for shard in shards], device=place)
        self.size = torch.tensor([shard.num_rows for shard in shards], device=place)
        self._constants: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor, Tensor]] = {}  # at fixed shapes
        device.table_bytes += self.table_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(weight.numel() * weight.element_size() for weight in self.kernel.weights())

    def stored(self, table: int) -> list[tuple[Shard, Tensor]]:
        """The tiles of a table, each with its rows to fill. The row after them stays zero."""
        pairs = zip(self.tiles, self.kernel.weights(), strict=True)
        return [(tile.shard, weight[: tile.shard.num_rows]) for tile, weight in pairs if tile.table == table]

    def look_up(self, batch: Batch, fixed: bool) -> Tensor:
        """Pooled: ``[B, columns]``. Not pooled: flat, the ``[n, d]`` rows of each tile feature one after the other.

        Args:
            fixed: shapes may depend on ``batch.counts`` only, and the host does not wait after the first such call.
        """
        if fixed:
            values, offsets, weights, own = self._at_fixed_shapes(batch)
            return self.kernel.forward(KernelInput(values, offsets, weights, own), False)[0]
        segments = torch.tensor([batch.segment[j] for j, _ in self.features])
        counts = [batch.counts[number] for number in segments.tolist()]
        samples, total = batch.lengths.shape[1], sum(counts)
        values, lengths, weights = self._selected(batch, segments, total)
        starts = list(accumulate(counts, initial=0))
        offsets = complete_cumsum(lengths.reshape(-1)) if self.pooled else torch.tensor(starts, device=self.place)
        if self.split:
            local, inside = self._local(values, torch.tensor(counts, device=self.place), total)
            if self.pooled:
                ends = complete_cumsum(inside)
                offsets, values = ends[offsets], local[inside]
                weights = None if weights is None else weights[inside]
                starts = offsets[:: max(1, samples)].tolist() if samples else starts
            else:
                values = local
        self.device.input_bytes += sum(
            own.numel() * own.element_size() for own in (values, offsets, weights) if own is not None
        )
        if self.pooled and not samples:
            rows = torch.zeros(0, self.columns[-1], device=self.place)
        else:
            own = [b - a for a, b in pairwise(starts)]
            rows, _ = self.kernel.forward(KernelInput(values, offsets, weights, own), False)
        self.device.output_bytes += rows.numel() * rows.element_size()
        return rows

    def _selected(self, batch: Batch, segments: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values, lengths ``[L, B]`` and weights of each tile feature."""
        values, lengths = batch.values.to(self.place), batch.lengths.to(self.place)
        weights = None if batch.weights is None else batch.weights.to(self.place)
        if segments.numel() == lengths.shape[0] and bool((segments == torch.arange(segments.numel())).all()):
            return values, lengths, weights
        samples, segments = lengths.shape[1], segments.to(self.place)
        order = (segments[:, None] * samples + torch.arange(samples, device=self.place)).reshape(-1)
        flat, own, of_ids = gather_segments(values, lengths.reshape(-1), order, weights, output_size=total)
        return flat, own.view(segments.numel(), samples), of_ids

    def _at_fixed_shapes(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None, list[int]]:
        """Rows in the tiles, offsets, weights, and how many ids each tile feature has.

        Ids of other tiles read the row of zeros.
        """
        segments = [batch.segment[j] for j, _ in self.features]
        counts = [batch.counts[number] for number in segments]
        key = (*segments, -1, *counts)
        if key not in self._constants:
            device, sizes = self.place, torch.tensor(counts)
            shards = [self.tiles[n].shard for _, n in self.features]
            self._constants[key] = (
                torch.tensor(segments, device=device),
                torch.tensor([0, *accumulate(counts)], device=device),
                torch.tensor([shard.rows[0] for shard in shards]).repeat_interleave(sizes).to(device),
                torch.tensor([shard.num_rows for shard in shards]).repeat_interleave(sizes).to(device),
            )
        chosen, starts, first, size = self._constants[key]
        ends = list(accumulate(batch.counts, initial=0))
        parts = [(ends[number], ends[number + 1]) for number in segments]
        values = torch.cat([batch.values[a:b] for a, b in parts])
        weights = None if batch.weights is None else torch.cat([batch.weights[a:b] for a, b in parts])
        values, _ = zeros_elsewhere(values - first, size)
        lengths = batch.lengths.index_select(0, chosen).reshape(-1)
        return values, complete_cumsum(lengths) if self.pooled else starts, weights, counts

    def _local(self, ids: Tensor, counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Row of each id in its tile, or its row of zeros; and whether the tile has it."""
        first = self.first.repeat_interleave(counts, output_size=total)
        size = self.size.repeat_interleave(counts, output_size=total)
        return zeros_elsewhere(ids - first, size)


def zeros_elsewhere(local: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a tile, with the row of zeros (number ``size``) for ids of other tiles; and which ids are in the tile.

    >>> zeros_elsewhere(torch.tensor([-3, 1, 4]), torch.tensor([4, 4, 4]))
    (tensor([4, 1, 4]), tensor([False,  True, False]))
    """
    inside = (local >= 0) & (local < size)
    return torch.where(inside, local, size), inside


Term = tuple[int, int, int, int]
"""Columns ``[start, end)`` of one tile feature: group, tile feature, start, end."""


class DeviceTiles(nn.Module):
    """One collection over devices of this process. It computes what the unsharded collection computes.

    Args:
        tables: the tables.
        shardings: table -> its shards; rank k is ``devices[k]``.
        devices: run the lookups.
        output: device of the outputs.
        source: the rows, or table -> its packed rows by chunk.
        weighted, out_of_range, need_indices: of the collection.
    """

    pooled: bool

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        shardings: Mapping[str, ParameterSharding],
        devices: Sequence[Device],
        output: torch.device,
        source: Source | Callable[[BaseEmbeddingConfig], Chunks],
        *,
        weighted: bool,
        out_of_range: str,
        need_indices: bool,
    ) -> None:
        super().__init__()
        self.tables, self.devices, self.output = list(tables), list(devices), output
        self.weighted, self._need_indices = weighted, need_indices
        self._policy = OutOfRange(out_of_range)
        self.blocks = blocks_of(tables)
        self.means = [number for number, block in enumerate(self.blocks) if block.mean]
        self.groups = self._grouped(shardings, not isinstance(source, Source))
        for number, table in enumerate(self.tables):
            targets = [target for group in self.groups for target in group.stored(number)]
            if isinstance(source, Source):
                source.fill(table.name, [(shard.rect, rows) for shard, rows in targets])
            else:
                fill_shards(source(table), table.data_type, targets)
        self.terms = [self._terms_of(number) for number in range(len(self.blocks))]
        self.ranges = self._adjacent()

    def _grouped(self, shardings: Mapping[str, ParameterSharding], packed: bool) -> list[TileGroup]:
        """The groups. Of replicas one is kept: that of the output device, where there is one."""
        found: dict[tuple[int, str, DataType], list[Tile]] = {}
        for number, table in enumerate(self.tables):
            sharding = shardings[table.name]
            kept: dict[Any, Shard] = {}
            for shard, copied in zip(sharding.shards, sharding.replica_flags, strict=True):
                key = (shard.rect, None if copied else shard.rank)
                if key not in kept or self.devices[kept[key].rank].device != self.output:
                    kept[key] = shard
            for shard in kept.values():
                place = "cpu" if shard.tier == DDR else str(self.devices[shard.rank].device)
                found.setdefault((shard.rank, place, table.data_type), []).append(Tile(number, shard))
        return [
            TileGroup(
                self.devices[rank],
                torch.device(place),
                self.tables,
                tiles,
                [block.table for block in self.blocks],
                pooled=self.pooled,
                weighted=self.weighted,
                packed=packed,
            )
            for (rank, place, _), tiles in found.items()
        ]

    def _terms_of(self, block: int) -> list[list[Term]]:
        """For each range of a block's columns, from left to right, what adds up to it."""
        places = [
            (group.tiles[tile].shard, number, at)
            for number, group in enumerate(self.groups)
            for at, (own, tile) in enumerate(group.features)
            if own == block
        ]
        edges = sorted({edge for shard, _, _ in places for edge in shard.cols})
        return [
            [
                (number, at, left - shard.cols[0], right - shard.cols[0])
                for shard, number, at in places
                if shard.cols[0] <= left and right <= shard.cols[1]
            ]
            for left, right in pairwise(edges)
        ]

    def _adjacent(self) -> list[list[tuple[int, int, int]]]:
        """For each range of output columns its (group, start, end). What one group has side by side is one range."""
        ranges: list[list[tuple[int, int, int]]] = []
        for terms in (terms for own in self.terms for terms in own):
            found = []
            for number, at, left, right in terms:
                column = self.groups[number].columns[at]
                found.append((number, column + left, column + right))
            last = ranges[-1] if ranges else []
            if len(found) == len(last) == 1 and found[0][:2] == (last[0][0], last[0][2]):
                ranges[-1] = [(last[0][0], last[0][1], found[0][2])]
            else:
                ranges.append(found)
        return ranges

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Looks up one batch.

        Args:
            features: has every feature of the tables, with one bag for each sample.

        Returns:
            What the unsharded collection returns, on the output device.

        Raises:
            ValueError: as the unsharded collection, or a variable batch.
        """
        fixed = at_fixed_shapes()
        batch, kept = self._read(features, checked=fixed)
        for device in self.devices:
            device.input_bytes = device.output_bytes = 0
        if fixed and self.output.type != "cpu":  # on one stream of one device, see `capture`
            rows = [group.look_up(batch, fixed) for group in self.groups]
        else:
            waits = [group.device.start(partial(group.look_up, batch, fixed)) for group in self.groups]
            rows = [wait().to(self.output) for wait in waits]
        return self._output(rows, features, batch, kept)

    def _output(self, rows: list[Tensor], features: KeyedJaggedTensor, batch: Batch, kept: list[Tensor | None]) -> Any:
        raise NotImplementedError

    def accepts(self, features: KeyedJaggedTensor) -> bool:
        """Whether no id of a batch must be clamped or ignored.

        Raises:
            ValueError: as the unsharded collection.
        """
        if self._within(features):
            return True
        self._read(features)  # raises, under the policy "error"
        return False

    def _read(self, features: KeyedJaggedTensor, checked: bool = False) -> tuple[Batch, list[Tensor | None]]:
        """The bags of a batch, whose ids are rows, and for each block the positions of ids that were not dropped."""
        if isinstance(features, KeyedJaggedTensor) and features.variable_stride_per_key():
            raise ValueError(
                "the batch has another number of bags for each feature (stride_per_key_per_rank), which sharded "
                "inference does not support. Fix: send one bag a sample"
            )
        if not isinstance(features, KeyedJaggedTensor) or not (checked or self._within(features)):
            fitted = fit_features(features, self.tables, self._policy)  # raises, clamps or drops
            bags, kept = [own for _, own, _ in fitted], [own for *_, own in fitted]
            weights = None
            if self.weighted:
                weights = torch.cat([check_weights(bag.weights_or_none(), features.keys()) for bag in bags])
            values, lengths = torch.cat([bag.values() for bag in bags]), torch.stack([bag.lengths() for bag in bags])
            counts = [bag.values().numel() for bag in bags]
            return Batch(values, lengths, weights, list(range(len(bags))), counts), kept
        keys = features.keys()
        weights = check_weights(features.weights_or_none(), keys) if self.weighted else None
        place = {key: number for number, key in enumerate(keys)}
        segment = [place[block.feature] for block in self.blocks]
        lengths = features.lengths().view(len(keys), features.stride())
        batch = Batch(features.values(), lengths, weights, segment, features.length_per_key())
        return batch, [None] * len(segment)

    def _within(self, features: KeyedJaggedTensor) -> bool:
        """Whether the batch has all features, and all ids are rows of all their tables. The host waits once."""
        values, limits = features.values(), dict.fromkeys(features.keys(), 2**63 - 1)
        if values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
            return False
        for block in self.blocks:
            if block.feature not in limits:
                return False
            limits[block.feature] = min(limits[block.feature], self.tables[block.table].num_embeddings)
        counts = torch.tensor(features.length_per_key(), device=values.device)
        limit = torch.tensor(list(limits.values()), device=values.device)
        limit = limit.repeat_interleave(counts, output_size=values.numel())
        return not bool(((values < 0) | (values >= limit)).any())


@EmbeddingBagCollectionInterface.register
class DeviceEmbeddingBagCollection(DeviceTiles):
    """An `EmbeddingBagCollection` over devices of this process."""

    pooled = True

    def embedding_bag_configs(self) -> list[BaseEmbeddingConfig]:
        """The tables, in order."""
        return self.tables

    def is_weighted(self) -> bool:
        """Whether batches must carry weights."""
        return self.weighted

    def _output(
        self, rows: list[Tensor], features: KeyedJaggedTensor, batch: Batch, kept: list[Tensor | None]
    ) -> KeyedTensor:
        place = features.index_per_key()
        lengths = features.lengths().view(len(place), -1) if features.stride() else None
        bags = [] if lengths is None else [lengths[place[self.blocks[number].feature]] for number in self.means]
        return self.joined(rows, [own.to(self.output) for own in bags])

    def joined(self, rows: Sequence[Tensor], mean_lengths: Sequence[Tensor]) -> KeyedTensor:
        """The output ``[B, sum of D]`` of the rows ``[B, columns]`` of each group.

        Args:
            mean_lengths: ``[B]`` for each block with mean pooling.
        """
        parts = []
        for terms in self.ranges:
            summands = [rows[number][:, start:end] for number, start, end in terms]
            parts.append(summands[0] if len(summands) == 1 else torch.stack(summands).sum(0))
        values = torch.cat(parts, 1)
        for number, lengths in zip(self.means, mean_lengths, strict=False):
            block = self.blocks[number]
            values[:, block.start : block.start + block.dim] /= lengths.clamp(min=1).unsqueeze(1)
        return KeyedTensor([block.key for block in self.blocks], [block.dim for block in self.blocks], values)


@EmbeddingCollectionInterface.register
class DeviceEmbeddingCollection(DeviceTiles):
    """An `EmbeddingCollection` over devices of this process."""

    pooled = False

    def embedding_configs(self) -> list[BaseEmbeddingConfig]:
        """The tables, in order."""
        return self.tables

    def need_indices(self) -> bool:
        """Whether outputs have their ids as weights."""
        return self._need_indices

    def _output(
        self, rows: list[Tensor], features: KeyedJaggedTensor, batch: Batch, kept: list[Tensor | None]
    ) -> dict[str, JaggedTensor]:
        flat = []
        for group, own in zip(self.groups, rows, strict=True):
            widths = [group.tiles[tile].shard.num_cols for _, tile in group.features]
            counts = [batch.counts[batch.segment[block]] for block, _ in group.features]
            sizes = [count * width for count, width in zip(counts, widths, strict=True)]
            parts = own.reshape(-1).split(sizes)
            flat.append([part.view(-1, width) for part, width in zip(parts, widths, strict=True)])
        found = {}
        for number, block in enumerate(self.blocks):
            columns = []
            for terms in self.terms[number]:
                summands = [flat[group][at][:, left:right] for group, at, left, right in terms]
                columns.append(summands[0] if len(summands) == 1 else torch.stack(summands).sum(0))
            bag = features[block.feature]
            positions = kept[number]
            moved = None if positions is None else positions.to(self.output)
            whole = put_back(torch.cat(columns, 1), moved, bag.values().numel())
            ids = bag.values().to(self.output) if self._need_indices else None
            found[block.key] = JaggedTensor(whole, weights=ids, lengths=bag.lengths().to(self.output))
        return found
