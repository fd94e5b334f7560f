"""Sends the ids of coming batches, over connections that nobody else uses.

Why no rank waits for ever. Batch k's exchanges run in one thread, in the order of k, on process groups of their own; a
step's other exchanges run in the main thread, in the order of the program. So each group sees one order on all ranks.
The thread's exchange k needs nothing of a step but that every rank's ``progress`` has come to batch k - ahead, whose
step in turn needs exchanges up to k - ahead alone: by induction over k both end.

Before its ids, every rank tells whether it has a batch k at all: the data may have come to an end, or loading or
packing it may have failed. Then nobody sends, and all say the same::

    to rank k:   state | S, n of collection 0 | S, n of collection 1 ...
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from recshard_lab.comm import ShardingEnv, all_gather_object, issue_all_to_all, message_device
from recshard_lab.distributed.step.input_dist import LookupInput
from recshard_lab.distributed.step.packed import Packed, exchange_ids
from recshard_lab.train.pipelines.calls import Fed
from recshard_lab.train.pipelines.lanes import StageError

READY, OVER, FAILED = 0, 1, 2
UNEVEN = ("error", "stop")


class EndOfData(Exception):
    """There is no batch of this number."""


@dataclass
class Sent:
    """A batch whose ids have come.

    Attributes:
        lookup_input: for each call that is fed ahead, what is to be looked up.
        features: for each, what was sent.
        event: on a GPU, when that is done.
    """

    batch: Any
    lookup_input: list[LookupInput] = field(default_factory=list)
    features: list[Any] = field(default_factory=list)
    event: Any = None

    def pairs(self, fed: Sequence[Fed]) -> Iterator[tuple[Fed, LookupInput]]:
        """Each call beside its ids; nothing for a batch that was not sent ahead."""
        return zip(fed, self.lookup_input, strict=True) if self.lookup_input else iter(())


@dataclass
class Announced:
    """A batch that every rank has, made up for the wire; the sizes of what comes are known."""

    batch: Any
    packed: list[Packed] = field(default_factory=list)
    theirs: list[list[list[int]]] = field(default_factory=list)
    features: list[Any] = field(default_factory=list)
    event: Any = None


class Link:
    """One set of ranks, and connections between them for sizes and for ids.

    Args:
        env: the ranks, over whose connections steps go.
        apart: whether ids go over other connections than sizes, so that both may be under way.
    """

    def __init__(self, env: ShardingEnv, apart: bool) -> None:
        self.env, self.sizes = env, env.twin()
        self.ids = env.twin() if apart else self.sizes

    def close(self) -> None:
        """Closes the connections."""
        for twin in {id(own): own for own in (self.sizes, self.ids)}.values():
            close_twin(twin)


def close_twin(twin: ShardingEnv) -> None:
    """Closes connections that `ShardingEnv.twin` has made."""
    if twin.pg is not None and dist.is_initialized():
        dist.destroy_process_group(twin.pg)
        object.__setattr__(twin, "pg", None)


class Sender:
    """Agrees with the other ranks about each batch and exchanges its ids.

    Args:
        everybody: all ranks that train together.
        envs: those of the sharded collections, the same on every rank.
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
        """Whether there are connections for all of these ranks."""
        return all(any(link.env.pg is env.pg for link in self.links) for env in envs)

    def close(self) -> None:
        """Closes the connections."""
        for link in self.links:
            link.close()

    def announce(
        self, number: int, load: Callable[[], tuple[Any, Any]], fed: Sequence[Fed]
    ) -> Generator[None, None, Announced]:
        """Packs batch ``number`` and learns from every rank whether it has one, and the sizes of what it sends.

        Yields where it waits.

        Args:
            load: gives the batch and the event after which it is there.

        Raises:
            EndOfData: all ranks have come to the end, or one has and the others stop with it.
            StageError: on every rank, where one of them failed.
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
        header = yield from self._exchange(self.links[0], state, ready, fed)
        states = [own[0] for own in header]
        if any(own == FAILED for own in states):
            self._fail(number, state == FAILED, why, cause)
        if any(own == OVER for own in states):
            self._end(number, states)
        told = {id(self.links[0]): header}
        for link in self.links[1:]:
            told[id(link)] = yield from self._exchange(link, state, ready, fed)
        places = dict.fromkeys(told, 0)
        for call in fed:
            link = self._link(call)
            first = 1 + 2 * places[id(link)]
            places[id(link)] += 1
            ready.theirs.append([own[first : first + 2] for own in told[id(link)]])
        return ready

    def send(self, ready: Announced, fed: Sequence[Fed]) -> Generator[None, None, Sent]:
        """Exchanges the ids of a batch that was announced. Yields where it waits."""
        sent = Sent(ready.batch, [], ready.features)
        lookup_input: list[Any] = [None] * len(fed)
        for link in self.links:
            own = [number for number, call in enumerate(fed) if self._link(call) is link]
            if own:
                found = yield from exchange_ids(
                    [fed[n].module.executor.input_dist for n in own],
                    [ready.packed[n] for n in own],
                    [ready.theirs[n] for n in own],
                    ready.features[own[0]].device(),
                    link.ids,
                    self.fused,
                )
                for number, one in zip(own, found, strict=True):
                    lookup_input[number] = one
        sent.lookup_input = lookup_input
        return sent

    def _link(self, call: Fed) -> Link:
        return next(link for link in self.links if link.env.pg is call.module.env.pg)

    def _exchange(
        self, link: Link, state: int, ready: Announced, fed: Sequence[Fed]
    ) -> Generator[None, None, list[list[int]]]:
        """For each rank of the link: its state, then S and n of every collection there."""
        own = [number for number, call in enumerate(fed) if self._link(call) is link]
        world, width = link.env.world_size, 1 + 2 * len(own)
        nothing = [[0, 0]] * world
        sizes = [ready.packed[number].sizes if state == READY else nothing for number in own]
        mine = [[state, *(n for one in sizes for n in one[rank])] for rank in range(world)]
        if link.sizes.pg is None:
            return mine
        message = torch.tensor(mine, device=message_device(link.sizes)).view(-1)
        label = "input_dist/sizes" if own else "pipeline/agree"
        asked = issue_all_to_all(message, [width] * world, [width] * world, link.sizes, label)
        yield
        found: list[list[int]] = asked.wait().view(world, width).tolist()
        return found

    def _fail(self, number: int, here: bool, why: tuple[str, str], cause: BaseException | None) -> None:
        told = all_gather_object(why, self.links[0].sizes)
        rank = self.rank if here else next(rank for rank, own in enumerate(told) if own[0])
        raise StageError(told[rank][0], number, rank, told[rank][1]) from cause

    def _end(self, number: int, states: Sequence[int]) -> None:
        over = [rank for rank, state in enumerate(states) if state == OVER]
        if len(over) < len(states) and self.uneven == "error":
            others = [rank for rank in range(len(states)) if rank not in over]
            raise StageError(
                "load",
                number,
                over[0],
                f"ranks {over} ran out of data after {number} batches, ranks {others} have more: give every rank as "
                f"many batches, or uneven='stop' to leave the others' out",
            )
        self.dropped += self.rank not in over
        raise EndOfData


def described(error: BaseException) -> str:
    """An error in a line, with its type."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
