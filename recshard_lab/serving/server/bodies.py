"""Bodies of requests and answers: bytes to a checked `Batch`, and tensors to bytes.

Letters: B samples, F sparse features, N ids of all features, C dense columns.

orjson reads the body of one sample with 26 features in 4 us, the standard library in 10 us. It refuses JSON that is
nested deeper than 1,024 levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import safetensors
import torch
from safetensors.numpy import save

from recshard_lab.serving.bundle import Batch, Inputs
from recshard_lab.serving.server.errors import Refused

if TYPE_CHECKING:
    from numpy.typing import NDArray

JSON, BINARY = "application/json", "application/x-safetensors"
CONTENT_TYPES = {JSON: JSON, BINARY: BINARY, "application/octet-stream": BINARY}
"""Accepted content type -> format of the body."""

INT64 = np.iinfo(np.int64)
_DTYPES: dict[str, np.dtype[Any]] = {
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F32": np.dtype(np.float32),
}


def _invalid(field: str, why: str, fix: str, position: int | None = None) -> Refused:
    where = field if position is None else f"{field}[{position}]"
    return Refused(422, "invalid_input", f"{where}: {why}. Fix: {fix}.", field, position)


class Decoder:
    """Reads and checks bodies for one model.

    Args:
        inputs: what the model expects.
        max_samples: samples of one request.
        max_ids: ids of one request, over all features.
    """

    def __init__(self, inputs: Inputs, max_samples: int = 4096, max_ids: int = 1_000_000) -> None:
        self.inputs, self.max_samples, self.max_ids = inputs, max_samples, max_ids
        self.names = [feature.name for feature in inputs.sparse]
        self.weighted = [feature.name for feature in inputs.sparse if feature.weighted]
        rows = [feature.rows for feature in inputs.sparse]
        # ids of a feature are in [lowest, highest]; one without a number of rows takes any int64
        self.lowest = np.array([INT64.min if count is None else 0 for count in rows], dtype=np.int64)
        self.highest = np.array([INT64.max if count is None else count - 1 for count in rows], dtype=np.int64)

    def decode(self, content_type: str, body: bytes) -> Batch:
        """The batch of a body.

        Raises:
            Refused: 415, 400 for bytes that are not in the format, 422 for values that the model does not take.
        """
        kind = CONTENT_TYPES.get(content_type.partition(";")[0].strip().lower())
        if kind is None:
            raise Refused(
                415,
                "unsupported_content_type",
                f"the content type {content_type[:80]!r} is not supported. Fix: send {JSON} or {BINARY}.",
            )
        return self.json(body) if kind is JSON else self.binary(body)

    def json(self, body: bytes) -> Batch:
        """A batch from an object.

        ``{"dense": {column: [..]}, "sparse": {feature: [[..], ..]}, "weights": {feature: [[..], ..]}}``
        """
        try:
            request = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise Refused(400, "malformed_json", f"the body is not JSON: {error}. Fix: send one JSON object.") from None
        parts = _object(request, "the body", ("dense", "sparse", "weights"))
        columns = _object(parts.get("dense", {}), "dense", self.inputs.dense, required=True)
        bags = _object(parts.get("sparse", {}), "sparse", self.names, required=True)
        weights = _object(parts.get("weights", {}), "weights", self.weighted, required=True)
        samples = self._samples(columns, bags)
        dense = np.empty((samples, len(columns)), dtype=np.float32)
        for number, name in enumerate(self.inputs.dense):
            dense[:, number] = _floats(columns[name], f"dense.{name}")
        lengths, flat = self._lists(bags, "sparse", samples, int)
        batch_weights = None
        if self.weighted:
            own_lengths, own = self._lists(weights, "weights", samples, float)
            batch_weights = self._weights(lengths.reshape(-1, samples), own_lengths.reshape(-1, samples), own)
        return self._checked(dense, flat, lengths, batch_weights)

    def binary(self, body: bytes) -> Batch:
        """A batch from tensors: dense ``[B, C]``, values ``[N]``, lengths ``[F * B]``, weights ``[N]`` if weighted."""
        try:
            tensors: dict[str, Any] = dict(safetensors.deserialize(body))
        except safetensors.SafetensorError as error:
            raise Refused(
                400,
                "malformed_safetensors",
                f"the body is not in the safetensors format: {error}. Fix: write it with safetensors.",
            ) from None
        count, columns = len(self.names), len(self.inputs.dense)
        expected = {"dense": ("F32",), "values": ("I64", "I32"), "lengths": ("I32", "I64"), "weights": ("F32",)}
        optional = ({"dense"} if not columns else set()) | ({"weights"} if not self.weighted else set())
        optional |= {"values", "lengths"} if not count else set()
        for name in tensors:
            if name not in expected:
                raise _invalid(name, f"the tensor is unknown; the model takes {', '.join(expected)}", "leave it out")
        arrays: dict[str, NDArray[Any]] = {}
        for name, dtypes in expected.items():
            if name not in tensors:
                if name in optional:
                    continue
                raise _invalid(name, "the tensor is missing", f"send it as {dtypes[0]}")
            tensor = tensors[name]
            if tensor["dtype"] not in dtypes:
                raise _invalid(name, f"its dtype is {tensor['dtype']}", f"send it as {dtypes[0]}")
            arrays[name] = np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
        values = arrays.get("values", np.empty(0, np.int64))
        lengths = arrays.get("lengths", np.empty(0, np.int32))
        for name, array in (("values", values), ("lengths", lengths), ("weights", arrays.get("weights", values))):
            if array.ndim != 1:
                raise _invalid(name, f"it has {array.ndim} dimensions", "send one dimension")
        dense = arrays.get("dense")
        if dense is not None and (dense.ndim != 2 or dense.shape[1] != columns):
            raise _invalid("dense", f"its shape is {list(dense.shape)}", f"send [samples, {columns}]")
        if dense is None:
            dense = np.empty((len(lengths) // count if count else 0, 0), dtype=np.float32)
        samples = len(dense)
        if len(lengths) != count * samples:
            expect = f"{count} features of {samples} samples need {count * samples}"
            raise _invalid("lengths", f"it has {len(lengths)} values, but {expect}", "send one length a bag")
        self._bound_samples(samples)
        if count:
            self._check_lengths(lengths, len(values), samples)
        weights = arrays.get("weights") if self.weighted else None
        if weights is not None and len(weights) != len(values):
            raise _invalid(
                "weights", f"it has {len(weights)} values, but there are {len(values)} ids", "send one an id"
            )
        return self._checked(dense, values.astype(np.int64, copy=False), lengths, weights)

    def _samples(self, columns: Mapping[str, Any], bags: Mapping[str, Any]) -> int:
        """Number of samples, which every column and feature has."""
        first, samples = "", 0
        for part, lists in (("dense", columns), ("sparse", bags)):
            for name, values in lists.items():
                if type(values) is not list:
                    raise _invalid(f"{part}.{name}", f"it is {_kind(values)}", "send a list with one entry a sample")
                if not first:
                    first, samples = f"{part}.{name}", len(values)
                elif len(values) != samples:
                    why = f"it has {len(values)} samples, but {first} has {samples}"
                    raise _invalid(f"{part}.{name}", why, "send the same number of samples for each")
        self._bound_samples(samples)
        return samples

    def _bound_samples(self, samples: int) -> None:
        if samples == 0:
            raise Refused(422, "invalid_input", "the request has no samples. Fix: send one sample or more.")
        if samples > self.max_samples:
            raise Refused(
                413,
                "too_many_samples",
                f"the request has {samples:,} samples: the limit is {self.max_samples:,}. Fix: send several requests.",
            )

    def _lists(
        self, bags: Mapping[str, Sequence[Any]], part: str, samples: int, kind: type
    ) -> tuple[NDArray[np.int32], NDArray[Any]]:
        """Lengths of the bags, and what they contain, feature by feature."""
        names = self.names if part == "sparse" else self.weighted
        for name in names:
            if not set(map(type, bags[name])) <= {list}:
                position = next(i for i, bag in enumerate(bags[name]) if type(bag) is not list)
                why = f"a sample is {_kind(bags[name][position])}"
                raise _invalid(f"{part}.{name}", why, "send a list of ids a sample, [] for none", position)
        every = list(chain.from_iterable(bags[name] for name in names))
        lengths = np.fromiter(map(len, every), dtype=np.int32, count=len(every))
        self._bound_ids(int(lengths.sum(dtype=np.int64)))
        flat = list(chain.from_iterable(every))
        kinds = {int} if kind is int else {int, float}
        if not set(map(type, flat)) <= kinds:
            place = next(i for i, value in enumerate(flat) if type(value) not in kinds)
            name, position = self._place(lengths, place, samples, names)
            what = "an id" if kind is int else "a weight"
            fix = "send whole numbers" if kind is int else "send numbers"
            raise _invalid(f"{part}.{name}", f"{what} is {_kind(flat[place])}", fix, position)
        if kind is float:
            return lengths, np.array(flat, dtype=np.float32)
        try:
            return lengths, np.array(flat, dtype=np.int64)
        except OverflowError:
            place = next(i for i, value in enumerate(flat) if not INT64.min <= value <= INT64.max)
            name, position = self._place(lengths, place, samples, names)
            raise _invalid(
                f"{part}.{name}", f"id {flat[place]:,} is not an int64", "send ids below 2 ** 63", position
            ) from None

    def _bound_ids(self, ids: int) -> None:
        if ids > self.max_ids:
            raise Refused(
                413,
                "too_many_ids",
                f"the request has {ids:,} ids: the limit is {self.max_ids:,}. Fix: send several requests.",
            )

    def _check_lengths(self, lengths: NDArray[Any], ids: int, samples: int) -> None:
        """Raises if lengths are negative or do not sum to the number of ids."""
        self._bound_ids(ids)
        if lengths.min() < 0 or lengths.max() > ids:
            bad = (lengths < 0) | (lengths > ids)
            place = int(bad.argmax())
            field, position = f"sparse.{self.names[place // samples]}", place % samples
            why = f"length {lengths[place]:,} is not between 0 and the {ids:,} ids of the request"
            raise _invalid(field, why, "send the number of ids of each bag", position)
        if (total := int(lengths.sum(dtype=np.int64))) != ids:
            raise _invalid(
                "lengths", f"its sum is {total:,}, but values has {ids:,} ids", "send the number of ids of each bag"
            )

    def _place(
        self, lengths: NDArray[Any], place: int, samples: int, names: Sequence[str] | None = None
    ) -> tuple[str, int]:
        """Feature and sample of the value at `place` of the flat layout."""
        bag = int(np.searchsorted(lengths.cumsum(dtype=np.int64), place, side="right"))
        return (names or self.names)[bag // samples], bag % samples

    def _weights(
        self, lengths: NDArray[np.int32], own_lengths: NDArray[np.int32], own: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """``[N]`` weights: those of the request for weighted features, 1 elsewhere."""
        out, start, read = np.ones(int(lengths.sum(dtype=np.int64)), dtype=np.float32), 0, 0
        weighted = {name: number for number, name in enumerate(self.weighted)}
        for number, name in enumerate(self.names):
            end = start + int(lengths[number].sum(dtype=np.int64))
            if name in weighted:
                given = own_lengths[weighted[name]]
                if (unequal := given != lengths[number]).any():
                    position = int(unequal.argmax())
                    why = f"{given[position]} weights for {lengths[number][position]} ids"
                    raise _invalid(f"weights.{name}", why, "send one weight an id", position)
                out[start:end] = own[read : read + end - start]
                read += end - start
            start = end
        return out

    def _checked(
        self,
        dense: NDArray[np.float32],
        values: NDArray[np.int64],
        lengths: NDArray[Any],
        weights: NDArray[np.float32] | None,
    ) -> Batch:
        samples = len(dense)
        if not np.isfinite(dense).all():
            position, column = (int(i) for i in np.argwhere(~np.isfinite(dense))[0])
            why = f"{dense[position, column]} is not a finite float32"
            raise _invalid(f"dense.{self.inputs.dense[column]}", why, "send a finite number", position)
        if len(values):
            counts = lengths if samples == 1 else lengths.reshape(-1, samples).sum(1, dtype=np.int64)
            lowest, highest = self.lowest.repeat(counts), self.highest.repeat(counts)
            bad = (values < lowest) | (values > highest)
            if bad.any():
                place = int(bad.argmax())
                name, position = self._place(lengths, place, samples)
                rows = int(highest[place]) + 1
                why = "is negative" if values[place] < 0 else f"is not below {rows:,}"
                fix = f"send ids from 0 to {rows - 1:,}"
                raise _invalid(f"sparse.{name}", f"id {values[place]:,} {why}", fix, position)
        if weights is not None and not (finite := np.isfinite(weights)).all():
            place = int((~finite).argmax())
            name, position = self._place(lengths, place, samples)
            raise _invalid(f"weights.{name}", f"{weights[place]} is not finite", "send a finite number", position)
        if lengths.dtype != np.int64:
            lengths = lengths.astype(np.int64)
        return Batch(
            torch.from_numpy(dense),
            torch.from_numpy(values),
            torch.from_numpy(lengths),
            None if weights is None else torch.from_numpy(weights),
        )


def _kind(value: object) -> str:
    """
    >>> _kind(None), _kind(2.5), _kind([1])
    ('null', 'the number 2.5', 'a list')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value}"
    kinds: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
    return kinds[type(value)]


