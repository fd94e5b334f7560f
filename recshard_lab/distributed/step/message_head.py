"""The head of a message of ids: how many bags each lane has, and their lengths.

What a rank says of it beforehand is one number: S, where every lane has S bags; `VARIABLE` or ``with_header_of(S)``,
both negative, where the message begins with the bags of each lane: so many, or -n - 1 for n bags of one id each, whose
lengths are not sent.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from recshard_lab.distributed.step.bucketize import edges_of

VARIABLE = -1
"""What a variable batch (every feature has bags of its own number) sends in place of S."""


@dataclass(slots=True)
class Head:
    """The head of a message: lengths of every lane, those of lanes that travel as rows made up."""

    head: int
    bags: list[int]
    lengths: list[Tensor]

    def counts(self) -> list[int]:
        """Ids of each lane."""
        ends = edges_of(torch.cat(self.lengths), self.bags) if self.lengths else [0]
        return [end - start for start, end in pairwise(ends)]


def read_head(chunk: Tensor, segments: int, lanes: int) -> Head:
    """The head of what one rank has sent, which said ``segments``."""
    if segments >= 0:
        return Head(lanes * segments, [segments] * lanes, list(chunk[: lanes * segments].split([segments] * lanes)))
    header = chunk[:lanes].tolist()
    bags = [n if n >= 0 else -n - 1 for n in header]
    sent = [n if n >= 0 else 0 for n in header]
    head = lanes + sum(sent)
    parts = chunk[lanes:head].split(sent)
    lengths = [part if n >= 0 else chunk.new_ones(-n - 1) for part, n in zip(parts, header, strict=True)]
    return Head(head, bags, lengths)


def with_header_of(segments: int) -> int:
    """Says that S is this and that the lanes' bags come first all the same; its own inverse with `without_header`."""
    return -segments - 2


def without_header(segments: int) -> int:
    """S of a message that begins with its lanes' bags or does not."""
    return segments if segments >= 0 else -segments - 2
