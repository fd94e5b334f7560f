"""KeyedJaggedTensor: the bags of several features for one batch of samples.

                 sample 0   sample 1   sample 2
    "movie"      [a b]      []         [c]
    "genre"      [d]        [e]        [f g h]

    values    a b c d e f g h    [N]           feature after feature, sample after sample
    lengths   2 0 1 1 1 3        [F * B]       lengths[f * B + b]: feature-major
    offsets   0 2 2 3 4 5 8      [F * B + 1]

Shape letters: F features (keys), B samples (stride), N values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor
from torch.fx import wrap
from torch.nn import functional

from recshard_lab.sparse import checks
from recshard_lab.sparse.jagged_tensor import Device, JaggedStorage, JaggedTensor, Keyed, device_named
from recshard_lab.sparse.trees import register

logger = logging.getLogger(__name__)


# Variable batches (VBE): features with different numbers of bags, and their expansion to one batch.
#
# A feature that many samples share (a user's, in a batch of one user's items) is stored once for each distinct
# bag. `stride_per_key_per_rank[f][r]` bags of feature f came from rank r; `inverse_indices` have, for every
# sample of the full batch, the number of its bag::
#
#     "user"   bags [u0] [u1]         inverse [0 0 1 0]      sample 0 -> [u0], 1 -> [u0], 2 -> [u1], 3 -> [u0]
#     "item"   bags [a] [b] [c] [d]   inverse [0 1 2 3]
#
# Shape letters: F features (keys), R ranks, B_f bags of feature f, B samples of the full batch.


def _full_stride(stride_per_key: list[int], inverse: Tensor | None) -> int:
    """B: the samples of `inverse_indices`; without them, the largest number of bags of a feature."""
    return inverse.shape[1] if inverse is not None else max(stride_per_key, default=0)


def inverse_of(inverse: tuple[Sequence[str], Tensor] | None, feature: str) -> Tensor:
    """One feature's row ``[B]`` of the inverse indices.

    Raises:
        ValueError: there are none, or none for this feature.
    """
    if inverse is None:
        raise ValueError(
            "the batch has another number of bags for each feature (stride_per_key_per_rank) and no "
            "inverse_indices, so pooled rows of different features belong to no common sample: give "
            "inverse_indices=(keys, tensor [keys, B])"
        )
    keys, index = inverse
    if feature not in keys:
        raise ValueError(f"inverse_indices has no row for feature {feature!r}, only for {list(keys)}: add it")
    return index[list(keys).index(feature)]


class KeyedJaggedTensor(Keyed, JaggedStorage):
    """A batch of sparse features: which ids each sample has of each feature.

    Args:
        keys: F feature names.
        values: `[N]` ids, feature-major.
        weights: `[N]`, one per value, or None.
        lengths: `[F * B]` (or `[F, B]`) integers that sum to N.
        offsets: `[F * B + 1]` integers from 0 to N. One of lengths and offsets is enough.
        stride: B, the number of samples; follows from lengths or offsets when left out.
        stride_per_key_per_rank: `[F][R]`, number of bags of each feature from each rank, for a variable batch:
            features have different numbers of bags. Lengths are then `[sum of B_f]`. On one rank `[[B_0], ...]`.
        length_per_key: ids of each feature, if the caller knows them; this avoids a wait on CUDA.
        offset_per_key: `[F + 1]` their running sum.
        stride_per_key, lengths_offset_per_key, index_per_key, jt_dict: accepted as TorchRec does; derived here,
            and rejected if they differ.
        inverse_indices: for a variable batch, (keys, `[keys, B]` integers): which bag of each key belongs to each
            sample of the full batch. A pooled lookup expands its rows by them.

    Raises:
        ValueError: shapes, types or devices that do not belong together; on CPU also negative lengths,
            lengths that do not sum to N, offsets that fall. The error names feature and sample.

    >>> ids = torch.tensor([10, 11, 12, 3, 4, 5, 6, 7])
    >>> kjt = KeyedJaggedTensor(["movie", "genre"], ids, lengths=torch.tensor([2, 0, 1, 1, 1, 3]))
    >>> kjt
    KeyedJaggedTensor(2 features x 3 samples, 8 ids, int64)
      movie  [10 11] []  [12]
      genre  [3]     [4] [5 6 7]
    >>> kjt["genre"].to_dense()[2]
    tensor([5, 6, 7])

    A variable batch: both samples are of one user, whose bag is stored once.

    >>> kjt = KeyedJaggedTensor(
    ...     ["user", "item"],
    ...     torch.tensor([7, 8, 1, 2]),
    ...     lengths=torch.tensor([2, 1, 1]),
    ...     stride_per_key_per_rank=[[1], [2]],
    ...     inverse_indices=(["user", "item"], torch.tensor([[0, 0], [0, 1]])),
    ... )
    >>> kjt.stride(), kjt.stride_per_key()
    (2, [1, 2])
    """

    _FIELDS: ClassVar[tuple[str, ...]] = (*JaggedStorage._FIELDS, "_inverse")

    _stride: int | None
    _strides: list[list[int]] | None
    _inverse: Tensor | None
    _inverse_keys: list[str] | None
    _length_per_key: list[int] | None
    # derived from the others when first asked for
    _stride_per_key: list[int] | None = None
    _jt_dict: dict[str, JaggedTensor] | None = None

    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: list[list[int]] | Tensor | None = None,
        stride_per_key: list[int] | None = None,
        length_per_key: list[int] | None = None,
        lengths_offset_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> None:
        keys = checks.check_keys(keys)
        values, weights, lengths, offsets = checks.check_parts(values, weights, lengths, offsets)
        if lengths is None and offsets is None:
            if keys:
                raise ValueError(f"a KeyedJaggedTensor of {len(keys)} keys needs lengths or offsets: give one")
            lengths = torch.empty(0, dtype=torch.int32, device=values.device)
        strides, inverse_keys, inverse = None, None, None
        if inverse_indices is not None:
            inverse_keys, inverse = checks.check_inverse(inverse_indices, values)
        if stride is not None:
            stride = checks.check_count("stride", stride)
        if stride_per_key_per_rank is not None:
            strides = checks.check_strides(keys, stride_per_key_per_rank)
            bags = [sum(ranks) for ranks in strides]
            checks.check_bags(lengths, offsets, keys, bags)
            if stride is not None and inverse is not None and stride != inverse.shape[1]:
                raise ValueError(
                    f"stride is {stride}, but inverse_indices has {inverse.shape[1]} samples: leave stride out"
                )
            stride = _full_stride(bags, inverse) if stride is None else stride
        else:
            num_bags = checks.check_bags(lengths, offsets, keys, stride)
            stride = num_bags // max(len(keys), 1) if stride is None else stride
            bags = [stride] * len(keys)
        fix = "for features with different numbers of bags pass stride_per_key_per_rank=[[bags], ...]"
        checks.check_same("stride_per_key", stride_per_key, bags, fix)
        if lengths_offset_per_key is not None:
            checks.check_same("lengths_offset_per_key", lengths_offset_per_key, [0, *accumulate(bags)])
        if index_per_key is not None:
            checks.check_same("index_per_key", index_per_key, checks.index_keys(keys))
        known = checks.check_host_counts(keys, values, length_per_key, offset_per_key)
        if checks.readable(values):
            counted = checks.check_numbers(keys, values, lengths, offsets, stride if strides is None else bags)
            checks.check_same("length_per_key", known, counted)
            known = counted
            if inverse is not None and inverse_keys is not None:
                checks.check_inverse_range(inverse_keys, inverse, dict(zip(keys, bags, strict=True)))
        self._fill(keys, values, weights, lengths, offsets, stride, known, strides, inverse, inverse_keys)

    def _fill(  # type: ignore[override]
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        length_per_key: list[int] | None = None,
        strides: list[list[int]] | None = None,
        inverse: Tensor | None = None,
        inverse_keys: list[str] | None = None,
    ) -> None:
        super()._fill(values, weights, lengths, offsets)
        self._keys = keys
        self._stride = stride
        self._strides = strides
        self._inverse = inverse
        self._inverse_keys = inverse_keys
        self._length_per_key = length_per_key

    # -- built from ---------------------------------------------------------------------------------

    @staticmethod
    def from_offsets_sync(
        keys: list[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: list[list[int]] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> KeyedJaggedTensor:
        """From offsets; reads the counts of each feature at once, for which CUDA waits."""
        return KeyedJaggedTensor(
            keys, values, weights, None, offsets, stride, stride_per_key_per_rank, inverse_indices=inverse_indices
        ).sync()

    @staticmethod
    def from_lengths_sync(
        keys: list[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: list[list[int]] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> KeyedJaggedTensor:
        """From lengths; reads the counts of each feature at once, for which CUDA waits."""
        return KeyedJaggedTensor(
            keys, values, weights, lengths, None, stride, stride_per_key_per_rank, inverse_indices=inverse_indices
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One feature from each JaggedTensor; where they differ in bags, a variable batch.

        >>> bags = JaggedTensor(torch.tensor([1, 2]), lengths=torch.tensor([0, 2]))
        >>> KeyedJaggedTensor.from_jt_dict({"a": bags, "b": bags}).lengths()
        tensor([0, 2, 0, 2])
        """
        return _from_jt_dict(jt_dict)

    @staticmethod
    def concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """The features of several batches of the same samples, side by side.

        >>> kjt = KeyedJaggedTensor(["a"], torch.tensor([1, 2]), lengths=torch.tensor([2, 0]))
        >>> KeyedJaggedTensor.concat([kjt, kjt.permute([])]).keys()
        ['a']
        """
        return _concat(kjt_list)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """No features and no samples."""
        bags = JaggedTensor.empty(is_weighted, device, values_dtype, weights_dtype, lengths_dtype)
        return KeyedJaggedTensor([], bags.values(), bags.weights_or_none(), bags.lengths(), stride=0)

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor, device: torch.device | None = None) -> KeyedJaggedTensor:
        """Without a device: no features, but the types, device and samples of `kjt`.

        With one: its keys and counts, and buffers of its shapes on that device, to `copy_` into.
        """
        return _empty_like(kjt, device)

    def copy_(self, kjt: KeyedJaggedTensor, non_blocking: bool = False) -> KeyedJaggedTensor:
        """Overwrites the tensors held here, in place, with those of a batch of the same keys and shapes.

        Raises:
            ValueError: other keys or samples, shapes that differ, weights or inverse indices in only one of the two.
        """
        if isinstance(kjt, KeyedJaggedTensor) and (kjt._keys != self._keys or kjt.stride() != self.stride()):
            raise ValueError(
                f"copy_ needs the same keys and samples, here {self._keys} x {self.stride()}, "
                f"given {kjt._keys} x {kjt.stride()}"
            )
        super().copy_(kjt, non_blocking)
        self._strides, self._stride_per_key = kjt._strides, kjt._stride_per_key
        self._inverse_keys = kjt._inverse_keys
        self._length_per_key, self._offset_per_key = kjt._length_per_key, kjt._offset_per_key
        self._jt_dict = None
        return self

    def validate(self) -> Self:
        """Checks everything on any device, as the constructor does on CPU, and repeated keys. Returns itself.

        Raises:
            ValueError: naming the feature and the sample that are wrong; see `validate_keyed_jagged_tensor`.
        """
        checks.index_keys(checks.check_keys(self._keys))
        return super().validate()

    def _build(self, inverse: Tensor | None = None, **parts: Any) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            self._keys,
            **parts,
            stride=self._stride,
            stride_per_key_per_rank=self._strides,
            length_per_key=self._length_per_key,
            offset_per_key=self._offset_per_key,
            inverse_indices=None if inverse is None else (self._inverse_keys or [], inverse),
        )

    # -- keys, samples, and the position of each key's ids ------------------------------------------
    #
    # Counts on the host (`length_per_key`, `offset_per_key`) are read from the lengths at first use and then stored. On
    # CUDA this waits for the device. To avoid the wait, pass them to the constructor.

    def stride(self) -> int:
        """B, the number of samples; of a variable batch, those of the inverse indices or the most bags of a key."""
        if self._stride is None:  # rebuilt by a pytree, whose leaves may have changed
            if self._strides is not None:
                self._stride = _full_stride(self.stride_per_key(), self._inverse)
            else:
                num_bags = checks.check_bags(self._lengths, self._offsets, self._keys, None)
                self._stride = num_bags // max(len(self._keys), 1)
        return self._stride

    def stride_per_key(self) -> list[int]:
        """Bags of each feature `[F]`: B for all, or B_f in a variable batch."""
        if self._stride_per_key is None:
            if self._strides is None:
                return [self.stride()] * len(self._keys)
            self._stride_per_key = [sum(ranks) for ranks in self._strides]
        return self._stride_per_key

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Bags of each feature from each rank `[F][R]`, as given; empty unless `variable_stride_per_key`."""
        return [] if self._strides is None else self._strides

    def variable_stride_per_key(self) -> bool:
        """Whether features have different numbers of bags (`stride_per_key_per_rank` was passed)."""
        return self._strides is not None

    def inverse_indices(self) -> tuple[list[str], Tensor]:
        """(keys, `[keys, B]`): which bag of a key belongs to each sample; ValueError when there are none."""
        if self._inverse is None:
            raise ValueError("this KeyedJaggedTensor has no inverse indices: ask inverse_indices_or_none()")
        return self._inverse_keys or [], self._inverse

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """The same, or None."""
        return None if self._inverse is None else self.inverse_indices()

    def length_per_key(self) -> list[int]:
        """Ids of each feature `[F]`. On CUDA the first call waits for the device."""
        if self._length_per_key is None:
            if self._values.is_meta:
                raise ValueError("length_per_key needs the lengths, which a tensor on 'meta' does not have")
            stride = self.stride() if self._strides is None else self.stride_per_key()
            self._length_per_key = checks.sums_per_key(self.lengths(), len(self._keys), stride)
        return self._length_per_key

    def length_per_key_or_none(self) -> list[int] | None:
        """The same if known already, else None."""
        return self._length_per_key

    def offset_per_key_or_none(self) -> list[int] | None:
        """The same if known already, else None."""
        return self._offset_per_key

    def lengths_offset_per_key(self) -> list[int]:
        """Where each feature's lengths start, and at last their number: `[F + 1]`."""
        return [0, *accumulate(self.stride_per_key())]

    def sync(self) -> Self:
        """Reads `length_per_key` and `offset_per_key` now; returns itself."""
        self.offset_per_key()
        return self

    def unsync(self) -> Self:
        """Forgets them; returns itself."""
        self._length_per_key = None
        self._offset_per_key = None
        return self

    # -- the same bags arranged in another way; inverse indices name their features, so they stay with every part --

    def split(self, segments: list[int]) -> list[Self]:
        """Consecutive groups of features, as views.

        Args:
            segments: number of features in each group; they sum to F.

        >>> from recshard_lab import KeyedJaggedTensor
        >>> kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
        >>> [part.keys() for part in kjt.split([1, 0, 1])]
        [['a'], [], ['b']]
        """
        segments = checks.check_list("segments", segments)
        for segment in segments:
            checks.check_count("each of segments", segment)
        if sum(segments) != len(self._keys):
            raise ValueError(
                f"segments {segments} sum to {sum(segments)}, but there are {len(self._keys)} keys: "
                f"every key belongs to one segment"
            )
        ends = list(accumulate(segments))
        return [self._slice(end - segment, end) for segment, end in zip(segments, ends, strict=True)]

    def _slice(self, start: int, end: int) -> Self:
        offsets, bags = self.offset_per_key(), self.lengths_offset_per_key()
        lower, upper = offsets[start], offsets[end]
        return self._unchecked(
            self._keys[start:end],
            self._values[lower:upper],
            None if self._weights is None else self._weights[lower:upper],
            self.lengths().reshape(-1)[bags[start] : bags[end]],
            None,
            self.stride(),
            self.length_per_key()[start:end],
            None if self._strides is None else self._strides[start:end],
            self._inverse,
            self._inverse_keys,
        )

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> Self:
        """Features in another order; repeats and omissions are fine.

        Args:
            indices: positions of the features to keep.
            indices_tensor: the same as a tensor on this device. If you pass it, no copy to a GPU is needed.

        >>> from recshard_lab import KeyedJaggedTensor
        >>> kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
        >>> kjt.permute([1, 0]).values()
        tensor([2, 3, 1])
        """
        indices = checks.check_list("indices", indices)
        for index in indices:
            if not isinstance(index, int | torch.SymInt) or not 0 <= index < len(self._keys):
                raise ValueError(f"index {index} in permute({indices}) is not one of 0 to {len(self._keys) - 1}")
        twin = checks.check_integers("indices_tensor", indices_tensor, self._values)
        if twin is not None and (twin.shape != (len(indices),) or (checks.readable(twin) and twin.tolist() != indices)):
            raise ValueError(f"indices_tensor {twin} and indices {indices} differ: give the same order twice")
        offsets, counts = self.offset_per_key(), self.length_per_key()
        slices = [(offsets[index], offsets[index + 1]) for index in indices] or [(0, 0)]
        return self._unchecked(
            [self._keys[index] for index in indices],
            torch.cat([self._values[lower:upper] for lower, upper in slices]),
            None if self._weights is None else torch.cat([self._weights[a:b] for a, b in slices]),
            self._permuted_lengths(indices, indices_tensor),
            None,
            self.stride(),
            [counts[index] for index in indices],
            None if self._strides is None else [self._strides[index] for index in indices],
            self._inverse,
            self._inverse_keys,
        )

    def _permuted_lengths(self, indices: list[int], indices_tensor: Tensor | None) -> Tensor:
        lengths = self.lengths()
        if self._strides is not None:
            bags = self.lengths_offset_per_key()
            parts = [lengths[bags[index] : bags[index + 1]] for index in indices]
            return torch.cat(parts or [lengths[:0]])
        if indices_tensor is None:
            indices_tensor = torch.tensor(indices, dtype=torch.int64, device=self.device())
        return lengths.reshape(len(self._keys), self.stride()).index_select(0, indices_tensor).reshape(-1)

    def flatten_lengths(self) -> Self:
        """The same with lengths as `[F * B]`, where they were given as `[F, B]`."""
        flat = self._apply(lambda tensor: tensor)
        flat._lengths, flat._offsets = self.lengths().reshape(-1), None
        return flat

    def to(self, device: Device, non_blocking: bool = False, dtype: torch.dtype | None = None) -> Self:
        """The same on another device; `dtype` is for the weights."""
        there = super().to(device, non_blocking)
        if dtype is not None and there._weights is not None:
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ValueError(f"dtype is that of the weights, such as torch.float32, got {dtype!r}")
            there._weights = there._weights.to(dtype)
        return there

    def _apply(self, move: Callable[[Tensor], Tensor]) -> Self:
        tensors = {name.lstrip("_"): move(tensor) for name, tensor in self._tensors().items()}
        return self._unchecked(
            self._keys,
            **tensors,
            stride=self._stride,
            length_per_key=self._length_per_key,
            strides=self._strides,
            inverse_keys=self._inverse_keys,
        )

    # -- read ---------------------------------------------------------------------------------------

    def __getitem__(self, key: str) -> JaggedTensor:
        """One feature's bags, as views. An unknown key raises an error that is KeyError and ValueError."""
        return self._feature(self._place(key))

    def _feature(self, place: int) -> JaggedTensor:
        """The bags of the feature at a position, as views."""
        start, count = self.offset_per_key()[place], self.length_per_key()[place]
        if self._strides is None:
            first, last = place * self.stride(), (place + 1) * self.stride()
        else:
            first, last = self.lengths_offset_per_key()[place : place + 2]
        return JaggedTensor._unchecked(
            self._values.narrow(0, start, count),  # one symbol for both sizes in an exported program
            None if self._weights is None else self._weights.narrow(0, start, count),
            self.lengths().reshape(-1)[first:last],
        )

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Every feature's bags by name, as views; made once.

        Args:
            compute_offsets: work out the offsets of all features now, together, instead of one by one when asked.
        """
        if self._jt_dict is None:
            self._jt_dict = {key: self[key] for key in self._keys}
            if compute_offsets and self._strides is None and self._keys:
                lengths = self.lengths().reshape(len(self._keys), self.stride())
                narrow = lengths.dtype == torch.int32 and self._values.shape[0] <= 2**31 - 1
                offsets = functional.pad(lengths.cumsum(1, dtype=torch.int32 if narrow else torch.int64), (1, 0))
                for part, own in zip(self._jt_dict.values(), offsets.unbind(), strict=True):
                    part._offsets = own
        if compute_offsets and self._strides is not None:
            for part in self._jt_dict.values():
                part.offsets()
        return self._jt_dict

    def clear_storage(self) -> None:
        """Frees the memory of values, weights, lengths and offsets, also for other views of it. Keeps the keys."""
        for name, tensor in self._tensors().items():
            if name != "_inverse":
                tensor.untyped_storage().resize_(0)
        self._jt_dict = None


# -- parts of the above that are one node in an fx graph --------------------------------------------


@wrap
def _from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
    if not isinstance(jt_dict, Mapping):
        raise ValueError(f"jt_dict must be a dict of JaggedTensors, got {type(jt_dict).__name__}")
    if not jt_dict:
        raise ValueError("jt_dict is empty: use KeyedJaggedTensor.empty() for a batch without features")
    keys, parts = checks.check_keys(list(jt_dict)), checks.check_all("jt_dict", list(jt_dict.values()), JaggedTensor)
    strides = [part.lengths().shape[0] for part in parts]
    weighted = checks.all_or_none([part.weights_or_none() is not None for part in parts], keys)
    return KeyedJaggedTensor._unchecked(
        keys=keys,
        values=checks.join("values", [part.values() for part in parts]),
        weights=checks.join("weights", [part.weights() for part in parts]) if weighted else None,
        lengths=torch.cat([part.lengths() for part in parts]),
        stride=max(strides),
        length_per_key=[part.values().shape[0] for part in parts],
        strides=[[bags] for bags in strides] if len(set(strides)) > 1 else None,
    )


@wrap
def _concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    if not checks.check_all("kjt_list", kjt_list, KeyedJaggedTensor):
        raise ValueError("kjt_list is empty: give at least one KeyedJaggedTensor")
    if len({kjt.device() for kjt in kjt_list}) > 1:
        raise ValueError(f"all must be on one device, got {[str(kjt.device()) for kjt in kjt_list]}: move them")
    strides = _common_strides(kjt_list)
    inverse_keys, inverse = _common_inverse(kjt_list)
    names = [f"kjt_list[{place}]" for place in range(len(kjt_list))]
    weighted = checks.all_or_none([kjt.weights_or_none() is not None for kjt in kjt_list], names)
    counts = [count for kjt in kjt_list for count in kjt._length_per_key or ()]
    return KeyedJaggedTensor._unchecked(
        keys=[key for kjt in kjt_list for key in kjt._keys],
        values=checks.join("values", [kjt._values for kjt in kjt_list]),
        weights=checks.join("weights", [kjt.weights() for kjt in kjt_list]) if weighted else None,
        lengths=torch.cat([kjt.lengths().reshape(-1) for kjt in kjt_list]),
        stride=max(kjt.stride() for kjt in kjt_list),
        length_per_key=counts if all(kjt._length_per_key is not None for kjt in kjt_list) else None,
        strides=strides,
        inverse=inverse,
        inverse_keys=inverse_keys,
    )


@wrap
def _empty_like(kjt: KeyedJaggedTensor, device: torch.device | None) -> KeyedJaggedTensor:
    if not isinstance(kjt, KeyedJaggedTensor):
        raise ValueError(f"kjt must be a KeyedJaggedTensor, got {type(kjt).__name__}")
    if device is None:
        return kjt.permute([])
    there = device_named(device)
    return kjt._apply(lambda tensor: torch.empty_like(tensor, device=there))


# -- pytree: context is (keys, stride if it does not follow from the tensors, names of the tensors, ...) -------


def _flatten(kjt: KeyedJaggedTensor) -> tuple[list[Tensor], tuple[Any, ...]]:
    tensors = kjt._tensors()
    derived = kjt._inverse is not None or (kjt._keys and kjt._strides is None)
    strides = None if kjt._strides is None else tuple(map(tuple, kjt._strides))
    inverse_keys = None if kjt._inverse_keys is None else tuple(kjt._inverse_keys)
    return list(tensors.values()), (
        tuple(kjt._keys),
        None if derived else kjt._stride,
        tuple(tensors),
        strides,
        inverse_keys,
    )


def _unflatten(leaves: Sequence[Any], context: tuple[Any, ...]) -> KeyedJaggedTensor:
    keys, stride, names, strides, inverse_keys = context
    tensors = {name.lstrip("_"): leaf for name, leaf in zip(names, leaves, strict=True)}
    return KeyedJaggedTensor._unchecked(
        list(keys),
        **tensors,
        stride=stride,
        strides=None if strides is None else [list(ranks) for ranks in strides],
        inverse_keys=None if inverse_keys is None else list(inverse_keys),
    )


register(KeyedJaggedTensor, _flatten, _unflatten, lambda context: context[2])


# A complete check of a batch that was built without checks, or that is on a device.


class TableRange(Protocol):
    """What the validator reads of a table's config."""

    num_embeddings: int
    feature_names: list[str]


