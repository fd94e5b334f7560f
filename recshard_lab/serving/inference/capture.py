"""Inference at fixed shapes, so that a CUDA graph can repeat it.

A batch is copied into a larger one of a fixed size. The rest of that batch is one more sample. Its outputs are dropped.

::

    ids of a feature     [ 4 1 | 7 | 2 9 9 |  0 0 0 0 0 ]     fixed number of ids
    samples                 0    1     2       the rest       fixed number of samples + 1

Shape letters: B samples of the fixed size, b samples of a batch, F features, N ids of the fixed size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree

from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

if TYPE_CHECKING:
    from recshard_lab.serving.inference.shard import ShardedInference
    from recshard_lab.serving.inference.tiles import DeviceTiles  # which imports this module

_WARM_UP = 3  # runs before a graph is captured: kernels are loaded and constants made
_thread = threading.local()


def at_fixed_shapes() -> bool:
    """Whether this thread runs a program whose shapes do not depend on the batch."""
    return bool(getattr(_thread, "fixed", False))


@contextmanager
def fixed_shapes() -> Iterator[None]:
    """The collections of this thread use no data-dependent shapes and do not wait for the device."""
    before, _thread.fixed = at_fixed_shapes(), True
    try:
        yield
    finally:
        _thread.fixed = before


class CapturedInference:
    """A sharded model at fixed batch sizes. `ShardedInference.capture` makes it. Threads may call it, one at a time.

    On CUDA each batch size is one CUDA graph, so a call launches one graph instead of each kernel. Other devices run
    the same program without a graph.

    A batch that is larger than the largest size, has more ids than fit, other features, or ids that are not rows of a
    collection that clamps or ignores them, runs without a graph. `eager_calls` counts these.

    Attributes:
        batch_sizes: the fixed sizes, ascending.
        uses_graphs: whether calls replay CUDA graphs.
        graph_calls, eager_calls: calls at a fixed size, and others.
    """

    def __init__(
        self,
        served: ShardedInference,
        collections: Sequence[DeviceTiles],
        output: torch.device,
        example: Sequence[Any],
        batch_sizes: Sequence[int],
        ids_per_sample: float | Mapping[str, float] | None,
    ) -> None:
        self._served, self._collections, self._lock = served, list(collections), threading.Lock()
        self.uses_graphs = output.type == "cuda"
        self.batch_sizes = _sizes(batch_sizes)
        for number, argument in enumerate(example):
            _check_argument(number, argument)
        found = [part for part in example if isinstance(part, KeyedJaggedTensor)]
        rates = [_rates(part, ids_per_sample) for part in found]
        self._sources = [_source(part, example) for part in self._collections]
        self._programs = [_Program(served, output, example, rates, size) for size in self.batch_sizes]
        self.graph_calls = self.eager_calls = 0
        if self.uses_graphs:
            pool = torch.cuda.graph_pool_handle()
            for program in reversed(self._programs):  # smaller graphs fit into the memory of the largest
                program.capture(pool)

    @torch.no_grad()
    def __call__(self, *args: Any) -> Any:
        """Runs the model on one batch.

        Args:
            args: as of the model, on the host or the output device. Batches on the host are faster: their lengths are
                read without waiting.

        Returns:
            What the model returns, as new tensors.

        Raises:
            ValueError: ids that are not rows, as the model raises it.
        """
        with self._lock:
            fitting = next((program for program in self._programs if program.fits(args)), None)
            pairs = zip(self._collections, self._sources, strict=True)
            if fitting is not None and all(part.accepts(args[number]) for part, number in pairs):
                self.graph_calls += 1
                return fitting.run(args)
            self.eager_calls += 1
        return self._served(*args)

    def __repr__(self) -> str:
        kind = "CUDA graphs" if self.uses_graphs else "programs without graphs"
        return f"{type(self).__name__}({kind} of {', '.join(map(str, self.batch_sizes))} samples)"


class _Program:
    """The model at one batch size, with the memory of its inputs."""

    def __init__(
        self,
        served: ShardedInference,
        output: torch.device,
        example: Sequence[Any],
        rates: Sequence[Mapping[str, float]],
        size: int,
    ) -> None:
        self.served, self.size, self.output = served, size, output
        left = iter(rates)
        self.inputs: list[_Bags | _Dense] = [
            _Bags(part, next(left), size, output) if isinstance(part, KeyedJaggedTensor) else _Dense(part, size, output)
            for part in example
        ]
        self._graph: Any = None
        self._outputs: Any = None
        self._copied: Any = None

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether a batch has the same arguments, and not more samples or ids."""
        return len(args) == len(self.inputs) and all(
            own.fits(part) for own, part in zip(self.inputs, args, strict=True)
        )

    def program(self) -> Any:
        """What a graph repeats: reads the inputs' memory, waits for nothing, has the same shapes each time."""
        with fixed_shapes():
            return self.served(*(own.argument() for own in self.inputs))

    def capture(self, pool: Any) -> None:
        """Records the CUDA graph."""
        for own in self.inputs:
            own.clear()
        stream = torch.cuda.Stream(self.output)
        stream.wait_stream(torch.cuda.current_stream(self.output))
        with torch.cuda.device(self.output), torch.cuda.stream(stream), torch.no_grad():
            for _ in range(_WARM_UP):
                self.program()
            stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._outputs = self.program()
        torch.cuda.current_stream(self.output).wait_stream(stream)
        self._copied = torch.cuda.Event()

    def run(self, args: Sequence[Any]) -> Any:
        """The outputs of one batch."""
        if self._copied is not None:
            self._copied.synchronize()  # the copies of the last call have left the staging memory
        for own, part in zip(self.inputs, args, strict=True):
            own.load(part)
        if self._graph is None:
            return _first(self.program(), samples_of(args), self.size)
        self._copied.record()
        self._graph.replay()
        return _first(self._outputs, samples_of(args), self.size)


