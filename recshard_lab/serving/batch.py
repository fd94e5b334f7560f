"""What a served model takes: its input columns, and batches of samples in one flat layout.

Shape letters: B samples, F sparse features, N ids of all features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.arguments import checks_arguments, shown
from recshard_lab.sparse import KeyedJaggedTensor, complete_cumsum, gather_segments

_INT64 = torch.iinfo(torch.int64)


@dataclass(frozen=True)
class SparseInput:
    """A sparse feature.

    Attributes:
        name: of the feature.
        rows: ids are 0 to rows - 1. None: every int64 is accepted.
        weighted: each id has a weight.
    """

    name: str
    rows: int | None
    weighted: bool = False


@dataclass(frozen=True)
class Inputs:
    """What a served model takes.

    Attributes:
        dense: names of the dense columns, in order.
        sparse: the sparse features, in order.

    >>> inputs = Inputs(("age",), (SparseInput("movie", 1000),))
    >>> inputs.names()
    ['movie']
    >>> Inputs.from_json(inputs.to_json()) == inputs
    True
    """

    dense: tuple[str, ...]
    sparse: tuple[SparseInput, ...]

    def __post_init__(self) -> None:
        names = [*self.dense, *self.names()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"inputs {twice} occur twice. Fix: give every column and feature its own name")
        if not names:
            raise ValueError("inputs are empty: a model needs a dense column or a sparse feature. Fix: pass one")

    @staticmethod
    @checks_arguments
    def of(model: nn.Module, dense: Sequence[str] = ()) -> Inputs:
        """The inputs of a model whose collections have the features as ``{table}.feature_names``.

        Args:
            model: has embedding collections of this library.
            dense: names of the dense columns.

        Raises:
            ValueError: no collection, or a feature that two collections read with different sizes.
        """
        found: dict[str, SparseInput] = {}
        for part in model.modules():
            for feature in _features_of(part):
                other = found.setdefault(feature.name, feature)
                if other.rows != feature.rows:
                    rows = [each for each in (other.rows, feature.rows) if each is not None]
                    found[feature.name] = SparseInput(feature.name, min(rows), other.weighted or feature.weighted)
                elif feature.weighted:
                    found[feature.name] = feature
        if not found:
            raise ValueError(f"{type(model).__name__} has no embedding collection. Fix: pass inputs=Inputs(...)")
        return Inputs(tuple(dense), tuple(found.values()))

    def names(self) -> list[str]:
        """Names of the sparse features, in order."""
        return [feature.name for feature in self.sparse]

    @property
    def weighted(self) -> bool:
        """Whether batches have weights."""
        return any(feature.weighted for feature in self.sparse)

    def to_json(self) -> dict[str, Any]:
        """As in ``model.json``."""
        return {
            "dense": {"columns": list(self.dense), "dtype": "float32"} if self.dense else None,
            "sparse": [{"name": each.name, "rows": each.rows, "weighted": each.weighted} for each in self.sparse],
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Inputs:
        """The opposite of `to_json`."""
        sparse = [SparseInput(each["name"], each["rows"], each["weighted"]) for each in content["sparse"]]
        return Inputs(tuple(content["dense"]["columns"]) if content["dense"] else (), tuple(sparse))

    @cached_property
    def _bounds(self) -> Tensor:
        """``[2, F]`` the first and the last id of each feature."""
        ends = [(_INT64.min, _INT64.max) if each.rows is None else (0, each.rows - 1) for each in self.sparse]
        return torch.tensor(ends, dtype=torch.int64).reshape(-1, 2).t()


@dataclass(frozen=True, eq=False)
class Batch:
    """B samples. The program, the server and its clients use this layout.

    Attributes:
        dense: ``[B, columns]`` float32. Without dense columns ``[B, 0]``.
        values: ``[N]`` int64 ids, feature by feature, then sample by sample, as in a `KeyedJaggedTensor`.
        lengths: ``[F * B]`` int32 or int64: ids of each bag, in the same order.
        weights: ``[N]`` float32 if a feature is weighted, else None.

    >>> one = Batch(torch.zeros(1, 0), torch.tensor([7, 1, 2]), torch.tensor([1, 2]), None)
    >>> two = Batch.cat([one, one])
    >>> two.values.tolist(), two.lengths.tolist()
    ([7, 7, 1, 2, 1, 2], [1, 1, 2, 2])
    >>> two.split([1, 1])[1].values.tolist()
    [7, 1, 2]
    """

    dense: Tensor
    values: Tensor
    lengths: Tensor
    weights: Tensor | None = None

    @property
    def size(self) -> int:
        """B."""
        return self.dense.shape[0]

    @staticmethod
    def cat(batches: Sequence[Batch]) -> Batch:
        """The samples of several batches, in order.

        Raises:
            ValueError: no batch, or batches of different features.
        """
        if not batches:
            raise ValueError("Batch.cat got no batches. Fix: pass at least one")
        parts = [batch for batch in batches if batch.size] or [batches[0]]
        if len(parts) == 1:
            return parts[0]
        features = {part.lengths.numel() // part.size for part in parts}
        weighted = {part.weights is not None for part in parts}
        if len(features) > 1 or len(weighted) > 1 or len({part.dense.shape[1] for part in parts}) > 1:
            raise ValueError(
                "Batch.cat got batches with different columns, features or weights. Fix: build them for the same inputs"
            )
        (count,) = features
        sizes = [part.size for part in parts]
        lengths = torch.cat([part.lengths for part in parts])
        values = torch.cat([part.values for part in parts])
        weights = torch.cat([part.weights for part in parts if part.weights is not None]) if True in weighted else None
        values, lengths, weights = gather_segments(
            values, lengths, _interleaved(count, sizes, lengths.device), weights, output_size=len(values)
        )
        return Batch(torch.cat([part.dense for part in parts]), values, lengths, weights)

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Consecutive samples as separate batches.

        Args:
            sizes: samples of each part. They sum to B.

        Raises:
            ValueError: another sum.
        """
        if sum(sizes) != self.size or min(sizes, default=0) < 0:
            raise ValueError(f"sizes {shown(list(sizes))} do not sum to the batch of {self.size}. Fix: correct them")
        count = self.lengths.numel() // self.size if self.size else 0
        order = _interleaved(count, sizes, self.lengths.device).argsort()
        values, lengths, weights = gather_segments(
            self.values, self.lengths, order, self.weights, output_size=len(self.values)
        )
        own = lengths.split([count * size for size in sizes])
        ids = [int(part.sum()) for part in own]
        per_id = [None] * len(own) if weights is None else weights.split(ids)
        return [
            Batch(*part) for part in zip(self.dense.split(list(sizes)), values.split(ids), own, per_id, strict=True)
        ]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        weights = None if self.weights is None else self.weights.to(device)
        return Batch(self.dense.to(device), self.values.to(device), self.lengths.to(device), weights)

    @staticmethod
    def from_keyed_jagged(features: KeyedJaggedTensor, inputs: Inputs, dense: Tensor | None = None) -> Batch:
        """A batch of a model's features, in the order of its inputs.

        Args:
            features: has every sparse feature of ``inputs``; others are not read. Not a variable batch.
            inputs: of the model.
            dense: ``[B, columns]``; None without dense columns.

        Raises:
            ValueError: a feature or the weights are missing, or shapes do not fit.
        """
        if features.variable_stride_per_key():
            raise ValueError("a variable batch cannot be served. Fix: pass every feature with B bags")
        order = [features.index_per_key().get(name, -1) for name in inputs.names()]
        if -1 in order:
            missing = inputs.names()[order.index(-1)]
            raise ValueError(f"feature {missing!r} is not in the batch, which has {features.keys()}. Fix: add it")
        picked = features if order == list(range(len(features.keys()))) else features.permute(order)
        if dense is None:
            dense = torch.zeros(features.stride(), 0, device=features.device())
        weights = picked.weights_or_none() if inputs.weighted else None
        batch = Batch(dense, picked.values().long(), picked.lengths(), weights)
        batch.check(inputs)
        return batch

    def to_keyed_jagged(self, inputs: Inputs) -> KeyedJaggedTensor:
        """The sparse features."""
        return KeyedJaggedTensor(inputs.names(), self.values, self.weights, self.lengths, stride=self.size)

    def check_shapes(self, inputs: Inputs) -> None:
        """Compares shapes and dtypes with what a model takes. Reads no numbers, so that a GPU is not waited for.

        Raises:
            ValueError: the first difference.
        """
        size, features, ids = self.size, len(inputs.sparse), self.values.shape
        if self.dense.dim() != 2 or self.dense.shape[1] != len(inputs.dense) or self.dense.dtype is not torch.float32:
            raise ValueError(_differs("dense", self.dense, f"float32 [B, {len(inputs.dense)}]"))
        if self.values.dim() != 1 or self.values.dtype is not torch.int64:
            raise ValueError(_differs("values", self.values, "int64 [N]"))
        if self.lengths.dtype not in (torch.int32, torch.int64) or self.lengths.shape != (features * size,):
            wanted = f"int32 or int64 [{features * size}] for {features} features of {size} samples"
            raise ValueError(_differs("lengths", self.lengths, wanted))
        if inputs.weighted and self.weights is None:
            name = next(each.name for each in inputs.sparse if each.weighted)
            raise ValueError(f"weights are missing, and feature {name!r} is weighted. Fix: pass weights [{ids[0]}]")
        if self.weights is not None and (self.weights.dtype is not torch.float32 or self.weights.shape != ids):
            raise ValueError(_differs("weights", self.weights, f"float32 [{ids[0]}]"))

    def check(self, inputs: Inputs) -> None:
        """Compares everything with what a model takes.

        Raises:
            ValueError: the first difference; for an id with its feature, sample and position in the bag.
        """
        self.check_shapes(inputs)
        features, size = len(inputs.sparse), self.size
        if bool((self.lengths < 0).any()):
            bag = int((self.lengths < 0).nonzero()[0])
            raise ValueError(
                f"feature {inputs.sparse[bag // size].name!r}, sample {bag % size}: length {int(self.lengths[bag])} is "
                f"negative. Fix: use 0 for a sample without ids"
            )
        total = int(self.lengths.sum())
        if total != len(self.values):
            raise ValueError(f"lengths sum to {total}, but there are {len(self.values)} values. Fix: make them equal")
        if not total:
            return
        per_feature = self.lengths.reshape(features, size).sum(1)
        bounds = inputs._bounds.to(self.values.device).repeat_interleave(per_feature, 1, output_size=total)
        outside = (self.values < bounds[0]) | (self.values > bounds[1])
        if bool(outside.any()):
            raise ValueError(self._outside(inputs, int(outside.nonzero()[0])))

    def _outside(self, inputs: Inputs, place: int) -> str:
        offsets = complete_cumsum(self.lengths)
        bag = int(torch.searchsorted(offsets, place, right=True)) - 1
        feature = inputs.sparse[bag // self.size]
        return (
            f"feature {feature.name!r}, sample {bag % self.size}, position {place - int(offsets[bag])}: id "
            f"{int(self.values[place])} is not within 0 to {(feature.rows or 0) - 1}. Fix: correct the id"
        )


def split_answers(answers: Mapping[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    """The answers of consecutive samples, for the requests that were merged.

    Args:
        answers: each ``[B, ...]``.
        sizes: samples of each request. They sum to B.

    >>> split_answers({"probability": torch.tensor([0.1, 0.2, 0.3])}, [1, 2])[1]["probability"].tolist()
    [0.20000000298023224, 0.30000001192092896]
    """
    columns = {name: answer.split(list(sizes)) for name, answer in answers.items()}
    return [{name: parts[place] for name, parts in columns.items()} for place in range(len(sizes))]


def _interleaved(features: int, sizes: Sequence[int], device: torch.device) -> Tensor:
    """Which bag of batches side by side is each bag of the merged batch, ``[F * B]``."""
    bags = torch.arange(features * sum(sizes), device=device)
    if len(set(sizes)) == 1:
        return bags.reshape(len(sizes), features, sizes[0]).transpose(0, 1).reshape(-1)
    parts = bags.split([features * size for size in sizes])
    return (
        torch.cat([part.reshape(features, -1) for part in parts if len(part)], dim=1).reshape(-1) if features else bags
    )


def _features_of(part: Any) -> Iterable[SparseInput]:
    """The features of a collection; nothing of another module."""
    configs = getattr(part, "embedding_bag_configs", None) or getattr(part, "embedding_configs", None)
    if configs is None:
        return
    weighted = bool(part.is_weighted()) if hasattr(part, "is_weighted") else False
    any_id = getattr(part, "out_of_range", "error") != "error"
    for table in configs():
        rows = None if any_id or table.dynamic else table.num_embeddings
        for name in table.feature_names:
            yield SparseInput(name, rows, weighted)


def _differs(name: str, tensor: Tensor, wanted: str) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{name} are {dtype} {list(tensor.shape)}, but the model takes {wanted}. Fix: convert them"
