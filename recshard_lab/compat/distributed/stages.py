"""TorchRec's pipelines of stages: `StagedTrainPipeline` runs a user's functions, `SparseDataDistUtil` sends ids in one.

::

    stages copy, ids     progress 1                     progress 2              progress 3
                         copy 1, ids 1, copy 2 (fill)   copy 4, ids 3           copy 5, ids 4
                         copy 3, ids 2; returns 1       returns 2               returns 3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import GenericAlias
from typing import Any

import torch
from torch import nn

from recshard_lab.comm import all_gather_object
from recshard_lab.train import TrainPipeline
from recshard_lab.train.pipelines.base import Feed
from recshard_lab.train.pipelines.calls import Fed, Watch, sharded_collections
from recshard_lab.train.pipelines.runway import env_of
from recshard_lab.train.pipelines.sending import Sent


@dataclass
class PipelineStage:
    """A function that transforms a batch before its forward.

    Args:
        name: of the stage.
        runnable: takes what the stage before has returned.
        stream: the stream of a GPU on which it runs. None, or a stream of the CPU, on the CPU.
        fill_callback: called after the function while the pipeline is filled.
        data_exhausted_callback: called instead of the function when its batch is missing.
    """

    name: str
    runnable: Callable[..., Any]
    stream: Any
    fill_callback: Callable[[], None] | None = None
    data_exhausted_callback: Callable[[], None] | None = None


class StagedTrainPipeline(TrainPipeline):
    """Runs stages of consecutive batches in each call. The caller computes forward and backward.

    Args:
        pipeline_stages: the stages, in the order of a batch.
        debug_mode: accepted as in TorchRec; errors of stages are raised in both cases.
        compute_stream: the stream of a GPU in which the model runs. Default: the current one.
        on_flush_end: called when all batches in flight have been returned after ``set_flush(True)``.

    Raises:
        ValueError: no stages.

    >>> copy = PipelineStage("copy", lambda number: number * 10, None)
    >>> add = PipelineStage("add", lambda number: number + 1, None)
    >>> pipeline, numbers = StagedTrainPipeline([copy, add]), iter([1, 2])
    >>> pipeline.progress(numbers), pipeline.progress(numbers), pipeline.progress(numbers)
    (11, 21, None)
    """

    def __init__(
        self,
        pipeline_stages: Sequence[PipelineStage],
        debug_mode: bool = False,
        compute_stream: Any = None,
        on_flush_end: Callable[[], None] | None = None,
    ) -> None:
        if not pipeline_stages:
            raise ValueError("pipeline_stages is empty. Fix: pass at least one PipelineStage")
        self._stages, self._compute_stream, self._on_flush_end = list(pipeline_stages), compute_stream, on_flush_end
        #: what each batch in flight is after its last stage, and the event after it; the oldest one first
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self._iterator: Iterator[Any] | None = None
        self._over = self._flushing = False

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self._stages)

    def set_flush(self, flush: bool) -> None:
        """Takes no further batches until those in flight have been returned. False undoes it."""
        self._flushing = flush

    def flush_end(self) -> None:
        """Ends a flush, and calls ``on_flush_end``."""
        self._flushing = False
        if self._on_flush_end is not None:
            self._on_flush_end()

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Runs each stage once, and returns the oldest batch after all stages. None at the end of the data.

        A new iterator fills an empty pipeline again.
        """
        is_empty = all(value is None for value, _ in self._in_flight)
        if is_empty and self._flushing and self._in_flight:
            self.flush_end()
            self._in_flight.clear()
        if dataloader_iter is not self._iterator:
            self._iterator, self._over = dataloader_iter, False
            if is_empty:
                self._in_flight.clear()
        if not self._in_flight:
            self._fill()
        output, event = self._in_flight.popleft()
        self._in_flight.append((None, None))
        for number in range(self.num_stages):
            self._run(self.num_stages - 1 - number, number, is_filling=False)
        self._arrive(output, event, self._compute_stream)
        return output

    def _fill(self) -> None:
        self._in_flight.extend([(None, None)] * self.num_stages)
        for place in range(self.num_stages):
            for number in range(self.num_stages - place):
                self._run(place, number, is_filling=True)

    def _run(self, place: int, number: int, is_filling: bool) -> None:
        """Runs a stage on one of the batches in flight."""
        stage = self._stages[number]
        value, event = (self._loaded(), None) if number == 0 else self._in_flight[place]
        if value is None:
            if stage.data_exhausted_callback is not None and not is_filling:
                stage.data_exhausted_callback()
            return
        on_gpu = isinstance(stage.stream, torch.Stream) and stage.stream.device.type != "cpu"
        with stage.stream if on_gpu else nullcontext():
            self._arrive(value, event, stage.stream)
            found = stage.runnable(value)
        if is_filling and stage.fill_callback is not None:
            stage.fill_callback()
        self._in_flight[place] = found, stage.stream.record_event() if on_gpu else None

    def _loaded(self) -> Any:
        if self._over or self._flushing:
            return None
        assert self._iterator is not None
        batch = next(self._iterator, None)
        self._over = batch is None
        return batch

    @staticmethod
    def _arrive(value: Any, event: Any, stream: Any) -> None:
        """Makes a stream wait for a stage of another stream, and keeps the memory of its result."""
        if event is not None:
            own = stream if isinstance(stream, torch.Stream) else torch.get_device_module().current_stream()
            own.wait_event(event)
            value.record_stream(own)


