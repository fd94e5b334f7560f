"""The devices of one process: each runs its lookups beside those of the others, and has a memory account.

A CPU entry is a worker thread. Several CPU entries are *virtual devices*: they share this machine's cores and memory,
so they show how a plan works, not how fast separate machines are. A CUDA entry is a stream of that GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from recshard_lab.arguments import device_named

T = TypeVar("T")


@dataclass(frozen=True)
class DeviceMemory:
    """The memory account of one device.

    Attributes:
        device: its name, such as ``"cpu"`` or ``"cuda:1"``.
        table_bytes: weights of its shards.
        input_bytes: ids, lengths and weights of its last batch.
        output_bytes: rows of its last batch.
    """

    device: str
    table_bytes: int
    input_bytes: int
    output_bytes: int


class Device:
    """Runs functions for one entry of ``devices=``.

    Args:
        device: a torch device.
        number: the rank of the plan that this device stands for.

    Attributes:
        table_bytes, input_bytes, output_bytes: see `DeviceMemory`.
    """

    def __init__(self, device: torch.device, number: int) -> None:
        self.device, self.number = device, number
        self.table_bytes = self.input_bytes = self.output_bytes = 0
        self._pool: ThreadPoolExecutor | None = None
        self._stream: Any = None
        if device.type == "cpu":
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"recshard-device-{number}")
            weakref.finalize(self, self._pool.shutdown, wait=False)
        elif device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def start(self, function: Callable[[], T]) -> Callable[[], T]:
        """Starts `function` without gradients, and returns a function that waits for its result.

        On CUDA the host does not wait: the result is ordered after the stream's work by `torch.cuda.Stream`.
        """
        if self._pool is not None:
            future: Future[T] = self._pool.submit(_without_gradients, function)
            return future.result
        if self._stream is None:  # a device that the host drives, such as the one that tests count on
            found = _without_gradients(function)
            return lambda: found
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            result = _without_gradients(function)
        return lambda: self._after(result)

    def _after(self, result: T) -> T:
        """The result, usable on the current streams of all devices."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        if isinstance(result, Tensor):
            result.record_stream(current)
        return result

    def memory(self) -> DeviceMemory:
        """The account after the last batch."""
        return DeviceMemory(str(self.device), self.table_bytes, self.input_bytes, self.output_bytes)


def devices_named(devices: Sequence[torch.device | str]) -> list[torch.device]:
    """The torch devices of ``devices=``.

    Raises:
        ValueError: an empty list, a string, or a device that does not exist here.

    >>> devices_named(["cpu", "cpu"])
    [device(type='cpu'), device(type='cpu')]
    """
    if isinstance(devices, str | torch.device) or not isinstance(devices, Sequence) or not devices:
        raise ValueError(f"devices must be a list of devices, got {devices!r:.80}. Fix: devices=['cpu', 'cpu']")
    found = [device_named(device) for device in devices]
    for device in found:
        assert device is not None
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"device {str(device)!r} does not exist: this process sees {torch.cuda.device_count()} GPUs. Fix: use "
                f"devices=['cpu', ...]"
            )
    return [device for device in found if device is not None]


def _without_gradients(function: Callable[[], T]) -> T:
    with torch.no_grad():
        return function()
