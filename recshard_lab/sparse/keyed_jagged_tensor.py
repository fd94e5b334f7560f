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

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from recshard_lab.sparse import checks, drawing, keyed_checks
from recshard_lab.sparse.jagged_tensor import JaggedTensor
from recshard_lab.sparse.keyed_storage import KeyedStorage
from recshard_lab.sparse.pytree import register
from recshard_lab.sparse.storage import Device


class KeyedJaggedTensor(KeyedStorage):
    """A batch of sparse features: which ids each sample has of each feature.

    Args:
        keys: F feature names.
        values: `[N]` ids, feature-major.
        weights: `[N]`, one for each value, or None.
        lengths: `[F * B]` (or `[F, B]`) integers that sum to N.
        offsets: `[F * B + 1]` integers from 0 to N. One of lengths and offsets is enough.
        stride: B, the number of samples; follows from lengths or offsets when left out.
        length_per_key: ids of each feature, where the caller knows them; spares a wait on CUDA.
        offset_per_key: `[F + 1]` their running sum.
        index_per_key, jt_dict: accepted as TorchRec does, and rebuilt here.
        stride_per_key_per_rank, inverse_indices: batches of another size for each feature are not
            supported yet; refused unless None.

    Raises:
        ValueError: shapes, types or devices that do not belong together; on CPU also negative lengths,
            lengths that do not sum to N, offsets that fall. Says which feature and sample.

    >>> ids = torch.tensor([10, 11, 12, 3, 4, 5, 6, 7])
    >>> kjt = KeyedJaggedTensor(["movie", "genre"], ids, lengths=torch.tensor([2, 0, 1, 1, 1, 3]))
    >>> kjt
    KeyedJaggedTensor(2 features x 3 samples, 8 ids, int64)
      movie  [10 11] []  [12]
      genre  [3]     [4] [5 6 7]
    >>> kjt["genre"].to_dense()[2]
    tensor([5, 6, 7])
    """

    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: list[list[int]] | None = None,
        length_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> None:
        keyed_checks.refuse_variable_batch(stride_per_key_per_rank, inverse_indices)
        keys = checks.check_keys(keys)
        checks.check_values(values, weights)
        lengths = checks.check_integers("lengths", lengths, values)
        offsets = checks.check_integers("offsets", offsets, values)
        if lengths is None and offsets is None:
            if keys:
                raise ValueError(f"a KeyedJaggedTensor of {len(keys)} keys needs lengths or offsets: give one")
            lengths = torch.empty(0, dtype=torch.int32, device=values.device)
        stride = keyed_checks.stride_of(keys, lengths, offsets, stride)
        if index_per_key is not None and dict(index_per_key) != checks.index_keys(keys):
            raise ValueError(f"index_per_key {index_per_key} does not number the keys {keys}: leave it out")
        known = keyed_checks.check_host_counts(keys, values, length_per_key, offset_per_key)
        if checks.readable(values):
            counted = keyed_checks.check_numbers(keys, values, lengths, offsets, stride)
            if known is not None and known != counted:
                raise ValueError(f"length_per_key is {known}, but the lengths sum to {counted}: leave it out")
            known = counted
        self._fill(keys, values, weights, lengths, offsets, stride, known)

    @classmethod
    def _unchecked(
        cls,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        length_per_key: list[int] | None = None,
    ) -> KeyedJaggedTensor:
        """The same without a look at anything, for parts that are right by construction (each step's routing)."""
        self = cls.__new__(cls)
        self._fill(keys, values, weights, lengths, offsets, stride, length_per_key)
        return self

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
            keys,
            values,
            weights,
            None,
            offsets,
            stride,
            stride_per_key_per_rank,
            inverse_indices=inverse_indices,
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
            keys,
            values,
            weights,
            lengths,
            None,
            stride,
            stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One feature from each JaggedTensor; all must have the same number of bags.

        >>> bags = JaggedTensor(torch.tensor([1, 2]), lengths=torch.tensor([0, 2]))
        >>> KeyedJaggedTensor.from_jt_dict({"a": bags, "b": bags}).lengths()
        tensor([0, 2, 0, 2])
        """
        if not jt_dict:
            raise ValueError("jt_dict is empty: use KeyedJaggedTensor.empty() for a batch without features")
        keys, parts = list(jt_dict), list(jt_dict.values())
        strides = [part.lengths().shape[0] for part in parts]
        if len(set(strides)) > 1:
            raise ValueError(
                f"features must have the same number of bags, got {dict(zip(keys, strides, strict=True))}: "
                f"give empty bags to samples without ids"
            )
        weighted = keyed_checks.all_or_none([part.weights_or_none() is not None for part in parts], keys)
        return KeyedJaggedTensor._unchecked(
            keys=keys,
            values=keyed_checks.join("values", [part.values() for part in parts]),
            weights=keyed_checks.join("weights", [part.weights() for part in parts]) if weighted else None,
            lengths=torch.cat([part.lengths() for part in parts]),
            stride=strides[0],
            length_per_key=[part.values().shape[0] for part in parts],
        )

    @staticmethod
    def concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """The features of several batches of the same samples, side by side.

        >>> kjt = KeyedJaggedTensor(["a"], torch.tensor([1, 2]), lengths=torch.tensor([2, 0]))
        >>> KeyedJaggedTensor.concat([kjt, kjt.permute([])]).keys()
        ['a']
        """
        if not kjt_list:
            raise ValueError("kjt_list is empty: give at least one KeyedJaggedTensor")
        strides = [kjt.stride() for kjt in kjt_list]
        if len(set(strides)) > 1:
            raise ValueError(f"all must have the same stride (samples), got {strides}")
        names = [f"kjt_list[{place}]" for place in range(len(kjt_list))]
        weighted = keyed_checks.all_or_none([kjt.weights_or_none() is not None for kjt in kjt_list], names)
        counts: list[int] | None = []
        for kjt in kjt_list:
            counts = None if counts is None or kjt._length_per_key is None else counts + kjt._length_per_key
        return KeyedJaggedTensor._unchecked(
            keys=[key for kjt in kjt_list for key in kjt._keys],
            values=keyed_checks.join("values", [kjt._values for kjt in kjt_list]),
            weights=keyed_checks.join("weights", [kjt.weights() for kjt in kjt_list]) if weighted else None,
            lengths=torch.cat([kjt.lengths().reshape(-1) for kjt in kjt_list]),
            stride=strides[0],
            length_per_key=counts,
        )

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """No features and no samples."""
        return KeyedJaggedTensor(
            keys=[],
            values=torch.empty(0, dtype=values_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
            stride=0,
        )

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """No features, but the types, device and samples of `kjt`."""
        return kjt.permute([])

    # -- read ---------------------------------------------------------------------------------------

    def __getitem__(self, key: str) -> JaggedTensor:
        """One feature's bags, as views. An unknown key raises an error that is KeyError and ValueError."""
        place = self.index_per_key().get(key)
        if place is None:
            raise checks.unknown_key(key, self._keys)
        lower, upper = self.offset_per_key()[place : place + 2]
        stride = self.stride()
        return JaggedTensor._unchecked(
            self._values[lower:upper],
            None if self._weights is None else self._weights[lower:upper],
            self.lengths().reshape(-1)[place * stride : (place + 1) * stride],
        )

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Every feature's bags by name, as views."""
        if self._jt_dict is None:
            self._jt_dict = {key: self[key] for key in self._keys}
        return self._jt_dict

    # -- other arrangements -------------------------------------------------------------------------

    def split(self, segments: list[int]) -> list[KeyedJaggedTensor]:
        """Consecutive groups of features, as views.

        Args:
            segments: number of features in each group; they sum to F.

        >>> kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
        >>> [part.keys() for part in kjt.split([1, 0, 1])]
        [['a'], [], ['b']]
        """
        for segment in segments:
            checks.check_count("each of segments", segment)
        if sum(segments) != len(self._keys):
            raise ValueError(
                f"segments {segments} sum to {sum(segments)}, but there are {len(self._keys)} keys: "
                f"every key belongs to one segment"
            )
        ends = list(accumulate(segments))
        return [self._slice(end - segment, end) for segment, end in zip(segments, ends, strict=True)]

    def _slice(self, start: int, end: int) -> KeyedJaggedTensor:
        offsets, stride = self.offset_per_key(), self.stride()
        lower, upper = offsets[start], offsets[end]
        return KeyedJaggedTensor._unchecked(
            self._keys[start:end],
            self._values[lower:upper],
            None if self._weights is None else self._weights[lower:upper],
            self.lengths().reshape(-1)[start * stride : end * stride],
            None,
            stride,
            self.length_per_key()[start:end],
        )

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> KeyedJaggedTensor:
        """Features in another order; repeats and omissions are fine.

        Args:
            indices: positions of the wanted features.
            indices_tensor: the same on this device, where it is at hand; spares a copy to a GPU.

        >>> kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
        >>> kjt.permute([1, 0]).values()
        tensor([2, 3, 1])
        """
        for index in indices:
            if not 0 <= index < len(self._keys):
                raise ValueError(f"index {index} in permute({indices}) is not one of 0 to {len(self._keys) - 1}")
        if indices_tensor is None:
            indices_tensor = torch.tensor(indices, dtype=torch.int64, device=self.device())
        elif indices_tensor.numel() != len(indices):
            raise ValueError(f"indices_tensor has {indices_tensor.numel()} entries for {len(indices)} indices")
        offsets, counts = self.offset_per_key(), self.length_per_key()
        slices = [(offsets[index], offsets[index + 1]) for index in indices] or [(0, 0)]
        lengths = self.lengths().reshape(len(self._keys), self.stride())
        return KeyedJaggedTensor._unchecked(
            [self._keys[index] for index in indices],
            torch.cat([self._values[lower:upper] for lower, upper in slices]),
            None if self._weights is None else torch.cat([self._weights[a:b] for a, b in slices]),
            lengths.index_select(0, indices_tensor).reshape(-1),
            None,
            self.stride(),
            [counts[index] for index in indices],
        )

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """The same with lengths as `[F * B]`, where they were given as `[F, B]`."""
        return KeyedJaggedTensor._unchecked(
            self._keys,
            self._values,
            self._weights,
            self.lengths().reshape(-1),
            None,
            self.stride(),
            self._length_per_key,
        )

    def to(self, device: Device, non_blocking: bool = False, dtype: torch.dtype | None = None) -> KeyedJaggedTensor:
        """The same on another device; `dtype` is for the weights."""
        moved = self._apply(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        if dtype is not None and moved._weights is not None:
            moved._weights = moved._weights.to(dtype)
        return moved

    def pin_memory(self) -> KeyedJaggedTensor:
        """The same in pinned host memory, from which a copy to a GPU can run beside computation."""
        return self._apply(lambda tensor: tensor.pin_memory())

    def _apply(self, move: Callable[[Tensor], Tensor]) -> KeyedJaggedTensor:
        tensors = {name.lstrip("_"): move(tensor) for name, tensor in self._tensors().items()}
        return KeyedJaggedTensor._unchecked(
            self._keys, **tensors, stride=self._stride, length_per_key=self._length_per_key
        )

    def __repr__(self) -> str:
        return drawing.jagged_text("KeyedJaggedTensor", self._keys, self)

    def _repr_html_(self) -> str | None:
        return drawing.jagged_html("KeyedJaggedTensor", self._keys, self)


# -- pytree: context is (keys, stride where the lengths do not tell it, names of the tensors) -------


def _flatten(kjt: KeyedJaggedTensor) -> tuple[list[Tensor], tuple[Any, ...]]:
    tensors = kjt._tensors()
    stride = None if kjt._keys else kjt._stride
    return list(tensors.values()), (tuple(kjt._keys), stride, tuple(tensors))


def _unflatten(leaves: Sequence[Any], context: tuple[Any, ...]) -> KeyedJaggedTensor:
    keys, stride, names = context
    tensors = {name.lstrip("_"): leaf for name, leaf in zip(names, leaves, strict=True)}
    return KeyedJaggedTensor._unchecked(list(keys), **tensors, stride=stride)


register(KeyedJaggedTensor, _flatten, _unflatten, lambda context: context[2])
