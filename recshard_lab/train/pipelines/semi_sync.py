"""The pipeline with other results than a plain loop: embeddings are one step old.

::

    thread "input_dist"   ids of i + 2
    thread "lookup"       rows of i + 1 read | and sent to the source ranks
    this thread           dense forward of i | dense backward of i | tables stepped by i | optimizer of i
                                                                   ^ waits until the rows of i + 1 have been read

Batch i + 1 reads its rows as they were after step i - 1; in a plain loop, it reads them after step i. The dense part is
never stale, and every gradient updates the current rows. The order is fixed, so results repeat bit for bit, but they
differ from a plain loop's (stale embeddings: Adnan et al. 2024, "Heterogeneous Acceleration Pipeline for
Recommendation System Training", and TorchRec's pipeline of this name).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

from recshard_lab.comm import ShardingEnv
from recshard_lab.distributed import DistributedModelParallel
from recshard_lab.distributed.step.executor import Executor, OutputPaths
from recshard_lab.train.pipelines.lanes import Lane, arrive
from recshard_lab.train.pipelines.runway import Flight
from recshard_lab.train.pipelines.sending import Sent, close_twin
from recshard_lab.train.pipelines.train import Forward, TrainPipelineSparseDist


class TrainPipelineSemiSync(TrainPipelineSparseDist):
    """Reads the rows of batch i + 1 before batch i updates the tables: **its results differ from a plain loop's**.

    A changed learning rate of fused tables takes effect one step later too.

    Args:
        model, optimizer, device, execute_all_batches, pipeline_postproc, custom_model_fwd: as in
            `TrainPipelineSparseDist`.
        start_batch: number of first batches that are trained as in a plain loop, since early rows change fast. The
            first batch always is.
        stash_gradients: only False is supported; the dense part is never stale.
        strict: only False is supported.

    Raises:
        ValueError: a start below 0, or an unsupported option.
    """

    ahead = 2  # the ids of i + 1 must have arrived when its rows are read

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        start_batch: int = 900,
        stash_gradients: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Forward | None = None,
        strict: bool = False,
        dmp_collection_sync_interval_batches: int | None = 1,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
        **switches: Any,
    ) -> None:
        if isinstance(start_batch, bool) or not isinstance(start_batch, int) or start_batch < 0:
            raise ValueError(f"start_batch must be an integer from 0, got {start_batch!r:.80}")
        for name, value in {"stash_gradients": stash_gradients, "strict": strict}.items():
            if value is not False:
                raise ValueError(
                    f"{name}={value!r:.40} is not supported: the dense part is never stale. Fix: leave it out"
                )
        super().__init__(
            model,
            optimizer,
            device,
            execute_all_batches,
            apply_jit,
            pipeline_postproc=pipeline_postproc,
            custom_model_fwd=custom_model_fwd,
            dmp_collection_sync_interval_batches=dmp_collection_sync_interval_batches,
            enable_inplace_copy_batch=enable_inplace_copy_batch,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
            **switches,
        )
        self._start_batch = start_batch
        self._twins: list[tuple[ShardingEnv, ShardingEnv]] = []
        self._roads: dict[Executor, OutputPaths] = {}

    def _open(self) -> None:
        super()._open()
        self._lanes["lookup"] = Lane("lookup", self._device, self._threads)
        for collection in self._collections:
            if all(env.pg is not collection.env.pg for env, _ in self._twins):
                self._twins.append((collection.env, collection.env.duplicate()))

    def drain(self) -> None:
        """Waits until no stage is running. Drops the connections of executors, which may be replaced now."""
        super().drain()
        self._roads.clear()

    def _start(self, flight: Flight) -> None:
        flight.looked_up = flight.read = None  # ids that are sent again, after tables moved, are looked up again
        super()._start(flight)

    def _release(self) -> list[str]:
        stuck = super()._release()
        for _, twin in self._twins if not stuck else ():
            close_twin(twin)
        self._twins, self._roads = [], {}
        return stuck

    def _step(self, flight: Flight, sent: Sent) -> Any:
        number = flight.number
        if not self._model.training or self._steps < self._start_batch or not sent.lookup_input:
            if flight.looked_up is not None:
                flight.looked_up.exception()
                for lookup_input in sent.lookup_input:
                    lookup_input.looked_up = None
            return super()._step(flight, sent)
        self._optimizer.zero_grad()
        if isinstance(self._model, DistributedModelParallel):
            self._model.fused_optimizer.push_learning_rates()
        self._look_ahead(flight)
        assert flight.looked_up is not None
        begun = perf_counter()
        saved, event = flight.looked_up.result()
        self._log.note("wait", number, begun)
        arrive(event, sent.lookup_input)
        if self._flights:
            self._look_ahead(self._flights[0])
        with _found_by_scalers(sent, saved):
            losses, output = self._run_forward(number, sent)
        self._between_stages()
        if self._may_step(losses, number):
            with self._stage("backward", number):
                losses.sum().backward()
                self._wait_for_rows(number)
                for call, lookup_input, kept in reversed(list(zip(self._fed, sent.lookup_input, saved, strict=True))):
                    if lookup_input.looked_up is not None and lookup_input.looked_up.grad is not None:
                        call.module.executor.split(kept, lookup_input.looked_up.grad)
                        call.module.executor.update(kept)
            with self._stage("optimizer", number):
                self._optimizer.step()
        self._steps += 1
        self._sync_replicas()
        return output

    def _look_ahead(self, flight: Flight) -> None:
        """Starts the lookup of a batch, if it has not started."""
        if flight.looked_up is None and flight.sent is not None:
            for call in self._fed:
                executor = call.module.executor
                if executor not in self._roads:
                    twin = next(twin for env, twin in self._twins if env.pg is call.module.env.pg)
                    self._roads[executor] = executor.output_paths(twin)
            flight.read = Future()
            flight.looked_up = self._lanes["lookup"].submit(partial(self._look_up, flight))

    def _look_up(self, flight: Flight) -> tuple[list[Any], Any]:
        """The state of each call that backward needs. ``lookup_input.looked_up`` has the rows and their gradient."""
        assert flight.sent is not None and flight.read is not None  # noqa: PT018
        executors = [call.module.executor for call in self._fed]
        try:
            self._lanes["input_dist"].wait(flight.sent)
            sent = flight.sent.result()
            arrive(sent.event, sent.lookup_input)
            with self._log.stage("lookup", flight.number):
                pairs = zip(executors, sent.lookup_input, strict=True)
                steps = [one.step(lookup_input, True, self._roads[one]) for one, lookup_input in pairs]
                for executor, step in zip(executors, steps, strict=True):
                    executor.look_up(step)
        finally:
            flight.read.set_result(self._lanes["lookup"].mark())
        with self._log.stage("output_dist", flight.number):
            for executor, step in zip(executors, steps, strict=True):
                executor.give(step)
                step.lookup_input.looked_up = executor.receive(step).requires_grad_()
        return steps, self._lanes["lookup"].mark()

    def _wait_for_rows(self, number: int) -> None:
        """The tables may be updated once the rows of the next batch have been read."""
        if self._flights and self._flights[0].read is not None:
            with self._log.stage("wait", number):
                arrive(self._flights[0].read.result())


@contextmanager
def _found_by_scalers(sent: Sent, saved: Sequence[Any]) -> Iterator[None]:
    """Lets a GradScaler in the forward find the lookups of rows that were looked up ahead."""
    rows: list[Any] = [lookup_input.looked_up for lookup_input in sent.lookup_input]
    for own, kept in zip(rows, saved, strict=True):
        if own is not None:
            own.steps_in_backward = kept
    try:
        yield
    finally:
        for own in rows:
            if own is not None:
                del own.steps_in_backward