def _object(value: Any, where: str, known: Sequence[str], required: bool = False) -> dict[str, Any]:
    """The JSON object `value`, with known keys only, and all of them if `required`."""
    field = None if where == "the body" else where
    if type(value) is not dict:
        raise Refused(422, "invalid_input", f"{where} is {_kind(value)}. Fix: send an object.", field)
    if not required and value.keys() <= set(known):
        return value
    if len(value) == len(known) and all(name in value for name in known):
        return value
    for name in value:
        if name not in known:
            has = ", ".join(known[:20]) or "no names"
            message = f"{where} has the unknown name {name[:80]!r}; known: {has}. Fix: leave it out."
            raise Refused(422, "invalid_input", message, field)
    missing = [name for name in known if name not in value]
    first = f"{where}.{missing[0]}"
    raise Refused(422, "invalid_input", f"{first} is missing. Fix: send one list with an entry a sample.", first)


def _floats(values: list[Any], field: str) -> NDArray[np.float32]:
    if not set(map(type, values)) <= {int, float}:
        position = next(i for i, value in enumerate(values) if type(value) not in (int, float))
        raise _invalid(field, f"the value is {_kind(values[position])}", "send a number", position)
    with np.errstate(over="ignore"):  # infinity is refused with its position
        return np.array(values, dtype=np.float64).astype(np.float32)


