"""Collections of served tables: `EmbeddingBagCollection` and `EmbeddingCollection` with small rows. No gradients.

Shape letters: B batch, F features (of all tables, in the tables' order), N ids, E rows, R bytes of a row, D columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from recshard_lab.arguments import device_named, names_wrong_arguments
from recshard_lab.embedding.collections import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    check_pooling,
    common_dim,
)
from recshard_lab.embedding.configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    check_tables,
    embedding_names_by_table,
)
from recshard_lab.embedding.inputs import OutOfRange, check_weights, feature_of, refuse_script, to_most_bags, to_samples
from recshard_lab.embedding.kernels.transposed import FeatureGroups
from recshard_lab.embedding.quantized.formats import PackedTables, most_error, pack, row_alignment, served_type, unpack
from recshard_lab.embedding.quantized.kernels import Feature, QuantKernel, choose_quant_kernel
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


class QuantCollection(nn.Module):
    """The base of both collections: bytes of the tables, kernels, the out-of-range policy."""

    tables_name: ClassVar[str]
    _flat: Tensor

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        device: torch.device | str | None,
        output_dtype: torch.dtype,
        out_of_range: str,
        backend: str | None,
    ) -> None:
        super().__init__()
        check_tables(tables)
        if not isinstance(output_dtype, torch.dtype) or output_dtype not in OUTPUT_DTYPES:
            kinds = ", ".join(map(str, OUTPUT_DTYPES))
            raise ValueError(f"output_dtype {output_dtype!r:.80} is not supported. Fix: use one of {kinds}")
        for table in tables:
            if table.dynamic:
                raise ValueError(
                    f"table {table.name!r} is dynamic. Fix: quantize_embeddings(export_static(collection))"
                )
        self._tables = list(tables)
        self._output_dtype = output_dtype
        self._policy = OutOfRange(out_of_range)
        self._order: tuple[list[int], Tensor] | None = None  # of the last batch whose features were in another order
        self._outside: Tensor | None = None  # [F] out-of-range ids of each feature so far
        self._backend = backend
        self._names = embedding_names_by_table(tables)
        self._feature_names = [feature for table in tables for feature in table.feature_names]
        self._keys = [name for names in self._names for name in names]
        self._dims = [table.embedding_dim for table in tables for _ in table.feature_names]
        self._rows = [table.num_embeddings for table in tables for _ in table.feature_names]
        self._store(PackedTables(tables, device_named(device) or torch.device("cpu")))
        self.eval()

    def __prepare_scriptable__(self) -> None:
        refuse_script(self)

    # ---- bytes and kernels ----

    def _store(self, packed: PackedTables) -> None:
        """Takes the bytes, shows them as buffers, and makes the kernels for their device."""
        self._packed = packed
        device = packed.flat.device
        holders = nn.ModuleDict()
        features: list[Feature] = []
        for number, table in enumerate(self._tables):
            holders[table.name] = nn.Module()
            holders[table.name].register_buffer("weight", packed.rows_of(number))
            features += [Feature(feature, table.name, packed.places[number]) for feature in table.feature_names]
        setattr(self, self.tables_name, holders)
        groups: dict[Any, list[int]] = {}
        for number, feature in enumerate(features):
            kernel = choose_quant_kernel(feature, device, self._backend)
            groups.setdefault((kernel, self._group_of(feature)), []).append(number)
        self._kernels: list[QuantKernel] = [
            kernel([features[number] for number in members], device, self._output_dtype, self._pooling())
            for (kernel, _), members in groups.items()
        ]
        self._groups = FeatureGroups(self._dims, list(groups.values()), device)
        self._rows_tensor = torch.tensor(self._rows, device=device)
        self._kernels_check = device.type == "cpu" and all(kernel.checks_upper_bound for kernel in self._kernels)

    @abstractmethod
    def _group_of(self, feature: Feature) -> int:
        """Features of one kernel call have the same number."""

    @abstractmethod
    def _pooling(self) -> str:
        """The kernels' pooling."""

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
        """Leaves out the buffers, which are views, and the kernels."""
        left_out = ("_kernels", "_groups", "_rows_tensor")
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
        step = max(1, CHUNK_BYTES // (4 * place.dim))
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            target[first + start : first + start + len(chunk)].copy_(pack(chunk.detach(), place.kind, name))

    # ---- a lookup ----

    def _fitted(self, ids: Tensor, offsets: Tensor, weights: Tensor | None, bags: int) -> Tensor:
        """Ids that are rows, or -1 for rows of zeros, by the out-of-range policy."""
        if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
            raise ValueError(f"ids are {ids.dtype} {list(ids.shape)}, not int32 or int64 [N]. Fix: values.long()")
        compiling = torch.compiler.is_compiling()
        if not compiling and (ids.shape[0] == 0 or ids.is_meta):
            return ids
        policy = self._policy.policy
        if policy == "error" and self._kernels_check and not compiling:
            if int(ids.min()) < 0:  # the kernels raise for ids that are too large
                self._raise_outside(ids, offsets, bags)
            return ids
        most: int | Tensor = self._rows[0]
        if len(set(self._rows)) > 1:
            starts = offsets.index_select(0, torch.arange(len(self._rows) + 1, device=ids.device) * bags)
            most = self._rows_tensor.repeat_interleave(starts.diff(), output_size=ids.shape[0])
        outside = (ids < 0) | (ids >= most)
        if policy == "error":
            if compiling:
                torch._assert_async(~outside.any(), "an id is not a row of its table")
            elif bool(outside.any()):
                self._raise_outside(ids, offsets, bags)
            return ids
        if not compiling and (ids.device.type != "cpu" or bool(outside.any())):  # a device counts without a wait
            self._count(outside, offsets, bags)
        if policy == "ignore":
            return torch.where(outside, -1, ids)
        clamped = ids.clamp(min=0)
        return clamped.clamp(max=most - 1) if isinstance(most, int) else clamped.minimum((most - 1).to(ids.dtype))

    def _raise_outside(self, ids: Tensor, offsets: Tensor, bags: int) -> None:
        """The error of `OutOfRange` for the first id that is no row, if there is one."""
        for number, (start, end, lengths) in enumerate(self._spans(offsets, bags)):
            bag = JaggedTensor._unchecked(ids[start:end], None, lengths)
            self._policy.fit(bag, self._feature_names[number], self._table_of[number].name, self._rows[number])

    def _count(self, outside: Tensor, offsets: Tensor, bags: int) -> None:
        """Adds the out-of-range ids of each feature to their counts, where the ids are."""
        starts = offsets.index_select(0, torch.arange(len(self._rows) + 1, device=offsets.device) * bags)
        found = functional.pad(outside.cumsum(0), (1, 0)).index_select(0, starts.long()).diff()
        self._outside = found if self._outside is None else self._outside.to(found.device) + found

    def _spans(self, offsets: Tensor, bags: int) -> Iterator[tuple[int, int, Tensor]]:
        """Of each feature the first id, the end, and its lengths."""
        lengths = offsets.diff().view(len(self._rows), bags)
        ends = offsets.tolist()
        for number in range(len(self._rows)):
            yield ends[number * bags], ends[(number + 1) * bags], lengths[number]

    @property
    def _table_of(self) -> list[BaseEmbeddingConfig]:
        return [table for table in self._tables for _ in table.feature_names]

    def _counts(self, features: KeyedJaggedTensor) -> list[int] | None:
        """Ids of each feature, if kernels need them on the host. Batches that were made on the host have them."""
        needed = not self._groups.whole or any(kernel.needs_counts for kernel in self._kernels)
        return features.length_per_key() if needed and not torch.compiler.is_compiling() else None

    def _run(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, bags: int, counts: Sequence[int] | None
    ) -> list[Tensor]:
        """Per kernel its rows."""
        pooled = self._pooling() != "none"
        if self._groups.whole:
            return [self._kernels[0].forward(self._packed.flat, ids, offsets, weights, counts)]
        spans, batch = self._groups.spans(offsets, pooled, counts)
        return [
            kernel.forward(
                self._packed.flat,
                self._groups.take(ids, index, spans),
                self._groups.take_offsets(offsets, index, batch),
                None if weights is None else self._groups.take(weights, index, spans),
                None if counts is None else [counts[number] for number in self._groups.groups[index]],
            )
            for index, kernel in enumerate(self._kernels)
        ]

    def _looked_up(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, bags: int, counts: Sequence[int] | None
    ) -> list[Tensor]:
        """Checks one batch and looks it up."""
        fitted = self._fitted(ids, offsets, weights, bags)
        offsets = offsets.to(ids.dtype)
        try:
            return self._run(fitted.contiguous(), offsets.contiguous(), weights, bags, counts)
        except RuntimeError:
            if self._policy.policy == "error" and not torch.compiler.is_compiling():
                self._raise_outside(ids, offsets, bags)
            raise

    def _in_order(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with the features of the tables, in their order."""
        if not isinstance(features, KeyedJaggedTensor):
            raise ValueError(f"a batch of type {type(features).__name__} is not a KeyedJaggedTensor")
        keys = features.keys()
        if keys == self._feature_names:
            return features
        known, device = features.index_per_key(), features.device()
        for feature, table in zip(self._feature_names, self._table_of, strict=True):
            if feature not in known:
                feature_of(features, feature, table.name)
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
        return {feature.table: kernel.name for kernel in self._kernels for feature in kernel.features}

    def output_dtype(self) -> torch.dtype:
        """The dtype of the looked up rows."""
        return self._output_dtype

    def out_of_range_count(self) -> int:
        """Out-of-range ids so far, under ``"clamp"`` and ``"ignore"``."""
        return 0 if self._outside is None else int(self._outside.sum())

    @property
    def out_of_range(self) -> str:
        """The out-of-range policy."""
        return self._policy.policy

    @property
    def device(self) -> torch.device:
        """Where the tables are stored."""
        return self._packed.flat.device


@EmbeddingBagCollectionInterface.register
@names_wrong_arguments
class QuantEmbeddingBagCollection(QuantCollection):
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

    tables_name = "embedding_bags"

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
        if not isinstance(is_weighted, bool):
            raise ValueError(f"is_weighted must be True or False, got {is_weighted!r:.80}")
        check_tables(tables)
        check_pooling(tables)
        means = [table.pooling is PoolingType.MEAN for table in tables for _ in table.feature_names]
        self._means, self._is_weighted = means, is_weighted
        super().__init__(tables, device, output_dtype, out_of_range, backend)

    def _store(self, packed: PackedTables) -> None:
        super()._store(packed)
        self._mean_features = torch.tensor(self._means, device=packed.flat.device).unsqueeze(1)

    def _group_of(self, feature: Feature) -> int:
        return 0

    def _pooling(self) -> str:
        return "mean" if all(self._means) else "sum"

    @classmethod
    def from_float(
        cls,
        module: nn.Module,
        use_precomputed_fake_quant: bool = False,
        *,
        dtype: Types | None = None,
        output_dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> QuantEmbeddingBagCollection:
        """The same tables with small rows, on the same device.

        Args:
            module: an `EmbeddingBagCollection` or a fused one.
            use_precomputed_fake_quant: not read. ``torch.ao.quantization`` passes it.
            dtype: the number format of all tables, or table name -> format; tables left out keep theirs. Default:
                ``module.qconfig``, else INT8.
            output_dtype: of the pooled rows. Default: ``module.qconfig``, else float32.
            backend: as of the class.

        Raises:
            ValueError: weights that are not finite or do not fit the format, or another kind of module.
        """
        return filled_like(cls, module, dtype, output_dtype, backend)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up one batch; arguments, errors and result ``[B, sum of D]`` as of `EmbeddingBagCollection`."""
        given, features = features, self._in_order(features)
        variable = features.variable_stride_per_key() or features.inverse_indices_or_none() is not None
        weights = None
        if self._is_weighted:
            weights = check_weights(features.weights_or_none(), self._feature_names)
        if not variable:
            pooled = self.lookup(features.values(), features.offsets(), weights, self._counts(features))
            return KeyedTensor._unchecked(list(self._keys), list(self._dims), pooled)
        lengths = torch.cat(to_most_bags([given[name].lengths() for name in self._feature_names]))
        offsets = functional.pad(lengths.cumsum(0), (1, 0))
        parts = self.lookup(features.values(), offsets, weights, self._counts(features)).split(self._dims, 1)
        samples = [to_samples(part, given, name) for part, name in zip(parts, self._feature_names, strict=True)]
        return KeyedTensor._unchecked(list(self._keys), list(self._dims), torch.cat(samples, 1))

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
        bags = (offsets.shape[0] - 1) // len(self._rows)
        if weights is not None:
            weights = weights.detach().float().contiguous()
        if any(self._means) and not all(self._means):
            weights = self._shares(ids, offsets, weights, bags)
        outputs = self._looked_up(ids, offsets, weights, bags, counts)
        if len(outputs) == 1:
            return outputs[0]
        dims = [[self._dims[number] for number in group] for group in self._groups.groups]
        return self._groups.join_pooled([out.split(own, 1) for out, own in zip(outputs, dims, strict=True)])

    def _shares(self, ids: Tensor, offsets: Tensor, weights: Tensor | None, bags: int) -> Tensor:
        """``[N]`` fp32: weights that make sums of the MEAN features means."""
        lengths = offsets.diff()
        counts = lengths.clamp(min=1).view(len(self._rows), bags)
        factors = torch.where(self._mean_features, 1 / counts.float(), 1.0).flatten()
        per_id = factors.repeat_interleave(lengths, output_size=ids.shape[0])
        return per_id if weights is None else per_id * weights

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, in order."""
        return self._tables  # type: ignore[return-value]

    def is_weighted(self) -> bool:
        """Whether batches must carry weights."""
        return self._is_weighted


@EmbeddingCollectionInterface.register
@names_wrong_arguments
class QuantEmbeddingCollection(QuantCollection):
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

    tables_name = "embeddings"

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
        if not isinstance(need_indices, bool):
            raise ValueError(f"need_indices must be True or False, got {need_indices!r:.80}")
        self._need_indices = need_indices
        super().__init__(tables, device, output_dtype, out_of_range, backend)

    def _group_of(self, feature: Feature) -> int:
        return feature.place.dim

    def _pooling(self) -> str:
        return "none"

    @classmethod
    def from_float(
        cls,
        module: nn.Module,
        use_precomputed_fake_quant: bool = False,
        *,
        dtype: Types | None = None,
        output_dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> QuantEmbeddingCollection:
        """As `QuantEmbeddingBagCollection.from_float`, of an `EmbeddingCollection` or a fused one."""
        return filled_like(cls, module, dtype, output_dtype, backend)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up one batch; arguments, errors and result, ``[N, D]`` a feature, as of `EmbeddingCollection`."""
        ordered = self._in_order(features)
        values, counts = ordered.values(), ordered.length_per_key()
        if values.device.type == "cpu" or ordered.variable_stride_per_key() or not ordered.stride():
            starts = torch.tensor([0, *accumulate(counts)], device=values.device)
        else:  # without a copy to the device
            starts = ordered.offsets()[:: ordered.stride()]
        parts = self._rows_by_feature(values, starts, counts)
        results = {}
        for number, name in enumerate(self._keys):
            bags = features[self._feature_names[number]]
            ids = bags.values() if self._need_indices else None
            results[name] = JaggedTensor._unchecked(parts[number], ids, bags.lengths())
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
        common_dim(self._tables)
        bags = (offsets.shape[0] - 1) // len(self._rows)
        places = torch.arange(len(self._rows) + 1, device=offsets.device) * bags
        outputs = self._looked_up(ids, offsets.index_select(0, places), None, 1, None)
        if len(outputs) == 1:
            return outputs[0]
        flat = self._groups.join_flat(outputs, self._groups.spans(offsets, True, None)[0])
        return flat.view(-1, self._dims[0])

    def _rows_by_feature(self, ids: Tensor, offsets: Tensor, counts: Sequence[int]) -> list[Tensor]:
        outputs = self._looked_up(ids, offsets, None, 1, counts)
        found: dict[int, Tensor] = {}
        for rows, members in zip(outputs, self._groups.groups, strict=True):
            found.update(zip(members, rows.split([counts[number] for number in members]), strict=True))
        return [found[number] for number in range(len(found))]

    def need_indices(self) -> bool:
        """Whether outputs carry their ids as weights."""
        return self._need_indices

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables, in order."""
        return self._tables  # type: ignore[return-value]

    def embedding_dim(self) -> int:
        """Columns of the outputs, where all tables have the same.

        Raises:
            ValueError: tables of several widths.
        """
        return common_dim(self._tables)

    def embedding_names_by_table(self) -> list[list[str]]:
        """For each table the keys of its outputs."""
        return self._names


def empty_like(
    kind: Any,
    module: Any,
    dtype: Types | None,
    output_dtype: torch.dtype | None,
    backend: str | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """A served collection with the tables of a trained one; all numbers are zero."""
    pooled = issubclass(kind, QuantEmbeddingBagCollection)
    if not hasattr(module, "embedding_bag_configs" if pooled else "embedding_configs"):
        wanted = "EmbeddingBagCollection" if pooled else "EmbeddingCollection"
        raise ValueError(f"module must be an {wanted}, got {type(module).__name__}")
    tables = list(module.embedding_bag_configs() if pooled else module.embedding_configs())
    config = getattr(module, "qconfig", None)
    if config is not None:
        output_dtype = config.activation().dtype if output_dtype is None else output_dtype
        if dtype is None:
            dtype = config.weight().dtype
            own = getattr(config, "per_table_weight_dtype", None)
            if own:
                dtype = {table.name: own.get(table.name, dtype) for table in tables}
    tables = with_types(tables, DataType.INT8 if dtype is None else dtype)
    if pooled:
        more: dict[str, Any] = {"is_weighted": module.is_weighted()}
    else:
        more = {"need_indices": module.need_indices()}
    return kind(
        tables,
        device=module.device if device is None else device,
        output_dtype=torch.float32 if output_dtype is None else output_dtype,
        out_of_range=module.out_of_range,
        backend=backend,
        **more,
    )


def filled_like(
    kind: Any, module: Any, dtype: Types | None, output_dtype: torch.dtype | None, backend: str | None
) -> Any:
    """A served collection with the tables and the rows of a trained one."""
    served = empty_like(kind, module, dtype, output_dtype, backend)
    weights = module.state_dict()
    for table in served._tables:
        served.load_packed(table.name, weights[f"{served.tables_name}.{table.name}.weight"])
    return served


def with_types(tables: Sequence[BaseEmbeddingConfig], dtype: Types) -> list[Any]:
    """The tables in their served number formats.

    Raises:
        ValueError: an unknown table or format.
    """
    if isinstance(dtype, Mapping):
        return [replace(table, data_type=served_type(dtype.get(table.name, table.data_type))) for table in tables]
    kind = served_type(dtype)
    return [replace(table, data_type=kind) for table in tables]
