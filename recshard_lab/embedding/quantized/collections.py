"""Collections of served tables: `EmbeddingBagCollection` and `EmbeddingCollection` with small rows. No gradients.

Shape letters: B batch, F features (of all tables, in the tables' order), N ids, E rows, R bytes of a row, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from recshard_lab.arguments import checks_arguments, device_named
from recshard_lab.embedding.collections import PooledTables, SequenceTables, TableCollection
from recshard_lab.embedding.configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from recshard_lab.embedding.inputs import (
    check_features,
    check_ids,
    check_weights,
    joined_samples,
    targets_of,
    to_most_bags,
)
from recshard_lab.embedding.quantized.formats import PackedTables, most_error, pack, row_alignment, served_type, unpack
from recshard_lab.embedding.quantized.kernels import PackedLookup
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

OUTPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHUNK_BYTES = 4 * 1024 * 1024  # of fp32 rows that are packed at a time

Types = torch.dtype | DataType | str | Mapping[str, torch.dtype | DataType | str]
"""A number format for all tables, or for each table by name."""


class QuantConfig(NamedTuple):
    """TorchRec's settings of a quantized module, read from its attribute ``qconfig``.

    Attributes:
        activation: a function that returns an object whose ``dtype`` is the output dtype.
        weight: the same for the dtype of the weights.
        per_table_weight_dtype: table name -> dtype, where it differs.
    """

    activation: Any
    weight: Any
    per_table_weight_dtype: dict[str, torch.dtype] | None = None


class QuantCollection(TableCollection):
    """The base of both collections: bytes of the tables, their lookup, the out-of-range policy."""

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        device: torch.device | str | None,
        output_dtype: torch.dtype,
        out_of_range: str,
        backend: str | None,
        **options: bool,
    ) -> None:
        super().__init__(tables, out_of_range, **options)
        if output_dtype not in OUTPUT_DTYPES:
            kinds = ", ".join(map(str, OUTPUT_DTYPES))
            raise ValueError(f"output_dtype {output_dtype!r:.80} is not supported. Fix: use one of {kinds}")
        for table in tables:
            if table.dynamic:
                raise ValueError(
                    f"table {table.name!r} is dynamic. Fix: quantize_embeddings(export_static(collection))"
                )
        self._output_dtype, self._backend = output_dtype, backend
        self._order: tuple[list[int], Tensor] | None = None  # of the last batch whose features were in another order
        self._outside: Tensor | None = None  # [F] out-of-range ids of each feature so far
        self._rows = [table.num_embeddings for table in tables for _ in table.feature_names]
        poolings = [getattr(table, "pooling", None) for table in tables for _ in table.feature_names]
        self._means = [self.pooled and pooling is PoolingType.MEAN for pooling in poolings]
        self._store(PackedTables(tables, device_named(device) or torch.device("cpu")))
        self.eval()

    # ---- bytes and their lookup ----

    def _store(self, packed: PackedTables) -> None:
        """Takes the bytes, shows them as buffers, and makes the lookup for their device."""
        self._packed = packed
        device, holders = packed.flat.device, nn.ModuleDict()
        for number, table in enumerate(self._tables):
            holders[table.name] = nn.Module()
            holders[table.name].register_buffer("weight", packed.rows_of(number))
        setattr(self, self.tables_name, holders)
        pairs = zip(self._tables, packed.places, strict=True)
        places = [place for table, place in pairs for _ in table.feature_names]
        pooling = "none" if not self.pooled else "mean" if all(self._means) else "sum"
        self._lookup = PackedLookup(places, device, self._output_dtype, pooling, self._backend)
        self._rows_tensor = torch.tensor(self._rows, device=device)
        self._mean_features = torch.tensor(self._means, device=device).unsqueeze(1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the tables as one tensor. Rows are padded anew if the other device needs it."""
        moved = fn(self._packed.flat)
        if moved.dtype is not torch.uint8:
            raise ValueError(
                f"served tables cannot become {moved.dtype}: they are bytes. Fix: quantize_embeddings anew"
            )
        placed = PackedTables.__new__(PackedTables)
        placed.__dict__.update(self._packed.__dict__, flat=moved)
        if row_alignment(moved.device) != self._packed.alignment:
            placed = PackedTables(self._tables, moved.device)
            for number in range(len(self._tables)):
                placed.rows_of(number).copy_(self._packed.rows_of(number))
        self._store(placed)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the buffers, which are views, and the lookup."""
        left_out = ("_lookup", "_rows_tensor", "_mean_features")
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        state["_modules"] = {name: own for name, own in self._modules.items() if name != self.tables_name}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._store(self._packed)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """``assign=True`` would replace views of the bytes that kernels read: tables are copied in any case."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        for number, table in enumerate(self._tables):
            given = state_dict.get(f"{prefix}{self.tables_name}.{table.name}.weight")
            own = self._packed.rows_of(number)
            if isinstance(given, Tensor) and given.shape == own.shape and given.dtype is own.dtype:
                own.copy_(given)

    def load_packed(self, name: str, rows: Tensor, first: int = 0) -> None:
        """Packs some rows of a table into its bytes, a few megabytes at a time.

        Args:
            name: the table.
            rows: ``[n, D]`` floating point, on any device.
            first: the table's row that is ``rows[0]``.

        Raises:
            ValueError: an unknown table, rows that do not fit it, or numbers that its format cannot store.
        """
        number = self._number_of(name)
        place = self._packed.places[number]
        if rows.dim() != 2 or rows.shape[1] != place.dim or not 0 <= first <= place.rows - len(rows):
            raise ValueError(
                f"rows {first} to {first + len(rows)} of shape {list(rows.shape)} do not fit table {name!r}, which is "
                f"[{place.rows}, {place.dim}]"
            )
        target = self._packed.rows_of(number)
        for chunk in rows.detach().split(max(1, CHUNK_BYTES // (4 * place.dim))):
            target[first : first + len(chunk)].copy_(pack(chunk, place.kind, name))
            first += len(chunk)

    # ---- a lookup ----

    def _look_up(
        self, lookup: Callable[..., Any], ids: Tensor, offsets: Tensor, weights: Tensor | None, counts: Any
    ) -> Any:
        """Checks one batch and looks it up; arguments and result as of `PackedLookup`."""
        bags = (offsets.shape[0] - 1) // len(self._rows) if self.pooled else 1
        fitted = self._fitted(ids, offsets, bags)
        try:
            return lookup(self._packed.flat, fitted, offsets, weights, counts)
        except RuntimeError:
            if self._policy.policy == "error" and not torch.compiler.is_compiling():
                self._raise_outside(ids, offsets, bags)
            raise

    def _fitted(self, ids: Tensor, offsets: Tensor, bags: int) -> Tensor:
        """Ids that are rows, or -1 for rows of zeros, by the out-of-range policy."""
        check_ids(ids)
        compiling = torch.compiler.is_compiling()
        if not compiling and (ids.shape[0] == 0 or ids.is_meta):
            return ids
        policy = self._policy.policy
        if policy == "error" and self._lookup.checks_upper_bound and not compiling:
            if int(ids.min()) < 0:  # the lookup raises for ids that are too large
                self._raise_outside(ids, offsets, bags)
            return ids
        most: int | Tensor = self._rows[0]
        if len(set(self._rows)) > 1:
            starts = self._starts(offsets, bags)
            most = self._rows_tensor.repeat_interleave(starts.diff(), output_size=ids.shape[0])
        outside = (ids < 0) | (ids >= most)
        if policy == "error":
            if compiling:
                torch._assert_async(~outside.any(), "an id is not a row of its table")
            elif bool(outside.any()):
                self._raise_outside(ids, offsets, bags)
            return ids
        if not compiling and (ids.device.type != "cpu" or bool(outside.any())):  # a device counts without a wait
            starts = self._starts(offsets, bags).long()
            found = functional.pad(outside.cumsum(0), (1, 0)).index_select(0, starts).diff()
            self._outside = found if self._outside is None else self._outside.to(found.device) + found
        if policy == "ignore":
            return torch.where(outside, -1, ids)
        clamped = ids.clamp(min=0)
        return clamped.clamp(max=most - 1) if isinstance(most, int) else clamped.minimum((most - 1).to(ids.dtype))

    def _starts(self, offsets: Tensor, bags: int) -> Tensor:
        """``[F + 1]`` where the ids of each feature begin."""
        return offsets.index_select(0, torch.arange(len(self._rows) + 1, device=offsets.device) * bags)

    def _raise_outside(self, ids: Tensor, offsets: Tensor, bags: int) -> None:
        """The error of `OutOfRange` for the first id that is no row, if there is one."""
        lengths = offsets.diff().view(len(self._rows), bags)
        parts = zip(ids.tensor_split(self._starts(offsets, bags)[1:-1].tolist()), lengths, strict=True)
        by_feature = [JaggedTensor._unchecked(part, None, own) for part, own in parts]
        self._policy.fit_all(by_feature, targets_of(self._tables))

    def _in_order(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with the features of the tables, in their order."""
        if isinstance(features, KeyedJaggedTensor) and features.keys() == self._feature_names:
            return features
        check_features(features, self._tables)
        known, device = features.index_per_key(), features.device()
        order, last = [known[feature] for feature in self._feature_names], self._order
        if device.type == "cpu" or torch.compiler.is_compiling():  # a traced tensor must not stay on the module
            return features.permute(order)
        if last is None or last[0] != order or last[1].device != device:
            last = self._order = order, torch.tensor(order, device=device)
        return features.permute(*last)

    # ---- what it is ----

    def _number_of(self, name: str) -> int:
        names = [table.name for table in self._tables]
        if name not in names:
            raise ValueError(f"table {name!r} is unknown. Fix: use one of {', '.join(map(repr, names))}")
        return names.index(name)

    def packed(self, name: str) -> Tensor:
        """The bytes of a table, ``[E, R]`` uint8, without padding: a view.

        Raises:
            ValueError: the collection has no table of that name.
        """
        return self._packed.rows_of(self._number_of(name))

    def dequantized(self, name: str, rows: slice | Tensor = slice(None)) -> Tensor:
        """Rows of a table as a lookup reads them, ``[n, D]`` fp32: all, a slice, or row numbers ``[n]``.

        Raises:
            ValueError: the collection has no table of that name.
        """
        return unpack(self.packed(name)[rows], self._tables[self._number_of(name)].data_type)

    def most_error(self, name: str) -> Tensor | None:
        """``[E]`` fp32: the most that rounding changed a number of each row, or None for formats without codes.

        Raises:
            ValueError: the collection has no table of that name.
        """
        return most_error(self.packed(name), self._tables[self._number_of(name)].data_type)

    def weight_bytes(self) -> int:
        """Bytes of all tables, scales and biases included, padding excluded."""
        return sum(place.rows * place.row_bytes for place in self._packed.places)

    def feature_names(self) -> list[str]:
        """The features in the order of `lookup`: the tables' order, then the order of each table's features."""
        return self._feature_names

    def backends(self) -> dict[str, str]:
        """Table -> the kernel that looks it up."""
        return dict(self._lookup.backends)

    def output_dtype(self) -> torch.dtype:
        """The dtype of the looked up rows."""
        return self._output_dtype

    def out_of_range_count(self) -> int:
        """Out-of-range ids so far, under ``"clamp"`` and ``"ignore"``."""
        return 0 if self._outside is None else int(self._outside.sum())

    @property
    def device(self) -> torch.device:
        """Where the tables are stored."""
        return self._packed.flat.device

    @classmethod
    def empty_like(
        cls,
        module: Any,
        dtype: Types | None,
        output_dtype: torch.dtype | None,
        backend: str | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """A served collection with the tables of a trained one; all numbers are zero. Arguments as of `from_float`."""
        kind, configs, option = "EmbeddingCollection", "embedding_configs", "need_indices"
        if cls.pooled:
            kind, configs, option = "EmbeddingBagCollection", "embedding_bag_configs", "is_weighted"
        if not hasattr(module, configs):
            raise ValueError(f"module must be an {kind}, got {type(module).__name__}")
        tables, config = list(getattr(module, configs)()), getattr(module, "qconfig", None)
        if config is not None:
            output_dtype = config.activation().dtype if output_dtype is None else output_dtype
            if dtype is None:
                dtype, own = config.weight().dtype, getattr(config, "per_table_weight_dtype", None)
                dtype = {table.name: own.get(table.name, dtype) for table in tables} if own else dtype
        made: Any = cls
        served: Self = made(
            with_types(tables, DataType.INT8 if dtype is None else dtype),
            device=module.device if device is None else device,
            output_dtype=torch.float32 if output_dtype is None else output_dtype,
            out_of_range=module.out_of_range,
            backend=backend,
            **{option: getattr(module, option)()},
        )
        return served

    @classmethod
    def from_float(
        cls,
        module: nn.Module,
        use_precomputed_fake_quant: bool = False,
        *,
        dtype: Types | None = None,
        output_dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> Self:
        """The same tables with small rows, on the same device.

        Args:
            module: an `EmbeddingBagCollection` or a fused one; of `QuantEmbeddingCollection`, an `EmbeddingCollection`.
            use_precomputed_fake_quant: not read. ``torch.ao.quantization`` passes it.
            dtype: the number format of all tables, or table name -> format; tables left out keep theirs. Default:
                ``module.qconfig``, else INT8.
            output_dtype: of looked up rows. Default: ``module.qconfig``, else float32.
            backend: as of the class.

        Raises:
            ValueError: weights that are not finite or do not fit the format, or another kind of module.
        """
        served, weights = cls.empty_like(module, dtype, output_dtype, backend), module.state_dict()
        for table in served._tables:
            served.load_packed(table.name, weights[f"{served.tables_name}.{table.name}.weight"])
        return served


@checks_arguments
class QuantEmbeddingBagCollection(QuantCollection, PooledTables):
    """An `EmbeddingBagCollection` for serving: small rows, one operator for all features, no gradients.

    Weights are buffers ``embedding_bags.{table}.weight``, ``[E, R]`` uint8: see `formats` for their bytes. A state dict
    has the same bytes on every device. Tables of different number formats may be mixed.

    Args:
        tables: with ``data_type`` FP32, FP16, BF16, FP8, INT8, INT4 or INT2. All numbers are zero until `from_float`,
            `quantize_embeddings` or a state dict sets them.
        is_weighted: as of `EmbeddingBagCollection`.
        device: where the tables are stored. Default: CPU.
        output_dtype: of the pooled rows: float32, float16 or bfloat16. Sums are fp32 in any case.
        out_of_range: the policy, as of `EmbeddingBagCollection`.
        backend: ``"fbgemm"`` or ``"native"`` for all tables. Default: fbgemm where it is installed and has a kernel.

    Raises:
        ValueError: tables that do not fit together, or a number format that cannot store them.

    >>> table = EmbeddingBagConfig(4, 2, "movies", DataType.INT8, ["seen"])
    >>> served = QuantEmbeddingBagCollection([table])
    >>> served.load_packed("movies", torch.tensor([[1.0, 1], [2, 2], [3, 3], [4, 4]]))
    >>> batch = KeyedJaggedTensor(["seen"], torch.tensor([0, 3]), lengths=torch.tensor([2, 0]))
    >>> served(batch)["seen"].tolist()
    [[5.0, 5.0], [0.0, 0.0]]
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        output_dtype: torch.dtype = torch.float32,
        *,
        out_of_range: str = "error",
        backend: str | None = None,
    ) -> None:
        super().__init__(tables, device, output_dtype, out_of_range, backend, is_weighted=is_weighted)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up one batch; arguments, errors and result ``[B, sum of D]`` as of `EmbeddingBagCollection`."""
        ordered, weights = self._in_order(features), None
        if self._is_weighted:
            weights = check_weights(ordered.weights_or_none(), self._feature_names)
        if ordered.variable_stride_per_key():
            lengths = torch.cat(to_most_bags([features[name].lengths() for name in self._feature_names]))
            offsets = functional.pad(lengths.cumsum(0), (1, 0))
        else:
            offsets = ordered.offsets()
        needed = self._lookup.needs_counts and not torch.compiler.is_compiling()
        counts = ordered.length_per_key() if needed else None  # batches that were made on the host have them
        pooled = self.lookup(ordered.values(), offsets, weights, counts)
        pooled = joined_samples(pooled, features, self._feature_names, self._dims)
        return KeyedTensor._unchecked(list(self._keys), list(self._dims), pooled)

    def lookup(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None, counts: Sequence[int] | None = None
    ) -> Tensor:
        """Looks up plain tensors, with torch and fbgemm operators only: for ``torch.export``.

        Args:
            ids: ``[N]`` int32 or int64, feature by feature in the order of `feature_names`, then sample by sample.
            offsets: ``[F * B + 1]`` int32 or int64: where the bags begin.
            weights: ``[N]`` floating point, for weighted collections.
            counts: ids of each feature. Kernels of several number formats otherwise read them from the device.

        Returns:
            ``[B, sum of D]`` in the output dtype.

        Raises:
            ValueError: an out-of-range id, or ids that are not integers.
        """
        if weights is not None:
            weights = weights.detach().float()
        if any(self._means) and not all(self._means):
            weights = self._shares(ids, offsets, weights)
        pooled: Tensor = self._look_up(self._lookup, ids, offsets, weights, counts)
        return pooled

    def _shares(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """``[N]`` fp32: weights that make sums of the MEAN features means."""
        lengths = offsets.diff()
        counts = lengths.clamp(min=1).view(len(self._rows), (offsets.shape[0] - 1) // len(self._rows))
        factors = torch.where(self._mean_features, 1 / counts.float(), 1.0).flatten()
        per_id = factors.repeat_interleave(lengths, output_size=ids.shape[0])
        return per_id if weights is None else per_id * weights


@checks_arguments
class QuantEmbeddingCollection(QuantCollection, SequenceTables):
    """An `EmbeddingCollection` for serving: one small row per id, no gradients.

    Weights are buffers ``embeddings.{table}.weight``, ``[E, R]`` uint8: see `formats` for their bytes.

    Args:
        tables, device, output_dtype, out_of_range, backend: as of `QuantEmbeddingBagCollection`.
        need_indices: put the batch's ids into the outputs' weights.

    Raises:
        ValueError: tables that do not fit together, or a number format that cannot store them.

    >>> served = QuantEmbeddingCollection([EmbeddingConfig(4, 2, "movies", DataType.INT8, ["seen"])])
    >>> served.load_packed("movies", torch.tensor([[1.0, 1], [2, 2], [3, 3], [4, 4]]))
    >>> batch = KeyedJaggedTensor(["seen"], torch.tensor([0, 3]), lengths=torch.tensor([2, 0]))
    >>> served(batch)["seen"].values().tolist()
    [[1.0, 1.0], [4.0, 4.0]]
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        output_dtype: torch.dtype = torch.float32,
        *,
        out_of_range: str = "error",
        backend: str | None = None,
    ) -> None:
        super().__init__(tables, device, output_dtype, out_of_range, backend, need_indices=need_indices)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up one batch; arguments, errors and result, ``[N, D]`` a feature, as of `EmbeddingCollection`."""
        ordered = self._in_order(features)
        values, counts = ordered.values(), ordered.length_per_key()
        if values.device.type == "cpu" or ordered.variable_stride_per_key() or not ordered.stride():
            starts = torch.tensor([0, *accumulate(counts)], device=values.device)
        else:  # without a copy to the device
            starts = ordered.offsets()[:: ordered.stride()]
        parts = self._look_up(self._lookup.rows, values, starts, None, counts)
        results = {}
        for name, feature, part in zip(self._keys, self._feature_names, parts, strict=True):
            bags = features[feature]
            results[name] = JaggedTensor._unchecked(part, bags.values() if self._need_indices else None, bags.lengths())
        return results

    def lookup(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Looks up plain tensors, with torch and fbgemm operators only, where all tables have the same columns.

        Args:
            ids: ``[N]`` int32 or int64, feature by feature in the order of `feature_names`.
            offsets: ``[F + 1]`` where features begin, or ``[F * B + 1]`` where bags begin.

        Returns:
            ``[N, D]`` in the output dtype.

        Raises:
            ValueError: an out-of-range id, ids that are not integers, or tables of several widths.
        """
        dim = self.embedding_dim()
        starts = self._starts(offsets, (offsets.shape[0] - 1) // len(self._rows))
        rows: Tensor = self._look_up(self._lookup, ids, starts, None, None)
        return rows.view(-1, dim)


def with_types(tables: Sequence[BaseEmbeddingConfig], dtype: Types) -> list[Any]:
    """The tables in their served number formats.

    Raises:
        ValueError: an unknown table or format.
    """
    given = dtype if isinstance(dtype, Mapping) else {table.name: dtype for table in tables}
    return [replace(table, data_type=served_type(given.get(table.name, table.data_type))) for table in tables]