def validate_keyed_jagged_tensor(kjt: KeyedJaggedTensor, configs: Sequence[TableRange] | None = None) -> bool:
    """Checks every key, length, offset, stride and inverse index, on any device.

    Constructors check values on the CPU only, because on a GPU this makes the host wait.

    Args:
        kjt: the batch; not on ``meta``, which has no values.
        configs: tables whose sizes the ids must fit, such as `EmbeddingBagConfig`; None skips that.

    Returns:
        Whether the ids of all features are rows of their tables. A warning is logged for each feature with others.

    Raises:
        ValueError: which feature and which sample are wrong, and how: lengths that are negative or do not sum to
            the values, offsets that fall or start late, lengths and offsets that disagree, weights of another
            size, a key that occurs twice, strides and bags that differ, an inverse index that names no bag,
            counts on the host that are not those of the lengths, parts on several devices.

    >>> validate_keyed_jagged_tensor(KeyedJaggedTensor(["a"], torch.tensor([5]), lengths=torch.tensor([1, 0])))
    True
    """
    if not isinstance(kjt, KeyedJaggedTensor):
        raise ValueError(f"expected a KeyedJaggedTensor, got {type(kjt).__name__}")
    kjt.validate()
    outside = [] if configs is None else _outside(kjt, configs)
    for warning in outside:
        logger.warning(warning)
    return not outside


