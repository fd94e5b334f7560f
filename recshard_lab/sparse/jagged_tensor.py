"""JaggedTensor: the bags of one feature, one bag a sample.

    values   a b c d e f        [N]      everything, one after the other
    lengths  2   0 1 3          [B]      how many each sample holds
    offsets  0   2 2 3     6    [B + 1]  where each starts; the last entry is N

Shape letters: B bags (samples), N values, L longest bag, D columns of a vector value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from recshard_lab.sparse import checks, text
from recshard_lab.sparse.ops import complete_cumsum
from recshard_lab.sparse.trees import Traceable, register

_INT32_MAX = 2**31 - 1

Device = torch.device | str | int


class Tensors(metaclass=Traceable):
    """Values, and tensors beside them. Abstract: use JaggedTensor, KeyedJaggedTensor or KeyedTensor.

    The metaclass lets torch.fx trace a constructor that is given proxies.
    """

    _FIELDS: ClassVar[tuple[str, ...]] = ("_values",)

    _values: Tensor

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def values(self) -> Tensor:
        """All values: `[N, ...]` ids or vectors one after the other, or columns `[B, sum of D]` of a KeyedTensor."""
        return self._values

    def size_in_bytes(self) -> int:
        """Bytes of the tensors that are there: values, weights, lengths, offsets, inverse indices."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors().values())

    def record_stream(self, stream: Any) -> None:
        """Prevents reuse of device memory before `stream` has finished with it. No effect on host memory."""
        record_stream(stream, *self._tensors().values())

    def to(self, device: Device, non_blocking: bool = False) -> Self:
        """The same on another device."""
        there = device_named(device)
        return self._apply(lambda tensor: tensor.to(there, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same in pinned host memory, from which a copy to a GPU can run beside computation."""
        try:
            return self._apply(Tensor.pin_memory)
        except RuntimeError as error:
            where = self.device()
            raise ValueError(
                f"pin_memory needs an accelerator and tensors on the CPU; these are on {where}: {error}"
            ) from error

    def _apply(self, move: Callable[[Tensor], Tensor]) -> Self:
        """The same with other tensors."""
        raise NotImplementedError

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by attribute name."""
        return {name: getattr(self, name) for name in self._FIELDS if getattr(self, name) is not None}

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle: no cached views, and of a slice only its own elements."""
        state = {**self.__dict__, **{name: compact(tensor) for name, tensor in self._tensors().items()}}
        return {name: None if name == "_jt_dict" else value for name, value in state.items()}

    def __str__(self) -> str:
        return text.full_text(self)

    def _repr_html_(self) -> str | None:
        return text.html(self)


class Keyed:
    """Names of parts of the values, and where each begins."""

    _keys: list[str]
    # derived from the others when first asked for
    _offset_per_key: list[int] | None = None
    _index_per_key: dict[str, int] | None = None

    def keys(self) -> list[str]:
        """The names: F features, or K keys of columns."""
        return self._keys

    def length_per_key(self) -> list[int]:
        """Values of each key."""
        raise NotImplementedError

    def offset_per_key(self) -> list[int]:
        """Where each key's ids or columns start, and at last their number: `[F + 1]`."""
        if self._offset_per_key is None:
            self._offset_per_key = [0, *accumulate(self.length_per_key())]
        return self._offset_per_key

    def index_per_key(self) -> dict[str, int]:
        """Position of each key; ValueError when one stands twice."""
        if self._index_per_key is None:
            self._index_per_key = checks.index_keys(self._keys)
        return self._index_per_key

    def _place(self, key: str) -> int:
        """Position of a key. An unknown key raises an error that is KeyError and ValueError."""
        place = self.index_per_key().get(key) if isinstance(key, str) else None
        if place is None:
            raise checks.unknown_key(key, self._keys)
        return place


class JaggedStorage(Tensors):
    """Values cut into bags, with optional weights. Abstract: use JaggedTensor or KeyedJaggedTensor.

    Either of lengths and offsets may be missing; it is derived from the other when first asked for.
    """

    _FIELDS: ClassVar[tuple[str, ...]] = ("_values", "_weights", "_lengths", "_offsets")

    _weights: Tensor | None
    _lengths: Tensor | None
    _offsets: Tensor | None

    def _fill(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets

    @classmethod
    def _unchecked(cls, *args: Any, **kwargs: Any) -> Self:
        """One without checks, for parts that are right by construction; arguments as of `_fill`."""
        self = cls.__new__(cls)
        self._fill(*args, **kwargs)
        return self

    def weights(self) -> Tensor:
        """One weight a value, `[N]`; ValueError when there are none."""
        if self._weights is None:
            raise ValueError(
                f"this {type(self).__name__} has no weights: pass weights= when building it, or ask weights_or_none()"
            )
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """The weights, or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """How many values each bag holds."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = self._offsets[1:] - self._offsets[:-1]
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """The lengths if they are known already, else None; derives nothing."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Where each bag starts, and at last N; int32 where lengths are int32 and N fits, else int64."""
        if self._offsets is None:
            assert self._lengths is not None
            narrow = self._lengths.dtype == torch.int32 and self._values.shape[0] <= _INT32_MAX
            self._offsets = complete_cumsum(self._lengths, torch.int32 if narrow else torch.int64)
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """The offsets if they are known already, else None; derives nothing."""
        return self._offsets

    def copy_(self, jt: Self, non_blocking: bool = False) -> Self:
        """Overwrites the tensors held here, in place, with those of a batch of the same shape; returns itself.

        For buffers that stay where they are, such as those of a CUDA graph; see `empty_like(..., device=)`.

        Raises:
            ValueError: shapes that differ, or weights in only one of the two.
        """
        if not isinstance(jt, type(self)):
            raise ValueError(f"copy_ takes a {type(self).__name__}, got {type(jt).__name__}")
        own = self._tensors()
        if "_lengths" in own:
            jt.lengths()
        if "_offsets" in own:
            jt.offsets()
        theirs = jt._tensors()
        for name in {**own, **theirs}:
            if name in ("_lengths", "_offsets") and name not in own:
                continue
            sizes = [list(held[name].shape) if name in held else None for held in (own, theirs)]
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"copy_ needs {name.lstrip('_')} of one shape, here {sizes[0]}, given {sizes[1]}: "
                    f"make the buffer with empty_like(batch, device)"
                )
        for name, tensor in own.items():
            tensor.copy_(theirs[name], non_blocking=non_blocking)
        return self

    def validate(self) -> Self:
        """Checks every value on any device, as the constructor does on CPU. Returns itself.

        Raises:
            ValueError: lengths that are negative or do not sum to N, offsets that fall. The error names the row, or the
                feature and the sample; see `validate_keyed_jagged_tensor`.
        """
        checks.check_values(self._values, self._weights)
        if self._values.is_meta:
            raise ValueError("tensors on 'meta' hold no numbers to validate")
        host = {"values": torch.empty(self._values.shape[0])}  # values may be anything, and stay where they are
        for name, tensor in self._tensors().items():
            checks.check_device(name.lstrip("_"), tensor, self._values)
            if name not in ("_values", "_weights"):
                host[name.lstrip("_")] = tensor.cpu()
        self._build(**host)
        return self

    def _build(self, **parts: Any) -> Any:
        """The constructor, with these tensors and the other arguments as they are here."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return text.jagged_text(self)


def record_stream(stream: Any, *tensors: Tensor) -> None:
    """Registers the use of these tensors by `stream` with the device allocator."""
    for tensor in tensors:
        if tensor.device.type == "cpu":
            continue
        if not isinstance(stream, torch.Stream):
            raise ValueError(f"record_stream takes a stream such as torch.cuda.current_stream(), got {stream!r}")
        tensor.record_stream(stream)


def device_named(device: Device) -> torch.device:
    """The device; refuses what names none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be one such as 'cpu' or 'cuda:0', got {device!r}") from error


def compact(tensor: Tensor) -> Tensor:
    """The tensor without the rest of the storage it is a slice of; pickling would carry all of it along."""
    if tensor.is_meta or tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone()


class JaggedTensor(JaggedStorage):
    """Bags of different sizes in one flat tensor.

    Args:
        values: `[N]` ids, or `[N, D]` vectors.
        weights: `[N]`, one per value, or None.
        lengths: `[B]` integers that sum to N.
        offsets: `[B + 1]` integers from 0 to N. One of lengths and offsets is enough.

    Raises:
        ValueError: shapes, types or devices that do not belong together; on CPU also negative lengths,
            lengths that do not sum to N, offsets that fall.

    >>> JaggedTensor(torch.tensor([10, 11, 12]), lengths=torch.tensor([2, 0, 1])).to_dense()
    [tensor([10, 11]), tensor([], dtype=torch.int64), tensor([12])]
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        values, weights, lengths, offsets = checks.check_parts(values, weights, lengths, offsets)
        if lengths is None and offsets is None:
            raise ValueError("a JaggedTensor needs lengths or offsets: give one of them")
        num_bags = checks.check_bags(lengths, offsets, None, None)
        if checks.readable(values):
            checks.check_numbers(None, values, lengths, offsets, num_bags)
        self._fill(values, weights, lengths, offsets)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> JaggedTensor:
        """No bags at all; lengths and offsets are both of size 0.

        >>> JaggedTensor.empty().to_dense()
        []
        """
        return JaggedTensor(
            values=torch.empty(0, dtype=values_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
            offsets=torch.empty(0, dtype=lengths_dtype, device=device),
        )

    @staticmethod
    def empty_like(jt: JaggedTensor, device: torch.device | None = None) -> JaggedTensor:
        """Without a device: no bags, of the types of `jt`. With one: buffers of its shapes there, to `copy_` into.

        >>> JaggedTensor.empty_like(JaggedTensor(torch.tensor([1.5]), lengths=torch.tensor([1]))).values()
        tensor([])
        """
        if not isinstance(jt, JaggedTensor):
            raise ValueError(f"jt must be a JaggedTensor, got {type(jt).__name__}")
        if device is not None:
            there = device_named(device)
            return jt._apply(lambda tensor: torch.empty_like(tensor, device=there))
        weights = None if jt._weights is None else jt._weights[:0]
        return JaggedTensor._unchecked(jt._values[:0], weights, jt.lengths()[:0])

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """From padded rows: the first `lengths[b]` entries of row b.

        Args:
            values: `[B, L]`.
            lengths: `[B]`, none above L.
            weights: `[B, L]` or None.

        >>> JaggedTensor.from_dense_lengths(torch.tensor([[1, 2], [3, 0]]), torch.tensor([2, 1])).values()
        tensor([1, 2, 3])
        """
        checks.check_values(values, None)
        if checks.check_integers("lengths", lengths, values) is None:
            raise ValueError("lengths must be a tensor of integers, got None")
        if values.dim() < 2 or lengths.dim() != 1 or lengths.shape[0] != values.shape[0]:
            raise ValueError(
                f"values must be [B, L] and lengths [B], got {list(values.shape)} and {list(lengths.shape)}"
            )
        if weights is not None and not isinstance(weights, Tensor):
            raise ValueError(f"weights must be a tensor like values, got {type(weights).__name__}")
        if weights is not None and weights.shape[:2] != values.shape[:2]:
            raise ValueError(f"weights must be {list(values.shape[:2])} as values is, got {list(weights.shape)}")
        width = values.shape[1]
        if checks.readable(lengths) and lengths.numel():
            outside = ((lengths < 0) | (lengths > width)).nonzero()
            if outside.numel():
                row = int(outside[0])
                raise ValueError(f"length {int(lengths[row])} at row {row} is not between 0 and {width}")
        kept = torch.arange(width, device=values.device) < lengths.unsqueeze(1)
        return JaggedTensor(values[kept], None if weights is None else weights[kept], lengths)

    @staticmethod
    def from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> JaggedTensor:
        """From one tensor a bag.

        Args:
            values: B tensors `[n_b]` (or `[n_b, D]`).
            weights: B tensors of the same sizes, or None.

        >>> JaggedTensor.from_dense([torch.tensor([1, 2]), torch.tensor([3])]).lengths()
        tensor([2, 1], dtype=torch.int32)
        """
        if not checks.check_all("values", values, Tensor):
            raise ValueError("values is an empty list: use JaggedTensor.empty() for no bags")
        for bags in (values, checks.check_all("weights", weights, Tensor) if weights is not None else []):
            for row, bag in enumerate(bags):
                if bag.dim() == 0 or bag.shape[1:] != bags[0].shape[1:] or bag.device != values[0].device:
                    raise ValueError(
                        f"bags must be [n] or [n, D] with one D, on one device; number {row} is {list(bag.shape)} on "
                        f"{bag.device}, the first {list(bags[0].shape)} on {values[0].device}"
                    )
        sizes = [bag.shape[0] for bag in values]
        if weights is not None and [bag.shape[0] for bag in weights] != sizes:
            raise ValueError(
                f"weights has bags of {[bag.shape[0] for bag in weights][:20]}, values of {sizes[:20]}: "
                f"give one weight a value"
            )
        joined = torch.cat(values)
        lengths = torch.tensor(sizes, dtype=torch.int32, device=joined.device)
        return JaggedTensor(joined, None if weights is None else torch.cat(weights), lengths)

    def _build(self, **parts: Any) -> JaggedTensor:
        return JaggedTensor(**parts)

    def to_dense(self) -> list[Tensor]:
        """One tensor a bag, views of the values."""
        return list(self._values.split(self.lengths().tolist()))

    def to_dense_weights(self) -> list[Tensor] | None:
        """One tensor of weights a bag, or None without weights."""
        return None if self._weights is None else list(self._weights.split(self.lengths().tolist()))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Rows of one length.

        Args:
            desired_length: L; shorter bags are padded, of longer ones the first L are kept.
                The longest bag's length when left out.
            padding_value: fills the rest.

        Returns:
            `[B, L]` (`[B, L, D]` for vectors).

        >>> JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1])).to_padded_dense(3, -1)
        tensor([[ 1,  2, -1],
                [ 3, -1, -1]])
        """
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor | None:
        """The weights as rows of one length, or None without weights; arguments as in `to_padded_dense`."""
        return None if self._weights is None else self._padded(self._weights, desired_length, padding_value)

    def _padded(self, source: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        lengths = self.lengths()
        num_bags = lengths.shape[0]
        if desired_length is None:
            width = int(lengths.max()) if num_bags else 0
        else:
            width = checks.check_count("desired_length", desired_length)
        if not isinstance(padding_value, int | float):
            raise ValueError(f"padding_value must be a number, got {padding_value!r}")
        if not source.is_floating_point() and padding_value != int(padding_value):
            raise ValueError(f"padding_value {padding_value} does not fit {source.dtype} values: use a whole number")
        fill = padding_value if source.is_floating_point() else int(padding_value)
        rows = source.new_full((num_bags, width, *source.shape[1:]), fill)
        bag = torch.repeat_interleave(
            torch.arange(num_bags, device=source.device), lengths, output_size=source.shape[0]
        )
        place = torch.arange(source.shape[0], device=source.device) - self.offsets()[bag]
        if desired_length is not None:
            kept = place < width
            bag, place, source = bag[kept], place[kept], source[kept]
        return rows.index_put((bag, place), source)

    def _apply(self, move: Callable[[Tensor], Tensor]) -> JaggedTensor:
        return JaggedTensor._unchecked(**{name.lstrip("_"): move(tensor) for name, tensor in self._tensors().items()})


def _flatten(jagged: JaggedTensor) -> tuple[list[Tensor], tuple[str, ...]]:
    tensors = jagged._tensors()
    return list(tensors.values()), tuple(tensors)


def _unflatten(leaves: Sequence[Any], names: tuple[str, ...]) -> JaggedTensor:
    return JaggedTensor._unchecked(**{name.lstrip("_"): leaf for name, leaf in zip(names, leaves, strict=True)})


def register_like_jagged_tensor(cls: type[JaggedTensor]) -> None:
    """Makes a subclass a tree node, which is unflattened to a plain `JaggedTensor`."""
    register(cls, _flatten, _unflatten, lambda names: names)


register_like_jagged_tensor(JaggedTensor)
