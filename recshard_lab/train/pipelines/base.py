"""The base of all pipelines: batches in flight, and the step of the next one.

::

    progress k            thread "load"         thread "input_dist"       this thread
    TrainPipelineBase     load, copy k + 2      agree on k + 1            forward, backward, optimizer of k
    ... SparseDist        load, copy k + 2      ids of k + 1              the same
    Prefetch ...          load, copy k + 3      sizes of k + 2; a separate thread sends the ids of k + 1. A thread
                                                "prefetch" moves the rows of k + 1 from slow tiers of tables

The order of computation is that of a plain loop, so all of these produce bit-identical weights.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import GenericAlias
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.arguments import device_named
from recshard_lab.comm import ShardingEnv, all_reduce, compute_device, failing_rank
from recshard_lab.cores import usable_cores
from recshard_lab.distributed import DMPCollection
from recshard_lab.train.pipelines.calls import Fed, PipelineReport, Watch
from recshard_lab.train.pipelines.lanes import StageError
from recshard_lab.train.pipelines.runway import Flight, Runway, env_of
from recshard_lab.train.pipelines.sending import UNEVEN, Sent, described
from recshard_lab.train.stages import StageEvent

NAN_LOSS = ("ignore", "error", "skip")
_NOT_CALLED = {
    "copy_batch_to_gpu",
    "dequeue_batch",
    "enqueue_batch",
    "fill_pipeline",
    "inplace_copy_batch_to_gpu",
    "start_sparse_data_dist",
    "sync_embeddings",
    "wait_sparse_data_dist",
}
"""Stages of TorchRec's pipelines, which a subclass may override there."""


