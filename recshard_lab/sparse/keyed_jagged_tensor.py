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

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import wrap
from torch.nn import functional

from recshard_lab.sparse import checks, drawing, full_text, keyed_checks, variable_batch
from recshard_lab.sparse.jagged_tensor import JaggedTensor
from recshard_lab.sparse.keyed_arrangement import KeyedArrangement
from recshard_lab.sparse.pytree import register
from recshard_lab.sparse.storage import device_named


class KeyedJaggedTensor(KeyedArrangement):
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
        checks.check_values(values, weights)
        lengths = checks.check_integers("lengths", lengths, values)
        offsets = checks.check_integers("offsets", offsets, values)
        if lengths is None and offsets is None:
            if keys:
                raise ValueError(f"a KeyedJaggedTensor of {len(keys)} keys needs lengths or offsets: give one")
            lengths = torch.empty(0, dtype=torch.int32, device=values.device)
        values, weights = checks.without_spare(values, weights, lengths, offsets)
        strides, bags, inverse_keys, inverse = None, None, None, None
        if inverse_indices is not None:
            inverse_keys, inverse = variable_batch.check_inverse(inverse_indices, values)
        if stride_per_key_per_rank is not None:
            strides = variable_batch.strides_from(keys, stride_per_key_per_rank)
            bags = [sum(ranks) for ranks in strides]
            variable_batch.check_bags(keys, lengths, offsets, bags)
            stride = variable_batch.full_stride(stride, bags, inverse)
        else:
            stride = keyed_checks.stride_of(keys, lengths, offsets, stride)
        keyed_checks.check_derived(keys, stride, bags, stride_per_key, lengths_offset_per_key, index_per_key)
        known = keyed_checks.check_host_counts(keys, values, length_per_key, offset_per_key)
        if checks.readable(values):
            counted = keyed_checks.check_numbers(keys, values, lengths, offsets, stride if bags is None else bags)
            if known is not None and known != counted:
                raise ValueError(f"length_per_key is {known}, but the lengths sum to {counted}: leave it out")
            known = counted
            if inverse is not None and inverse_keys is not None:
                numbers = bags if bags is not None else [stride] * len(keys)
                variable_batch.check_inverse_range(inverse_keys, inverse, dict(zip(keys, numbers, strict=True)))
        self._fill(keys, values, weights, lengths, offsets, stride, known, strides, inverse, inverse_keys)

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
        return KeyedJaggedTensor(
            keys=[],
            values=torch.empty(0, dtype=values_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
            stride=0,
        )

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

    def validate(self) -> KeyedJaggedTensor:
        """Looks at everything, on any device, as the constructor does on CPU, and at repeated keys; returns itself.

        Raises:
            ValueError: naming the feature and the sample that are wrong; see `validate_keyed_jagged_tensor`.
        """
        from recshard_lab.sparse.validator import validate_keyed_jagged_tensor

        validate_keyed_jagged_tensor(self)
        return self

    # -- read ---------------------------------------------------------------------------------------

    def __getitem__(self, key: str) -> JaggedTensor:
        """One feature's bags, as views. An unknown key raises an error that is KeyError and ValueError."""
        place = self.index_per_key().get(key) if isinstance(key, str) else None
        if place is None:
            raise checks.unknown_key(key, self._keys)
        return self._feature(place)

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

    def __str__(self) -> str:
        if not full_text.has_values(*self._tensors().values()):
            return repr(self)
        return full_text.keyed_jagged_text(self)

    def __repr__(self) -> str:
        return drawing.jagged_text("KeyedJaggedTensor", self._keys, self)

    def _repr_html_(self) -> str | None:
        return drawing.jagged_html("KeyedJaggedTensor", self._keys, self)


# -- parts of the above that are one node in an fx graph --------------------------------------------


@wrap
def _from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
    if not isinstance(jt_dict, Mapping):
        raise ValueError(f"jt_dict must be a dict of JaggedTensors, got {type(jt_dict).__name__}")
    if not jt_dict:
        raise ValueError("jt_dict is empty: use KeyedJaggedTensor.empty() for a batch without features")
    keys, parts = checks.check_keys(list(jt_dict)), checks.check_all("jt_dict", list(jt_dict.values()), JaggedTensor)
    strides = [part.lengths().shape[0] for part in parts]
    weighted = keyed_checks.all_or_none([part.weights_or_none() is not None for part in parts], keys)
    return KeyedJaggedTensor._unchecked(
        keys=keys,
        values=keyed_checks.join("values", [part.values() for part in parts]),
        weights=keyed_checks.join("weights", [part.weights() for part in parts]) if weighted else None,
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
    strides = keyed_checks.common_strides(kjt_list)
    inverse_keys, inverse = keyed_checks.common_inverse(kjt_list)
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
        stride=max(kjt.stride() for kjt in kjt_list),
        length_per_key=counts,
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