def _outside(kjt: KeyedJaggedTensor, configs: Sequence[TableRange]) -> list[str]:
    """One warning for each feature with ids that are not rows of its table."""
    rows = {feature: config.num_embeddings for config in configs for feature in config.feature_names}
    found = []
    for key in filter(rows.__contains__, kjt.keys()):
        ids = kjt[key].values()
        if ids.numel():
            low, high = map(int, torch.stack(ids.aminmax()))
            if low < 0 or high >= rows[key]:
                found.append(f"feature {key!r} has ids from {low} to {high}, but its table has {rows[key]} rows")
    return found


def _common_strides(batches: Sequence[KeyedJaggedTensor]) -> list[list[int]] | None:
    """Strides of joined batches; None if all have the same samples."""
    if not any(batch.variable_stride_per_key() for batch in batches):
        strides = [batch.stride() for batch in batches]
        if len(set(strides)) > 1:
            raise ValueError(f"all must have the same stride (samples), got {strides}")
        return None
    joined = []
    for batch in batches:
        joined += batch.stride_per_key_per_rank() or [[bags] for bags in batch.stride_per_key()]
    if len({len(ranks) for ranks in joined}) > 1:
        raise ValueError(f"stride_per_key_per_rank must name the same ranks in all, got {joined}")
    return joined


def _common_inverse(batches: Sequence[KeyedJaggedTensor]) -> tuple[list[str] | None, Tensor | None]:
    """Inverse indices of joined batches. All batches have them, for the same samples, or none has."""
    found = [batch.inverse_indices_or_none() for batch in batches]
    given = [pair for pair in found if pair is not None]
    if not given:
        return None, None
    if len(given) < len(found) or len({index.shape[1] for _, index in given}) > 1:
        shapes = [None if pair is None else list(pair[1].shape) for pair in found]
        raise ValueError(f"all or none must have inverse_indices, of the same samples, got shapes {shapes}")
    rows = {key: row for keys, index in given for key, row in zip(keys, index, strict=True)}
    return list(rows), torch.stack(list(rows.values())) if rows else given[0][1]
