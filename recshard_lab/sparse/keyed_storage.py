"""Which keys a KeyedJaggedTensor has, how many samples, and where each key's ids lie.

Counts on the host (`length_per_key`, `offset_per_key`) are read from the lengths when first asked for
and kept; on CUDA that reading waits for the device, so whoever knows them hands them over.

Shape letters: F features (keys), B samples (stride), N values.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from torch import Tensor

from recshard_lab.sparse import checks, keyed_checks
from recshard_lab.sparse.storage import JaggedStorage

if TYPE_CHECKING:
    from typing import Self

    from recshard_lab.sparse.jagged_tensor import JaggedTensor


class KeyedStorage(JaggedStorage):
    """Bags by feature and sample, and the counts that say what is where. Abstract: use KeyedJaggedTensor."""

    _keys: list[str]
    _stride: int | None
    _length_per_key: list[int] | None
    _offset_per_key: list[int] | None
    _index_per_key: dict[str, int] | None
    _jt_dict: dict[str, JaggedTensor] | None

    def _fill(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        stride: int | None,
        length_per_key: list[int] | None,
    ) -> None:
        self._keys = keys
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        self._stride = stride
        self._length_per_key = length_per_key
        self._offset_per_key = None
        self._index_per_key = None
        self._jt_dict = None

    def keys(self) -> list[str]:
        """The F feature names."""
        return self._keys

    def stride(self) -> int:
        """B, the number of samples."""
        if self._stride is None:  # rebuilt by a pytree, whose leaves may have changed
            self._stride = keyed_checks.stride_of(self._keys, self._lengths, self._offsets, None)
        return self._stride

    def stride_per_key(self) -> list[int]:
        """B for each feature."""
        return [self.stride()] * len(self._keys)

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """B for each feature, in a list of one."""
        return [[self.stride()] for _ in self._keys]

    def variable_stride_per_key(self) -> bool:
        """Whether features have batches of different sizes: never, so far."""
        return False

    def inverse_indices(self) -> tuple[list[str], Tensor]:
        """ValueError: they belong to batches of different sizes, which are not supported yet."""
        raise ValueError("this KeyedJaggedTensor has no inverse indices: ask inverse_indices_or_none()")

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """None."""
        return None

    def length_per_key(self) -> list[int]:
        """Ids of each feature `[F]`. On CUDA the first call waits for the device."""
        if self._length_per_key is None:
            if self._values.is_meta:
                raise ValueError("length_per_key needs the lengths, which a tensor on 'meta' does not have")
            rows = self.lengths().reshape(len(self._keys), self.stride())
            self._length_per_key = rows.sum(dim=1).tolist()
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
        """Where each feature's lengths start, and at last F * B: `[F + 1]`."""
        return [place * self.stride() for place in range(len(self._keys) + 1)]

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