def encode(kind: str, answer: Mapping[str, NDArray[Any]]) -> bytes:
    """The body of an answer; arrays are contiguous. JSON has null for NaN and infinity.

    >>> encode(JSON, {"probability": np.array([0.5, 0.25], dtype=np.float32)})
    b'{"probability":[0.5,0.25]}'
    >>> encode(JSON, {"probability": np.array([np.nan, np.inf], dtype=np.float32)})
    b'{"probability":[null,null]}'
    """
    if kind == JSON:
        return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    return save(dict(answer))


def example(inputs: Inputs, samples: int = 1, ids: Sequence[int] = (0,)) -> Batch:
    """A batch that every model accepts: zeros, and the same ids in every bag."""
    bags = len(inputs.sparse) * samples
    count = bags * len(ids)
    return Batch(
        torch.zeros(samples, len(inputs.dense)),
        torch.tensor(ids, dtype=torch.int64).repeat(bags),
        torch.full((bags,), len(ids), dtype=torch.int64),
        torch.ones(count) if any(feature.weighted for feature in inputs.sparse) else None,
    )


def json_example(inputs: Inputs) -> dict[str, Any]:
    """The JSON of a request with one sample, with ids that are spread over each table."""
    sparse = {}
    for number, feature in enumerate(inputs.sparse):
        rows = feature.rows or 1_000_000
        sparse[feature.name] = [[(7919 * (number + 1)) % rows]]
    found: dict[str, Any] = {}
    if inputs.dense:
        found["dense"] = {name: [0.5] for name in inputs.dense}
    found["sparse"] = sparse
    if any(feature.weighted for feature in inputs.sparse):
        found["weights"] = {feature.name: [[1.0]] for feature in inputs.sparse if feature.weighted}
    return found
