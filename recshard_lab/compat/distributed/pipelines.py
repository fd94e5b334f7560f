"""``torchrec.distributed.train_pipeline``: a compiled pipeline, one with lookups ahead, and a thread that loads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from queue import Empty, Full, Queue
from types import GenericAlias
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from recshard_lab.train import TrainPipelineBase, TrainPipelineSparseDist

StageOut = TypeVar("StageOut")
_POLL_S = 0.05  # how often a waiting thread looks whether it was stopped


@dataclass
class TorchCompileConfig:
    """How `TrainPipelinePT2` compiles.

    Args:
        fullgraph: whether a break of the graph is an error.
        dynamic: whether shapes are dynamic. Default: torch decides.
        backend: of ``torch.compile``.
        compile_on_iter: the batch before which the model is compiled, from 0.
    """

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str = "inductor"
    compile_on_iter: int = 3


class TrainPipelinePT2(TrainPipelineBase):
    """A plain loop whose model is compiled with ``torch.compile`` before one of its first batches.

    Args:
        model, optimizer, device: as in `TrainPipelineBase`.
        compile_configs: how to compile. Default: ``TorchCompileConfig()``.
        pre_compile_fn, post_compile_fn: called with the model before and after.
        input_transformer: the model is called with its result for each batch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        compile_configs: TorchCompileConfig | None = None,
        pre_compile_fn: Callable[[nn.Module], None] | None = None,
        post_compile_fn: Callable[[nn.Module], None] | None = None,
        input_transformer: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(model, optimizer, device)
        self._configs = compile_configs or TorchCompileConfig()
        self._around = pre_compile_fn, post_compile_fn
        self._transformer, self._batches = input_transformer, 0

    @property
    def _called(self) -> Callable[[Any], tuple[Tensor, Any]]:
        called, transformer = super()._called, self._transformer
        return called if transformer is None else lambda batch: called(transformer(batch))

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Trains one step on the next batch and returns the model's output.

        Raises:
            StopIteration, StageError, ValueError: as in every pipeline.
        """
        config = self._configs
        if self._batches == config.compile_on_iter:
            before, after = self._around
            if before is not None:
                before(self._model)
            self._model.compile(fullgraph=config.fullgraph, dynamic=config.dynamic, backend=config.backend)
            if after is not None:
                after(self._model)
        self._batches += 1
        return super().progress(dataloader_iter)


class TrainPipelineFusedSparseDist(TrainPipelineSparseDist):
    """`TrainPipelineSparseDist` under TorchRec's name of a pipeline that looks rows up on another CUDA stream.

    Here a forward issues its lookup and waits for rows when they are first used. The results are those of a plain loop.

    Args:
        model, optimizer, device, execute_all_batches, apply_jit, pipeline_postproc, custom_model_fwd: as in
            `TrainPipelineSparseDist`.
        strict: only False is supported.
        emb_lookup_stream: the stream of the lookup in TorchRec: ``"data_dist"``, ``"current"`` or ``"new"``.
        embedding_lookup_after_data_dist: when that stream looks up in TorchRec.
        options: further arguments of `TrainPipelineSparseDist`.

    Raises:
        ValueError: an unsupported option.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Any = None,
        strict: bool = False,
        emb_lookup_stream: str = "data_dist",
        embedding_lookup_after_data_dist: bool = False,
        **options: Any,
    ) -> None:
        if strict is not False:
            raise ValueError("strict=True is not supported: it needs CUDA events. Fix: leave it out")
        if emb_lookup_stream not in ("data_dist", "current", "new") or not isinstance(
            embedding_lookup_after_data_dist, bool
        ):
            raise ValueError(
                f"emb_lookup_stream={emb_lookup_stream!r} must be 'data_dist', 'current' or 'new', and "
                f"embedding_lookup_after_data_dist={embedding_lookup_after_data_dist!r} a bool"
            )
        super().__init__(
            model,
            optimizer,
            device,
            execute_all_batches,
            apply_jit,
            pipeline_postproc=pipeline_postproc,
            custom_model_fwd=custom_model_fwd,
            **options,
        )


class DataLoadingThread(threading.Thread):
    """Loads one batch ahead in a thread, and copies it to a device.

    Args:
        device: of the batches.
        dataloader_iter: the batches; they have ``to(device, non_blocking=)``.
        to_device_non_blocking: whether copies from page-locked memory do not block.
        memcpy_stream_priority: priority of the stream of copies to a GPU.
        memcpy_stream: that stream. Default: a new one.

    >>> thread = DataLoadingThread(torch.device("cpu"), iter([torch.ones(1)]), False)
    >>> thread.start()
    >>> thread.get_next_batch(), thread.get_next_batch()
    (tensor([1.]), None)
    >>> thread.stop()
    """

    __class_getitem__: Any = classmethod(GenericAlias)

    def __init__(
        self,
        device: torch.device,
        dataloader_iter: Iterator[Any],
        to_device_non_blocking: bool,
        memcpy_stream_priority: int = 0,
        memcpy_stream: torch.Stream | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self._device, self._iterator, self._non_blocking = device, dataloader_iter, to_device_non_blocking
        self._stream: Any = memcpy_stream
        if memcpy_stream is None and device.type != "cpu":
            self._stream = torch.Stream(device, priority=memcpy_stream_priority)
        self._ready: Queue[tuple[Any, BaseException | None]] = Queue(1)
        self._stopped, self._over = threading.Event(), False

    def run(self) -> None:
        """Loads until the data end or `stop` is called."""
        error: BaseException | None = None
        try:
            for batch in self._iterator:
                on_gpu = self._stream is not None and self._device.type != "cpu"
                with self._stream if on_gpu else nullcontext():
                    moved = batch.to(self._device, non_blocking=self._non_blocking)
                if on_gpu:
                    self._stream.synchronize()
                if not self._put((moved, None)):
                    return
        except Exception as caught:
            error = caught
        self._put((None, error or StopIteration()))

    def _put(self, entry: tuple[Any, BaseException | None]) -> bool:
        while not self._stopped.is_set():
            try:
                self._ready.put(entry, timeout=_POLL_S)
                return True
            except Full:
                continue
        return False

    def stop(self) -> None:
        """Ends the thread. The iterator keeps what it has not given."""
        self._stopped.set()

    def get_next_batch(self, none_throws: bool = False) -> Any:
        """The next batch on the device. None at the end of the data, or after `stop`.

        Args:
            none_throws: whether the end is an error.

        Raises:
            StopIteration: the end, with `none_throws`.
            Exception: what the iterator or the copy has raised.
        """
        while not self._over and not self._stopped.is_set():
            try:
                batch, error = self._ready.get(timeout=_POLL_S)
            except Empty:
                continue
            if error is None:
                return batch
            self._over = True
            if not isinstance(error, StopIteration):
                raise error
        if none_throws:
            raise StopIteration
        return None