@dataclass
class _SentBatch:
    """A batch whose ids may be on their way.

    Attributes:
        batch: the batch.
        features: what each call of a collection will be called with.
        pending: the ids of each, before or after they have arrived.
    """

    batch: Any
    features: list[Any] = field(default_factory=list)
    pending: list[Any] = field(default_factory=list)
    lookup_input: list[Any] = field(default_factory=list)

    def arrive(self) -> None:
        """Waits for the ids."""
        self.lookup_input += [own.wait() for own in self.pending]
        self.pending.clear()


class SparseDataDistUtil:
    """Sends the ids of a batch in a stage of `StagedTrainPipeline`, before the forward that looks them up.

    The first forward finds where the collections' ids are in a batch; the ids of later batches are sent ahead. All
    ranks must call the same stages. Forwards must take the batches in the order of `start_sparse_data_dist`.

    Args:
        model: the sharded model. Its forwards are hooked until `detach`.
        data_dist_stream: the stream of a GPU on which the stage runs. None on the CPU.
        apply_jit: only False is supported.
        prefetch_stream: the stream of `prefetch`.
        pipeline_postproc: whether ids that the model computes from the batch are sent ahead too.
        embedding_lookup_stream: only None is supported.

    Raises:
        ValueError: an unsupported option.
    """

    __class_getitem__: Any = classmethod(GenericAlias)

    def __init__(
        self,
        model: nn.Module,
        data_dist_stream: Any,
        apply_jit: bool = False,
        prefetch_stream: Any = None,
        pipeline_postproc: bool = False,
        embedding_lookup_stream: Any = None,
    ) -> None:
        if apply_jit is not False:
            raise ValueError(
                f"apply_jit={apply_jit!r:.40} is not supported: torch.jit is deprecated. Fix: leave it out"
            )
        if embedding_lookup_stream is not None:
            raise ValueError(
                "embedding_lookup_stream is not supported: it reads rows that are one step old. Fix: leave it out, or "
                "use TrainPipelineSemiSync"
            )
        self.model, self.data_dist_stream, self.prefetch_stream = model, data_dist_stream, prefetch_stream
        self._collections, self._trace = sharded_collections(model), pipeline_postproc
        self._fed: list[Fed] | None = None
        self._queue: deque[_SentBatch] = deque()
        self._watch: Watch | None = None
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward, always_call=True),
        ]

    # ---- stages ----

    def start_sparse_data_dist(self, batch: Any) -> Any:
        """Sends the ids of a batch, and returns the batch. Collective."""
        if batch is None:
            return None
        sent = _SentBatch(batch)
        for call in self._fed or ():
            sent.features.append(call.way(batch))
            sent.pending.append(call.module.send(sent.features[-1]))
        self._queue.append(sent)
        return batch

    def wait_sparse_data_dist(self) -> None:
        """Waits for the ids of all batches that were sent."""
        for sent in self._queue:
            sent.arrive()

    wait_sdd_fill_callback = wait_sparse_data_dist

    def prefetch(self, batch: Any) -> Any:
        """Moves the rows of a batch into the fast memory of tables that have a slow one. Returns the batch."""
        for sent in self._queue:
            if sent.batch is batch:
                sent.arrive()
                for call, lookup_input in zip(self._fed or (), sent.lookup_input, strict=False):
                    call.module.prefetch(lookup_input)
        return batch

    def load_prefetch(self) -> None:
        """Has no effect: a prefetched batch has its rows."""

    def data_exhausted_callback(self) -> None:
        """Has no effect: a missing batch was not sent."""

    def start_sparse_data_dist_stage(
        self, name: str = "start_sparse_data_dist", runnable: Callable[..., Any] | None = None
    ) -> PipelineStage:
        """The stage that sends ids.

        Args:
            name: of the stage.
            runnable: a function in place of `start_sparse_data_dist`, which calls it.
        """
        return PipelineStage(
            name,
            runnable or self.start_sparse_data_dist,
            self.data_dist_stream,
            self.wait_sdd_fill_callback,
            self.data_exhausted_callback,
        )

    def detach(self) -> nn.Module:
        """The model without hooks. Batches that were sent are dropped."""
        while self._hooks:
            self._hooks.pop().remove()
        self._queue.clear()
        return self.model

    # ---- inside ----

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not self._queue:
            return
        sent = self._queue[0]
        sent.arrive()
        feed: Any
        if self._fed is None:
            feed = self._watch = Watch(self._collections, self._trace)
        else:
            calls = self._fed[: len(sent.lookup_input)]
            feed = Feed(calls, Sent(sent.batch, sent.lookup_input, sent.features))
        for collection in self._collections:
            collection.feed = feed

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        for collection in self._collections:
            collection.feed = None
        sent = self._queue.popleft() if self._queue else None
        watch, self._watch = self._watch, None
        if watch is not None and sent is not None:
            fed, _ = watch.plan(sent.batch, self.model)
            names = all_gather_object(tuple((call.path, call.number) for call in fed), env_of(self.model))
            self._fed = fed if all(other == names[0] for other in names) else []
