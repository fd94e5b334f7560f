"""The keys of a KeyedJaggedTensor, its number of samples, and the position of each key's ids.

Counts on the host (`length_per_key`, `offset_per_key`) are read from the lengths at first use and then stored. On
CUDA this waits for the device. To avoid the wait, pass them to the constructor.

Shape letters: F features (keys), B samples (stride), B_f bags of feature f, N values.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor

from recshard_lab.sparse import checks, keyed_checks, variable_batch
from recshard_lab.sparse.storage import JaggedStorage

if TYPE_CHECKING:
    from recshard_lab.sparse.jagged_tensor import JaggedTensor


class KeyedStorage(JaggedStorage):
    """Bags by feature and sample, and the counts that locate them. Abstract: use KeyedJaggedTensor."""

    _FIELDS: ClassVar[tuple[str, ...]] = (*JaggedStorage._FIELDS, "_inverse")

    _keys: list[str]
    _stride: int | None
    _strides: list[list[int]] | None
    _stride_per_key: list[int] | None
    _inverse: Tensor | None
    _inverse_keys: list[str] | None
    _length_per_key: list[int] | None
    _offset_per_key: list[int] | None
    _index_per_key: dict[str, int] | None
    _jt_dict: dict[str, JaggedTensor] | None

    def _fill(
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
        self._keys = keys
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        self._stride = stride
        self._strides = strides
        self._stride_per_key = None
        self._inverse = inverse
        self._inverse_keys = inverse_keys
        self._length_per_key = length_per_key
        self._offset_per_key = None
        self._index_per_key = None
        self._jt_dict = None

    @classmethod
    def _unchecked(cls, *args: Any, **kwargs: Any) -> Self:
        """One without a look at anything, for parts that are right by construction; arguments as of `_fill`."""
        self = cls.__new__(cls)
        self._fill(*args, **kwargs)
        return self

    def keys(self) -> list[str]:
        """The F feature names."""
        return self._keys

    def stride(self) -> int:
        """B, the number of samples; of a variable batch, those of the inverse indices or the most bags of a key."""
        if self._stride is None:  # rebuilt by a pytree, whose leaves may have changed
            if self._strides is not None:
                self._stride = variable_batch.full_stride(None, self.stride_per_key(), self._inverse)
            else:
                self._stride = keyed_checks.stride_of(self._keys, self._lengths, self._offsets, None)
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

    def offset_per_key(self) -> list[int]:
        """Where each feature's ids start, and at last N: `[F + 1]`."""
        if self._offset_per_key is None:
            self._offset_per_key = [0, *accumulate(self.length_per_key())]
        return self._offset_per_key

    def offset_per_key_or_none(self) -> list[int] | None:
        """The same if known already, else None."""
        return self._offset_per_key

    def lengths_offset_per_key(self) -> list[int]:
        """Where each feature's lengths start, and at last their number: `[F + 1]`."""
        return [0, *accumulate(self.stride_per_key())]

    def index_per_key(self) -> dict[str, int]:
        """Position of each key; ValueError when one stands twice."""
        if self._index_per_key is None:
            self._index_per_key = checks.index_keys(self._keys)
        return self._index_per_key

    def sync(self) -> Self:
        """Reads `length_per_key` and `offset_per_key` now; returns itself."""
        self.offset_per_key()
        return self

    def unsync(self) -> Self:
        """Forgets them; returns itself."""
        self._length_per_key = None
        self._offset_per_key = None
        return self