class _Staged:
    """A tensor on the output device, and the host memory from which it is filled."""

    def __init__(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.host = torch.zeros(size, dtype=dtype)
        if device.type != "cpu":
            self.host = self.host.pin_memory()
        self.device = self.host if device.type == "cpu" else torch.zeros(size, dtype=dtype, device=device)

    def send(self) -> None:
        """Copies the host memory, without waiting."""
        if self.device is not self.host:
            self.device.copy_(self.host, non_blocking=True)


class _Bags:
    """A `KeyedJaggedTensor` of a fixed size: ``B + 1`` samples, and a fixed number of ids for each feature."""

    def __init__(self, example: KeyedJaggedTensor, rates: Mapping[str, float], size: int, device: torch.device) -> None:
        self.keys, self.size = example.keys(), size
        self.room = [max(1, ceil(size * rates[key])) for key in self.keys]
        self.starts = list(accumulate(self.room, initial=0))
        weights = example.weights_or_none()
        self._values = _Staged([self.starts[-1]], example.values().dtype, device)
        self._lengths = _Staged([len(self.keys), size + 1], example.lengths().dtype, device)
        self._weights = None if weights is None else _Staged([self.starts[-1]], weights.dtype, device)
        self.clear()

    def clear(self) -> None:
        """All samples are empty; the rest has the ids."""
        self._lengths.host.zero_()
        self._lengths.host[:, -1] = torch.tensor(self.room)
        for staged in (self._values, self._lengths, self._weights):
            if staged is not None:
                staged.send()

    def fits(self, batch: Any) -> bool:
        """Whether a batch has the same features and not more samples or ids."""
        if not isinstance(batch, KeyedJaggedTensor) or batch.variable_stride_per_key() or batch.keys() != self.keys:
            return False
        weighted = batch.weights_or_none() is not None
        if batch.values().dtype != self._values.host.dtype or weighted != (self._weights is not None):
            return False
        enough = all(count <= room for count, room in zip(batch.length_per_key(), self.room, strict=True))
        return 0 < batch.stride() <= self.size and enough

    def load(self, batch: KeyedJaggedTensor) -> None:
        """Copies a batch that fits."""
        samples, counts = batch.stride(), batch.length_per_key()
        lengths = self._lengths.host
        lengths.zero_()
        lengths[:, :samples] = batch.lengths().view(len(self.keys), samples)
        lengths[:, -1] = torch.tensor(
            [room - count for room, count in zip(self.room, counts, strict=True)], dtype=lengths.dtype
        )
        self._values.host.zero_()
        for staged, own in ((self._values, batch.values()), (self._weights, batch.weights_or_none())):
            if staged is None or own is None:
                continue
            for part, start, count in zip(own.cpu().split(counts), self.starts, counts, strict=False):
                staged.host[start : start + count] = part
            staged.send()
        self._lengths.send()

    def argument(self) -> KeyedJaggedTensor:
        """The batch on the output device. A new object each time: it caches offsets."""
        weights = None if self._weights is None else self._weights.device
        return KeyedJaggedTensor(
            self.keys,
            self._values.device,
            weights,
            lengths=self._lengths.device.view(-1),
            stride=self.size + 1,
            length_per_key=self.room,
        )


class _Dense:
    """A tensor ``[B + 1, ...]``."""

    def __init__(self, example: Tensor, size: int, device: torch.device) -> None:
        self.size = size
        self._staged = _Staged([size + 1, *example.shape[1:]], example.dtype, device)

    def clear(self) -> None:
        """Fills it with zeros."""
        self._staged.host.zero_()
        self._staged.send()

    def fits(self, batch: Any) -> bool:
        """Whether a batch has the same dtype and width, and not more samples."""
        host = self._staged.host
        alike = isinstance(batch, Tensor) and batch.dtype == host.dtype and batch.shape[1:] == host.shape[1:]
        return alike and batch.dim() == host.dim() and 0 < batch.shape[0] <= self.size

    def load(self, batch: Tensor) -> None:
        """Copies a batch that fits. The samples after it keep what they had."""
        self._staged.host[: batch.shape[0]] = batch.cpu()
        self._staged.send()

    def argument(self) -> Tensor:
        """The tensor on the output device."""
        return self._staged.device


def samples_of(args: Sequence[Any]) -> int:
    """Samples of a batch."""
    first = args[0]
    return first.stride() if isinstance(first, KeyedJaggedTensor) else int(first.shape[0])


def _source(collection: DeviceTiles, example: Sequence[Any]) -> int:
    """Which argument has the features of a collection: its ids are checked before the program runs."""
    features = {block.feature for block in collection.blocks}
    for number, part in enumerate(example):
        if isinstance(part, KeyedJaggedTensor) and features <= set(part.keys()):
            return number
    raise ValueError(
        f"no KeyedJaggedTensor of the example has the features {', '.join(sorted(features))}. Fix: pass the batch "
        f"to the model with the names that its collection reads"
    )


def _first(outputs: Any, samples: int, size: int) -> Any:
    """The first samples of outputs, copied: the next call overwrites them."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, KeyedTensor):
            return KeyedTensor(leaf.keys(), leaf.length_per_key(), leaf.values()[:samples].clone())
        if isinstance(leaf, JaggedTensor):
            lengths = leaf.lengths()[:samples].clone()
            count, weights = int(lengths.sum()), leaf.weights_or_none()
            return JaggedTensor(
                leaf.values()[:count].clone(), None if weights is None else weights[:count].clone(), lengths=lengths
            )
        if isinstance(leaf, Tensor):
            if leaf.dim() == 0 or leaf.shape[0] != size + 1:
                raise ValueError(
                    f"the model returns a tensor {list(leaf.shape)} for {size + 1} samples. A captured model returns "
                    f"one row a sample. Fix: call the model itself"
                )
            return leaf[:samples].clone()
        return leaf

    return _pytree.tree_map(cut, outputs, is_leaf=lambda leaf: isinstance(leaf, KeyedTensor | JaggedTensor))


def _sizes(batch_sizes: Sequence[int]) -> list[int]:
    """The sizes, checked and ascending."""
    numbers = list(batch_sizes) if isinstance(batch_sizes, Sequence) and not isinstance(batch_sizes, str) else []
    if not numbers or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in numbers):
        raise ValueError(f"batch_sizes must be positive integers, got {batch_sizes!r:.80}. Fix: batch_sizes=(1, 64)")
    return sorted(set(numbers))


def _check_argument(number: int, argument: Any) -> None:
    if isinstance(argument, KeyedJaggedTensor) and not argument.variable_stride_per_key():
        return
    if not isinstance(argument, Tensor) or not argument.dim():
        raise ValueError(
            f"argument {number} of the example is a {type(argument).__name__}. A captured model takes tensors with one "
            f"row a sample and KeyedJaggedTensors with one bag a sample. Fix: wrap the model in a module that takes "
            f"these"
        )


def _rates(example: KeyedJaggedTensor, asked: float | Mapping[str, float] | None) -> dict[str, float]:
    """Ids of a sample for which there is room, for each feature."""
    keys = example.keys()
    if asked is None:
        lengths = example.lengths().view(len(keys), -1)
        most = lengths.amax(1).tolist() if example.stride() else [1] * len(keys)
        return dict(zip(keys, (max(1.0, one) for one in most), strict=True))
    if isinstance(asked, Mapping):
        missing = [key for key in keys if key not in asked]
        if missing:
            raise ValueError(f"ids_per_sample lacks feature {missing[0]!r}. Fix: give a number for each feature")
        rates = {key: asked[key] for key in keys}
    else:
        rates = dict.fromkeys(keys, asked)
    for key, rate in rates.items():
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < float("inf"):
            raise ValueError(f"ids_per_sample of {key!r} must be a positive number, got {rate!r:.80}")
    return rates
