"""The pipelines with the results of a plain loop, under TorchRec's names."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.comm import all_reduce
from recshard_lab.train.pipelines.base import Pipeline, flag
from recshard_lab.train.pipelines.lanes import Lane, arrive
from recshard_lab.train.pipelines.runway import Flight
from recshard_lab.train.pipelines.sending import Sent

Forward = Callable[[Any], tuple[Tensor, Any]]

_UNHONOURED = {
    "apply_jit": "torch has deprecated torch.jit.script; compile_dense(model) compiles the dense part",
    "free_features_storage_early": "the features of a batch may share memory with your data, so they are not freed",
}


class TrainPipelineBase(Pipeline):
    """Loads the next batch and copies it to the device while this one is computed: the plain loop.

    Args:
        model, optimizer, device, custom_model_fwd: as in `Pipeline`, whose switches are accepted too.
        enable_inplace_copy_batch: True is supported on CPUs, where batches are not copied.

    >>> class Square(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.tensor(3.0))
    ...     def forward(self, batch):
    ...         loss = (self.w * batch) ** 2
    ...         return loss, loss.detach()
    >>> model = Square()
    >>> with TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.25), torch.device("cpu")) as pipeline:
    ...     pipeline.progress(iter([torch.tensor(1.0)])), model.w.item()
    (tensor(9.), 1.5)
    """

    feeds = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        custom_model_fwd: Forward | None = None,
        enable_inplace_copy_batch: bool = False,
        **switches: Any,
    ) -> None:
        super().__init__(model, optimizer, device, custom_model_fwd, **switches)
        self._check_copies(enable_inplace_copy_batch)


class TrainPipelineSparseDist(Pipeline):
    """Sends the ids of batch i + 1 while batch i is computed and batch i + 2 is loaded.

    Args:
        model, optimizer, device, custom_model_fwd: as in `Pipeline`, whose switches are accepted too.
        execute_all_batches: False ends with the data, as TorchRec does: the last two batches, which are in flight
            then, are dropped. The ranks agree on the end with one exchange of 4 bytes per step.
        context_type: only None is supported; no module is rewritten.
        pipeline_postproc: whether ids that the model computes from the batch (permuted, joined) are sent ahead
            too. False leaves such collections in the forward.
        apply_jit, free_features_storage_early: only False is supported.
        enqueue_batch_after_forward: whether batch i + 2 is loaded after the forward of batch i, so that its copy does
            not compete with lookups in host memory. It needs ``execute_all_batches=True``. Default: before the forward.
        enable_inplace_copy_batch: True is supported on CPUs, where batches are not copied.
        clear_data_dist_inputs: whether messages of ids are freed once they have arrived. They always are.
        dmp_collection_sync_interval_batches: as in `Pipeline`.

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
        context_type: Any = None,
        pipeline_postproc: bool = True,
        custom_model_fwd: Forward | None = None,
        dmp_collection_sync_interval_batches: int | None = 1,
        enqueue_batch_after_forward: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
        **switches: Any,
    ) -> None:
        if context_type is not None:
            raise ValueError(
                f"context_type={context_type!r:.60} is not supported: no module is rewritten. Fix: leave it out"
            )
        _refuse(apply_jit=apply_jit, free_features_storage_early=free_features_storage_early)
        flag("clear_data_dist_inputs", clear_data_dist_inputs)
        switches["dmp_collection_sync_interval_batches"] = dmp_collection_sync_interval_batches
        super().__init__(model, optimizer, device, custom_model_fwd, **switches)
        self._check_copies(enable_inplace_copy_batch)
        self._loads_after_forward = flag("enqueue_batch_after_forward", enqueue_batch_after_forward)
        if enqueue_batch_after_forward and not execute_all_batches:
            raise ValueError(
                "enqueue_batch_after_forward=True with execute_all_batches=False: a step must know before its forward "
                "whether batch i + 2 exists. Fix: leave one of them out"
            )
        self._trace_ways = flag("pipeline_postproc", pipeline_postproc)
        self._executes_all = flag("execute_all_batches", execute_all_batches)

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {"execute_all_batches": self._executes_all}

    def _next(self) -> tuple[Flight, Sent]:
        flight, sent = super()._next()
        if self._executes_all:
            return flight, sent
        following = [other for other in self._flights if other.source == flight.source][1:2]
        here = torch.tensor([float(bool(following) and following[0].loaded.exception() is None)])
        if all_reduce(here.to(self._device), self._env, "pipeline/agree").item() < self._env.world_size:
            self._over.add(flight.source)
            self._flights = deque(other for other in self._flights if other.source != flight.source)
            raise StopIteration
        return flight, sent


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist):
    """Sends two batches ahead: sizes of batch i + 2, ids of batch i + 1, each in a thread, while batch i is computed.

    Ids cannot be sent before every rank has their sizes: two messages, one after the other. Here the two belong to
    different batches and are sent concurrently, so a step can be shorter than both together. It needs the memory of
    one more batch.

    If tables have a slow tier (compute kernel "fused_uvm_caching", dynamic tables with tiers), a further thread moves
    the rows of batch i + 1 into the fast tier as soon as its ids are there. With ``threads=False``, the forward moves
    them. The weights of cached tables are the plain loop's, bit for bit.

    Args:
        all: as in `TrainPipelineSparseDist`.
    """

    ahead = 2
    apart = True

    def _open(self) -> None:
        super()._open()
        if self._threads:
            self._lanes["prefetch"] = Lane("prefetch", self._device)

    def _start(self, flight: Flight) -> None:
        flight.prefetched = None  # ids that are sent again, after tables moved, are prefetched again
        super()._start(flight)

    def _step(self, flight: Flight, sent: Sent) -> Any:
        if flight.prefetched is not None:
            begun = perf_counter()
            arrive(flight.prefetched.result(), sent.lookup_input)
            self._log.note("wait", flight.number, begun)
        following = self._flights[0] if self._flights else None
        if following is not None and following.sent is not None and self._model.training and self._prefetches():
            lane, stream = self._lanes["prefetch"], torch.cuda if self._device.type == "cuda" else None
            stepped = None if stream is None else stream.current_stream(self._device).record_event()
            following.prefetched = lane.submit(partial(self._prefetch, following, stepped))
        return super()._step(flight, sent)

    def _prefetches(self) -> bool:
        """Whether a table has a slow tier, and a thread can move its rows."""
        return "prefetch" in self._lanes and any(call.module.executor.prefetches for call in self._fed)

    def _prefetch(self, flight: Flight, stepped: Any) -> Any:
        """Moves the rows of a batch, once its ids are there. Returns the event after it, on a GPU."""
        lane = self._lanes["prefetch"]
        assert flight.sent is not None
        if flight.sent.exception() is None:  # `progress` raises it
            sent = flight.sent.result()
            arrive(stepped)
            arrive(sent.event, sent.lookup_input)
            with self._log.stage("prefetch", flight.number):
                for call, lookup_input in sent.pairs(self._fed):
                    if call.module.training:
                        call.module.executor.prefetch(lookup_input)
        return lane.mark()


class EvalPipelineSparseDist(TrainPipelineSparseDist):
    """Runs the model on one batch per call, without gradients and updates, in training and evaluation mode.

    Args:
        model, optimizer, device, apply_jit, pipeline_postproc: as in `TrainPipelineSparseDist`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        **switches: Any,
    ) -> None:
        super().__init__(model, optimizer, device, apply_jit=apply_jit, pipeline_postproc=pipeline_postproc, **switches)

    def _step(self, flight: Flight, sent: Sent) -> Any:
        with torch.no_grad():
            return self._run_forward(flight.number, sent)[1]

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Scores the next batch.

        Raises:
            StopIteration, StageError, ValueError: as in every pipeline.
        """
        return super().progress(dataloader_iter)


def _refuse(**options: Any) -> None:
    for name, value in options.items():
        if value is not False:
            raise ValueError(f"{name}={value!r:.40} is not supported: {_UNHONOURED[name]}. Fix: leave it out")
