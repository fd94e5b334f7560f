"""Batches in flight: loaded, copied, their ids sent. Each stage has a thread. The pipeline sets how far ahead."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

from recshard_lab.comm import ShardingEnv, all_gather_object, refuse_differences
from recshard_lab.distributed import DistributedModelParallel, ShardedCollection
from recshard_lab.train.pipelines.calls import Fed, PipelineReport, Watch, sharded_collections
from recshard_lab.train.pipelines.lanes import Lane, StageError, arrive
from recshard_lab.train.pipelines.sending import Announced, EndOfData, Sender, Sent, described
from recshard_lab.train.stages import StageLog

THREADS = "Separate threads load batches and send their ids."
NO_THREADS = "Batches are loaded between steps, and their messages leave between the stages of a step (threads=False)."


@dataclass(slots=True)
class Flight:
    """A batch in flight: its iterator, its number once it is loaded, and the stages that have started."""

    source: int
    number: int = -1
    loaded: Future[tuple[Any, Any]] = field(default_factory=Future)
    sent: Future[Sent] | None = None
    read: Future[Any] | None = None
    looked_up: Future[Any] | None = None
    prefetched: Future[Any] | None = None


class Runway:
    """The batches in flight beside the step of a pipeline.

    Args:
        model: its collections receive the ids.
        device: the device of the batches.
        threads, pin, fuse, uneven: as in `Pipeline`.
    """

    ahead = 1  # number of batches whose ids are in flight beside the step
    apart = False  # whether sizes and ids have separate threads
    feeds = True  # whether ids are sent ahead
    _loads_after_forward = False
    _trace_ways = True  # also ids that the model computes from the batch

    def __init__(
        self, model: nn.Module, device: torch.device, *, threads: bool, pin: bool, fuse: bool, uneven: str
    ) -> None:
        self._model, self._device = model, device
        self._threads, self._pin, self._fuse, self._uneven = threads, pin, fuse, uneven
        self._env = env_of(model)
        self._log = StageLog(self._env.rank)
        self._flights: deque[Flight] = deque()
        self._iterator: Iterator[Any] | None = None
        self._number = self._source = 0
        self._over: set[int] = set()
        self._collections: dict[ShardedCollection, str] = {}
        self._lanes: dict[str, Lane] = {}
        self._sender: Sender | None = None
        self._fed: list[Fed] = []
        self._report: PipelineReport | None = None

    @property
    def batches_under_way(self) -> int:
        """Number of batches taken from the iterator and not trained on yet; a resumed run must read them again."""
        return sum(_there(flight) for flight in self._flights)

    @property
    def batches_dropped(self) -> int:
        """Number of batches that ``uneven="stop"`` dropped on this rank."""
        return self._sender.dropped if self._sender is not None else 0

    def drain(self) -> None:
        """Waits until no stage is running. Batches in flight stay and come next."""
        for lane in self._lanes.values():
            lane.drain()

    def reset(self) -> None:
        """Drops the batches in flight, and their iterator. All ranks must call it."""
        self.drain()
        self._flights.clear()
        self._iterator = None

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Traces the model, or another one, again with the next batch. All ranks must call it.

        Raises:
            ValueError: ``model`` is not a module, or ``sparse_dist=False``, which is not supported.
        """
        if model is not None and not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, got {model!r:.80}")
        if sparse_dist is not True:
            raise ValueError(
                "sparse_dist=False is not supported: batches in flight are sent in order. Fix: leave it out"
            )
        self.drain()
        self._model = model if model is not None else self._model
        self._release()
        for flight in self._flights:
            flight.sent = None

    def _fill(self, iterator: Iterator[Any]) -> None:
        """Starts what can start before the step: loads one batch more than are sent."""
        if not hasattr(iterator, "__next__"):
            raise ValueError(f"progress takes an iterator, got {type(iterator).__name__}. Fix: pass iter(dataloader)")
        if not self._lanes:
            self._open()
        if iterator is not self._iterator:
            self._iterator, self._source = iterator, self._source + 1
        self._load_up_to(self.ahead + 1 + (not self._loads_after_forward))
        self._send()

    def _load_up_to(self, count: int) -> None:
        """Starts loading until so many batches are in flight."""
        while len(self._flights) < count and self._source not in self._over:
            assert self._iterator is not None
            flight = Flight(self._source)
            flight.loaded = self._lanes["load"].submit(partial(self._load, self._iterator, flight))
            self._flights.append(flight)

    def _load_after_forward(self) -> None:
        if self._loads_after_forward:
            self._load_up_to(self.ahead + 1)

    def _send(self) -> None:
        """Sends the ids of all batches that may be in flight."""
        upto = self.ahead + 1 if self._report is not None or not self.feeds else 1
        for flight in list(self._flights)[:upto]:
            if flight.sent is None:
                self._start(flight)

    def _start(self, flight: Flight) -> None:
        fed, lanes = list(self._fed), self._lanes
        if self.apart:
            announced = lanes["sizes"].submit(lambda: self._announce(flight, fed, "sizes"))
            flight.sent = lanes["input_dist"].submit(lambda: self._send_announced(flight, announced, fed))
        else:
            flight.sent = lanes["input_dist"].submit(lambda: self._exchange(flight, fed))

    def _exchange(self, flight: Flight, fed: Sequence[Fed]) -> Generator[None, None, Sent]:
        announced = yield from self._announce(flight, fed, "input_dist")
        return (yield from self._finish(flight, announced, fed))

    def _send_announced(
        self, flight: Flight, announced: Future[Announced], fed: Sequence[Fed]
    ) -> Generator[None, None, Sent]:
        yield
        self._lanes["sizes"].wait(announced)
        return (yield from self._finish(flight, announced.result(), fed))

    def _announce(self, flight: Flight, fed: Sequence[Fed], stage: str) -> Generator[None, None, Announced]:
        assert self._sender is not None
        if flight.source in self._over:
            raise EndOfData
        _wait_for(flight.loaded)
        try:
            with self._log.stage(stage if fed else "agree", flight.number):
                return (yield from self._sender.announce(flight.number, lambda: self._arrived(flight), fed))
        except EndOfData:
            self._over.add(flight.source)
            raise

    def _arrived(self, flight: Flight) -> tuple[Any, Any]:
        batch, event = flight.loaded.result()
        arrive(event, batch)
        return batch, event

    def _finish(self, flight: Flight, announced: Announced, fed: Sequence[Fed]) -> Generator[None, None, Sent]:
        assert self._sender is not None
        if not fed:
            return Sent(announced.batch, event=announced.event)
        with self._log.stage("input_dist", flight.number):
            sent = yield from self._sender.send(announced, fed)
        sent.event = self._lanes["input_dist"].mark()
        return sent

    def _between_stages(self) -> None:
        """Without threads: advances every stage to its next message."""
        if not self._threads:
            for lane in self._lanes.values():
                lane.advance()

    def _load(self, iterator: Iterator[Any], flight: Flight) -> tuple[Any, Any]:
        """The next batch on the device. An error names its stage. Batches are numbered here."""
        flight.number = number = self._number
        if flight.source in self._over:
            raise EndOfData
        stage = "load"
        try:
            with self._log.stage(stage, number):
                try:
                    batch = next(iterator)
                except StopIteration:
                    self._number -= 1
                    raise EndOfData from None
                finally:
                    self._number += 1
            stage = "copy"
            with self._log.stage(stage, number):
                if self._pin and hasattr(batch, "pin_memory"):
                    batch = batch.pin_memory()
                batch = batch.to(self._device, non_blocking=True)
            return batch, self._lanes["load"].mark()
        except EndOfData:
            raise
        except Exception as error:
            raise StageError(stage, number, self._env.rank, described(error)) from error

    def _next(self) -> tuple[Flight, Sent]:
        """The next batch, with its ids."""
        while True:
            if not self._flights:
                raise StopIteration
            self._resend_what_moved()
            flight = self._flights[0]
            assert flight.sent is not None
            begun = perf_counter()
            self._lanes["input_dist"].wait(flight.sent)
            self._log.note("wait", flight.number, begun)
            self._flights.popleft()
            try:
                sent = flight.sent.result()
            except EndOfData:
                gone = flight.source
                self._flights = deque(other for other in self._flights if other.source != gone)
                self._over.add(gone)
                self._send()
                if not self._flights:
                    raise StopIteration from None
                continue
            arrive(sent.event, sent.batch, sent.lookup_input)
            return flight, sent

    def _resend_what_moved(self) -> None:
        """Sends ids again that were sent under an earlier layout. `drain` was called before the layout changed."""
        assert self._sender is not None
        if not self._sender.knows(collection.env for collection in self._collections):
            self.attach()
            self._open()
            self._send()
            return
        first = self._flights[0]
        if first.sent is None or not first.sent.done() or first.sent.exception() is not None:
            return
        moved = any(
            own.local_batch.layout is not call.module.layout for call, own in first.sent.result().pairs(self._fed)
        )
        for flight in self._flights if moved else ():
            if flight.sent is not None:
                self._start(flight)

    def _plan(self, watch: Watch, batch: Any) -> None:
        """After the first batch: sets the calls whose ids are sent ahead, the same on every rank."""
        fed, report = watch.plan(batch, self._model)
        report = replace(report, note=THREADS if self._threads else NO_THREADS)
        by_rank = all_gather_object(tuple((call.path, call.number) for call in fed), self._env)
        if any(other != by_rank[0] for other in by_rank):
            fed = []
            report = PipelineReport((), f"nothing is sent ahead: ranks differ in what they can send, {by_rank}")
        self._fed, self._report = fed, report
        self._send()

    def _open(self) -> None:
        self._collections = sharded_collections(self._model)
        facts = {
            "pipeline": type(self).__name__,
            "fuse_exchanges": self._fuse,
            "uneven": self._uneven,
            "collections": sorted(self._collections.values()),
            **self._facts(),
        }
        refuse_differences(self._env, {"arguments of the pipeline": facts})
        names = ["load", "input_dist", *(["sizes"] if self.apart else [])]
        self._lanes = {name: Lane(name, self._device, self._threads) for name in names}
        envs = [collection.env for collection in self._collections]
        self._sender = Sender(self._env, envs, fused=self._fuse, uneven=self._uneven, apart=self.apart)
        for collection in self._collections:
            collection.tell_before_moving(self)
        weakref.finalize(self, _close_lanes, list(self._lanes.values()))

    def _facts(self) -> dict[str, Any]:
        """Further arguments that must be equal on all ranks, because collectives depend on them."""
        return {}

    def _release(self) -> list[str]:
        """Ends threads and connections. Returns the names of threads that did not end."""
        stuck = [name for name, lane in self._lanes.items() if not lane.close()]
        if self._sender is not None and not stuck:
            self._sender.close()
        self._lanes, self._sender, self._fed, self._report = {}, None, [], None
        return stuck


def env_of(model: nn.Module) -> ShardingEnv:
    """The ranks that train a model together."""
    for module in model.modules():
        if isinstance(module, DistributedModelParallel):
            return module.dense_env
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return ShardingEnv.from_process_group(module.process_group)
    return next((collection.env for collection in sharded_collections(model)), ShardingEnv.from_local(1, 0))


def _wait_for(future: Future[Any]) -> None:
    future.exception()


def _there(flight: Flight) -> bool:
    """Whether a batch came from the iterator; waits for it."""
    return flight.loaded.exception() is None


def _close_lanes(lanes: list[Lane]) -> None:
    for lane in lanes:
        lane.close(0.0)