class TrainPipeline(ABC):
    """One step per call. `TrainPipeline[In, Out]` names the types of batches and outputs."""

    __class_getitem__: Any = classmethod(GenericAlias)

    @abstractmethod
    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Trains one step on the next batch and returns the model's output.

        Raises:
            StopIteration: the data have ended.
        """


class Pipeline(Runway, TrainPipeline):
    """The base class of all pipelines.

    Args:
        model: called with a batch, returns ``(losses, output)``. It is not rewritten: between two calls of `progress`
            it is unchanged.
        optimizer: of the parameters that backward does not update; a `CombinedOptimizer` or any torch optimizer.
        device: the device of the batches.
        custom_model_fwd: called with the batch instead of the model.
        threads: whether separate threads load batches and send ids. False uses the calling thread alone: messages
            leave between the stages of a step, which is faster if ranks have no spare core. Default: True if this rank
            has two cores or more and its group does not use NCCL, which does not allow two communicators to work
            concurrently in any order.
        pin_memory: whether to copy batches through page-locked memory, which needs a GPU. Default: True on a GPU.
        fuse_exchanges: whether the collections of a model share the messages of a batch.
        on_nan_loss: ``"error"`` raises for a loss that is not finite, ``"skip"`` skips its batch: both on all ranks and
            before backward, with one exchange of 4 bytes per step. ``"ignore"`` does not check.
        uneven: if ranks run out of data at different batches: ``"error"`` raises on all of them, ``"stop"`` drops the
            remaining batches of the others.
        dmp_collection_sync_interval_batches: number of batches between two syncs of a `DMPCollection`. None: you call
            `sync`.

    Raises:
        ValueError: a switch that this machine does not support, or an unknown value.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        custom_model_fwd: Callable[[Any], tuple[Tensor, Any]] | None = None,
        *,
        threads: bool | None = None,
        pin_memory: bool | None = None,
        fuse_exchanges: bool = True,
        on_nan_loss: str = "ignore",
        uneven: str = "error",
        dmp_collection_sync_interval_batches: int | None = 1,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, got {model!r:.80}")
        if not all(callable(getattr(optimizer, name, None)) for name in ("zero_grad", "step")):
            raise ValueError(f"optimizer must be a torch optimizer or a CombinedOptimizer, got {optimizer!r:.80}")
        if custom_model_fwd is not None and not callable(custom_model_fwd):
            raise ValueError(f"custom_model_fwd must be a function of the batch, got {custom_model_fwd!r:.80}")
        if device is None:
            raise ValueError(
                "device must be the device of the batches, got None. Fix: pass torch.device('cpu') or a GPU"
            )
        device = device_named(device)
        super().__init__(
            model,
            device,
            threads=_threads(threads, env_of(model)),
            pin=_pinned(pin_memory, device),
            fuse=flag("fuse_exchanges", fuse_exchanges),
            uneven=_one_of("uneven", uneven, UNEVEN),
        )
        self._optimizer, self._forward = optimizer, custom_model_fwd
        self._on_nan_loss = _one_of("on_nan_loss", on_nan_loss, NAN_LOSS)
        self._interval = _interval(dmp_collection_sync_interval_batches)
        self._steps, self._closed = 0, False

    def _facts(self) -> dict[str, Any]:
        return {"on_nan_loss": self._on_nan_loss, "dmp_collection_sync_interval_batches": self._interval}

    def _check_copies(self, in_place: Any) -> None:
        if flag("enable_inplace_copy_batch", in_place) and self._device.type != "cpu":
            raise ValueError(
                f"enable_inplace_copy_batch=True is not supported on {self._device}: batches are copied on a separate "
                f"stream, into memory of that stream. Fix: leave it out"
            )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        unused = sorted(_NOT_CALLED & vars(cls).keys())
        if unused:
            raise TypeError(
                f"{cls.__name__} overrides {unused[0]}(), which no pipeline calls: stages of several batches run in "
                f"separate threads. Fix: change batches in the iterator or in custom_model_fwd=, or override progress()"
            )

    # ---- for the user ----

    def report(self) -> PipelineReport:
        """The collections whose ids are sent ahead, and why others are not. Known after the first batch."""
        if self._report is not None:
            return self._report
        return PipelineReport((), "not known before the first batch")

    @property
    def events(self) -> list[StageEvent]:
        """The last thousands of stages of this rank; ``lab.views.timeline`` draws them."""
        return self._log.events

    def detach(self) -> nn.Module:
        """The model, which is never rewritten. Batches in flight stay."""
        return self._model

    def close(self) -> None:
        """Ends the threads and the connections, and drops batches in flight. All ranks must call it.

        Raises:
            RuntimeError: a thread still waits for another rank, or for the data.
        """
        self._closed = True
        stuck = self._release()
        self._flights.clear()
        if stuck:
            raise RuntimeError(f"threads {stuck} did not end: they wait for another rank or for the data")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            self.close()
        except RuntimeError:
            if kind is None:
                raise

    # ---- a step ----

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Trains one step on the next batch and returns the model's output.

        If you pass another iterator than before, the remaining batches of the earlier one come first.

        Raises:
            StopIteration: the data have ended, on all ranks.
            StageError: a stage failed, with its name, the batch and the rank. The other batches are not lost.
            ValueError: the pipeline is closed, or the argument is not an iterator.
        """
        if self._closed:
            raise ValueError("this pipeline was closed. Fix: make a new one")
        self._fill(dataloader_iter)
        flight, sent = self._next()
        try:
            with no_garbage_collection():
                return self._step(flight, sent)
        except StageError:
            raise
        except Exception as error:
            rank = failing_rank(error)
            raise StageError(
                self._at, flight.number, self._env.rank if rank is None else rank, described(error)
            ) from error

    _at = "forward"  # the stage that this thread is in

    @contextmanager
    def _stage(self, name: str, number: int) -> Iterator[None]:
        self._at = name
        with self._log.stage(name, number):
            yield

    def _step(self, flight: Flight, sent: Sent) -> Any:
        number, training = flight.number, self._model.training
        if not training:
            return self._run_forward(number, sent)[1]
        self._optimizer.zero_grad()
        losses, output = self._run_forward(number, sent)
        self._between_stages()
        if self._may_step(losses, number):
            with self._stage("backward", number):
                losses.sum().backward()
            self._between_stages()
            with self._stage("optimizer", number):
                self._optimizer.step()
        self._steps += 1
        self._sync_replicas()
        return output

    def _run_forward(self, number: int, sent: Sent) -> tuple[Tensor, Any]:
        watch = Watch(self._collections, self._trace_ways) if self.feeds and self._report is None else None
        with self._stage("forward", number), self._feeding(watch or Feed(self._fed, sent)):
            losses, output = (self._model if self._forward is None else self._forward)(sent.batch)
        self._load_after_forward()
        if watch is not None:
            self._plan(watch, sent.batch)
        return losses, output

    def _may_step(self, losses: Tensor, number: int) -> bool:
        """Whether the loss is finite on every rank, if `on_nan_loss` requires a check."""
        if self._on_nan_loss == "ignore":
            return True
        bad = (~losses.detach().isfinite().all()).float().reshape(1)
        flags = torch.zeros(self._env.world_size, device=bad.device)
        flags[self._env.rank] = bad[0]
        ranks = all_reduce(flags, self._env, "pipeline/loss").nonzero().flatten().tolist()
        if not ranks or self._on_nan_loss == "skip":
            return not ranks
        raise StageError("forward", number, ranks[0], f"the loss is not finite (on ranks {ranks}); nothing was stepped")

    def _sync_replicas(self) -> None:
        if isinstance(self._model, DMPCollection) and self._interval and self._steps % self._interval == 0:
            self._model.sync(optimizers=[self._optimizer])

    @contextmanager
    def _feeding(self, feed: Callable[..., Any]) -> Iterator[None]:
        """Inside the block, the collections take their ids from ``feed``."""
        for collection in self._collections:
            collection.feed = feed
        try:
            yield
        finally:
            for collection in self._collections:
                collection.feed = None


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python's cycle collector is off inside; if it was on, it is on again afterwards.

    A collection in another thread may destroy an autograd node that is written in Python, such as those of
    DistributedDataParallel, while this thread is in an operator: torch shows the collector the node of a tensor only
    as long as no other node refers to it, and the operator adds such a reference without holding the GIL.

    >>> with no_garbage_collection():
    ...     gc.isenabled()
    False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Feed:
    """Passes the collections the ids that were sent ahead for them."""

    def __init__(self, fed: Sequence[Fed], sent: Sent) -> None:
        self._ready = {(id(call.module), call.number): n for n, call in enumerate(fed)} if sent.lookup_input else {}
        self._fed, self._sent = fed, sent
        self._calls: dict[int, int] = {}

    def __call__(self, module: Any, features: Any) -> Any:
        number = self._calls.get(id(module), 0)
        self._calls[id(module)] = number + 1
        place = self._ready.get((id(module), number))
        if place is None:
            return module.send(features).wait()
        call = self._fed[place]
        if call.checked and features is not self._sent.features[place]:
            raise ValueError(
                f"collection {call.path!r} is called with other ids than those that were sent ahead for it: the "
                f"model computes something else than with the first batch. Fix: call attach(), which traces the "
                f"model again, or use TrainPipelineBase"
            )
        return self._sent.lookup_input[place]


def flag(name: str, value: Any) -> bool:
    """A switch that must be True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r:.80}")
    return value


def _one_of(name: str, value: Any, known: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r:.80}")
    return value


def _threads(asked: Any, env: ShardingEnv) -> bool:
    if asked is not None:
        return flag("threads", asked)
    # NCCL's maintainers call two communicators on one device at a time unsafe. A new thread's GPU is GPU 0.
    return compute_device(env).type == "cpu" and usable_cores() >= 2 * env.local_world_size


def _interval(value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"dmp_collection_sync_interval_batches must be an integer from 1 or None, got {value!r:.80}")
    return value


def _pinned(asked: Any, device: torch.device) -> bool:
    if asked is None:
        return device.type == "cuda"
    if flag("pin_memory", asked) and device.type != "cuda":
        raise ValueError(
            f"pin_memory=True needs a GPU, and batches go to {device}: page-locked memory speeds up copies to a GPU. "
            f"Fix: leave it out"
        )
    return bool(asked)
