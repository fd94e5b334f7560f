"""The queue: what is merged, refused, dropped, and that a failure stays with its request."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from recshard_lab.serving import Batch
from recshard_lab.serving.server.batcher import Batcher
from recshard_lab.serving.server.bodies import Decoder
from recshard_lab.serving.server.errors import Refused
from recshard_lab.serving.server.metrics import Metrics
from recshard_lab.serving.server.versions import Version
from tests.patience import scaled
from tests.serving.server.stub import INPUTS, Stub, batch


class Held(Stub):
    """Computes after `go` is set."""

    def __init__(self, **options: Any) -> None:
        super().__init__(options)
        self.go, self.entered = threading.Event(), threading.Event()

    def predict(self, merged: Batch) -> Any:
        self.entered.set()
        assert self.go.wait(scaled(20))
        return super().predict(merged)


def version(model: Stub, name: str = "v1") -> Version:
    return Version(name, model, Decoder(INPUTS))


async def connected() -> Any:
    await asyncio.Event().wait()


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that is a coroutine."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), scaled(30)))

    return run


async def holding(batcher: Batcher, model: Held) -> "asyncio.Task[Any]":
    """A request that is computed until `go`, so that all others wait."""
    task = asyncio.create_task(batcher.predict(version(model, "held"), batch(1), 20, connected))
    await asyncio.to_thread(model.entered.wait, 20)
    return task


@in_a_loop
async def test_waiting_requests_are_one_call_and_each_gets_its_own_answer() -> None:
    held, model, metrics = Held(), Stub({"scale": 2.0}), Metrics()
    batcher, served = Batcher(metrics, max_batch=8), version(model)
    first = await holding(batcher, held)
    tasks = [asyncio.create_task(batcher.predict(served, batch(i, samples=1 + i % 2), 20, connected)) for i in range(6)]
    await asyncio.sleep(0)
    assert len(batcher) == 6
    assert model.calls == []
    held.go.set()
    await first
    for i, answer in enumerate(await asyncio.gather(*tasks)):
        assert answer["probability"].tolist() == [2.0 * i] * (1 + i % 2)
    assert model.calls == [7, 2]  # 9 samples, 8 of which fit; a request is never split
    assert len(batcher) == 0
    assert batcher.close()


@in_a_loop
async def test_the_first_request_waits_for_others_only_as_long_as_the_delay() -> None:
    model = Stub({})
    served, batcher = version(model), Batcher(Metrics(), delay_ms=60_000, max_batch=3)
    tasks = [asyncio.create_task(batcher.predict(served, batch(i), 20, connected)) for i in range(3)]
    await asyncio.gather(*tasks)  # a whole batch does not wait
    assert model.calls == [3]
    late = asyncio.create_task(batcher.predict(served, batch(1), 20, connected))
    while not len(batcher):
        await asyncio.sleep(0)
    assert not late.done()
    assert batcher.close()  # neither does the end of the server
    assert (await late)["probability"].item() == 1
    short = Batcher(Metrics(), delay_ms=30, max_batch=100)
    assert (await short.predict(served, batch(4), 20, connected))["probability"].item() == 4
    assert short.close()


@in_a_loop
async def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    held, metrics = Held(), Metrics()
    batcher = Batcher(metrics, queue=2)
    served = version(held, "held")
    first = await holding(batcher, held)
    waiting = [asyncio.create_task(batcher.predict(served, batch(1), 20, connected)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Refused, match="the queue is full") as caught:
        await batcher.predict(served, batch(1), 20, connected)
    assert caught.value.status == 503
    assert dict(caught.value.headers())[b"retry-after"] == b"1"
    assert "recshard_queue_requests 2.0" in metrics.text().decode()
    held.go.set()
    await asyncio.gather(first, *waiting)
    assert batcher.close()
    with pytest.raises(Refused, match="the server stops"):
        await batcher.predict(served, batch(1), 20, connected)


@in_a_loop
async def test_a_deadline_is_a_504_in_the_queue_and_in_the_model() -> None:
    held, model, metrics = Held(), Stub({}), Metrics()
    batcher = Batcher(metrics)
    slow = asyncio.create_task(batcher.predict(version(held), batch(1), 0.2, connected))
    await asyncio.to_thread(held.entered.wait, 20)
    with pytest.raises(Refused, match=r"no answer after 0.05 s") as caught:
        await batcher.predict(version(model), batch(1), 0.05, connected)
    assert caught.value.status == 504
    with pytest.raises(Refused, match=r"no answer after 0.2 s"):
        await slow
    held.go.set()
    assert batcher.close()
    assert model.calls == []
    assert 'recshard_dropped_total{reason="deadline"} 1.0' in metrics.text().decode()


@in_a_loop
async def test_a_request_that_fails_does_not_fail_the_others_of_its_batch() -> None:
    held, model = Held(), Stub({})
    batcher, served = Batcher(Metrics()), version(model)
    first = await holding(batcher, held)
    tasks = [asyncio.create_task(batcher.predict(served, batch(i), 20, connected)) for i in (12, 13, 14)]
    await asyncio.sleep(0)
    held.go.set()
    await first
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(answer) if isinstance(answer, Exception) else answer["probability"].item() for answer in answers] == [
        12,
        "13 is refused",
        14,
    ]
    assert batcher.close()
