"""Sends the ids of coming batches, over separate connections.

Why it cannot deadlock: batch k's exchanges run in one thread, in the order of k, on separate process groups. A step's
other exchanges run in the main thread, in program order. So each group has one order on all ranks. The thread's
exchange k only requires that every rank's ``progress`` has reached batch k - ahead. The step of that batch requires
exchanges up to k - ahead only. By induction over k, both end.

The sizes message of a batch contains whether each rank has a batch k: its data may have ended, or loading or packing
may have failed. Then no rank sends, and all raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from recshard_lab.comm import ShardingEnv, all_gather_object, host_env
from recshard_lab.distributed.step.batch import LookupInput
from recshard_lab.distributed.step.input_dist import FAILED, OVER, READY, Packed, Sizes, issue_ids, issue_sizes
from recshard_lab.train.pipelines.calls import Fed
from recshard_lab.train.pipelines.lanes import StageError

UNEVEN = ("error", "stop")


class EndOfData(Exception):
    """The data end before this batch."""


@dataclass
class Sent:
    """A batch whose ids have arrived.

    Attributes:
        lookup_input: the ids to look up, for each call whose ids are sent ahead.
        features: the ids that were sent, for each.
        event: on a GPU, the event after the exchange.
    """

    batch: Any
    lookup_input: list[LookupInput] = field(default_factory=list)
    features: list[Any] = field(default_factory=list)
    event: Any = None

    def pairs(self, fed: Sequence[Fed]) -> Iterator[tuple[Fed, LookupInput]]:
        """Pairs of a call and its ids; empty for a batch that was not sent ahead."""
        return zip(fed, self.lookup_input, strict=True) if self.lookup_input else iter(())


@dataclass
class Announced:
    """A batch that every rank has, packed for sending; the sizes of all messages are known."""

    batch: Any
    packed: list[Packed] = field(default_factory=list)
    sizes: dict[int, Sizes] = field(default_factory=dict)
    features: list[Any] = field(default_factory=list)
    event: Any = None


class Link:
    """One set of ranks, and connections between them for sizes and for ids.

    Args:
        env: the ranks, with the connections that steps use.
        apart: whether ids have other connections than sizes, so that both may be in flight.
    """

    def __init__(self, env: ShardingEnv, apart: bool) -> None:
        self.env = env
        self.ids = env.duplicate()
        self.sizes = host_env(env).duplicate() if apart else host_env(self.ids)

    def close(self) -> None:
        """Closes the connections."""
        for twin in {id(own): own for own in (self.sizes, self.ids)}.values():
            close_twin(twin)


def close_twin(twin: ShardingEnv) -> None:
    """Closes connections that `ShardingEnv.duplicate` made."""
    if twin.pg is not None and dist.is_initialized():
        dist.destroy_process_group(twin.pg)
        object.__setattr__(twin, "pg", None)


class Sender:
    """Checks with the other ranks that each has the batch, and exchanges its ids.

    Args:
        everybody: all ranks that train together.
        envs: the ranks of each sharded collection, the same on every rank.
        fused: whether the collections of one set of ranks share their messages.
        uneven: what to do when ranks run out of data at different batches.
        apart: see `Link`.
    """

    def __init__(
        self, everybody: ShardingEnv, envs: Sequence[ShardingEnv], *, fused: bool, uneven: str, apart: bool
    ) -> None:
        self.rank, self.fused, self.uneven = everybody.rank, fused, uneven
        self.links = [Link(everybody, apart)]
        for env in envs:
            if all(link.env.pg is not env.pg for link in self.links):
                self.links.append(Link(env, apart))
        self.fed: list[Fed] = []
        self.dropped = 0

    def knows(self, envs: Iterable[ShardingEnv]) -> bool:
        """Whether all of these ranks have connections."""
        return all(any(link.env.pg is env.pg for link in self.links) for env in envs)

    def close(self) -> None:
        """Closes the connections."""
        for link in self.links:
            link.close()

    def announce(
        self, number: int, load: Callable[[], tuple[Any, Any]], fed: Sequence[Fed]
    ) -> Generator[None, None, Announced]:
        """Packs batch ``number``, and receives from every rank whether it has one, and the sizes of its messages.

        Yields where it waits.

        Args:
            load: returns the batch and the event after which it is on the device.

        Raises:
            EndOfData: the data of all ranks have ended, or those of one rank and the others stop with it.
            StageError: on every rank, if one of them failed.
        """
        state, why, ready = READY, ("", ""), Announced(None)
        cause: BaseException | None = None
        try:
            ready.batch, ready.event = load()
            for call in fed:
                features = call.way(ready.batch)
                ready.features.append(features)
                ready.packed.append(call.module.executor.input_dist.pack(features))
        except EndOfData:
            state = OVER
        except StageError as error:
            state, why, cause = FAILED, (error.stage, error.why), error.__cause__
        except Exception as error:
            state, why, cause = FAILED, ("input_dist", described(error)), error
        states = yield from self._exchange(self.links[0], state, ready, fed)
        if FAILED in states:
            self._fail(number, state == FAILED, why, cause)
        if OVER in states:
            self._end(number, states)
        for link in self.links[1:]:
            yield from self._exchange(link, state, ready, fed)
        return ready

    def send(self, ready: Announced, fed: Sequence[Fed]) -> Generator[None, None, Sent]:
        """Exchanges the ids of an announced batch. Yields where it waits."""
        sent = Sent(ready.batch, [], ready.features)
        lookup_input: list[Any] = [None] * len(fed)
        for link in self.links:
            own = [number for number, call in enumerate(fed) if self._link(call) is link]
            if own:
                pending = issue_ids(
                    [fed[n].module.executor.input_dist for n in own],
                    [ready.packed[n] for n in own],
                    [ready.sizes[n] for n in own],
                    ready.features[own[0]].device(),
                    link.ids,
                    self.fused,
                )
                yield
                for number, one in zip(own, pending.wait(), strict=True):
                    lookup_input[number] = one
        sent.lookup_input = lookup_input
        return sent

    def _link(self, call: Fed) -> Link:
        return next(link for link in self.links if link.env.pg is call.module.env.pg)

    def _exchange(
        self, link: Link, state: int, ready: Announced, fed: Sequence[Fed]
    ) -> Generator[None, None, list[int]]:
        """The state of each rank of the link. The sizes of its collections are stored in ``ready``."""
        numbers = [number for number, call in enumerate(fed) if self._link(call) is link]
        dists = [fed[number].module.executor.input_dist for number in numbers]
        parts = [
            (dist.format, ready.packed[number].sizes if state == READY else dist.format.write(state))
            for number, dist in zip(numbers, dists, strict=True)
        ]
        pending = issue_sizes(parts, link.sizes, "input_dist/sizes" if numbers else "pipeline/agree", state)
        if link.sizes.pg is not None:
            yield
        states, received = pending.wait()
        if set(states) == {READY}:
            for number, dist, own in zip(numbers, dists, received, strict=True):
                ready.sizes[number] = dist.format.read(own)
        return states

    def _fail(self, number: int, here: bool, why: tuple[str, str], cause: BaseException | None) -> None:
        by_rank = all_gather_object(why, self.links[0].sizes)
        rank = self.rank if here else next(rank for rank, own in enumerate(by_rank) if own[0])
        raise StageError(by_rank[rank][0], number, rank, by_rank[rank][1]) from cause

    def _end(self, number: int, states: Sequence[int]) -> None:
        over = [rank for rank, state in enumerate(states) if state == OVER]
        if len(over) < len(states) and self.uneven == "error":
            others = [rank for rank in range(len(states)) if rank not in over]
            raise StageError(
                "load",
                number,
                over[0],
                f"ranks {over} ran out of data after {number} batches, ranks {others} have more. Fix: the same number "
                f"of batches on every rank, or uneven='stop', which drops the rest",
            )
        self.dropped += self.rank not in over
        raise EndOfData


def described(error: BaseException) -> str:
    """An error in one line, with its type."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
