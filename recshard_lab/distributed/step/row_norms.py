"""Row-wise optimizers under column splits: the squares of a row are added over its shards before any shard steps.

Row-wise Adagrad keeps one number a row, the mean of its squared gradient over *all* D columns. LAMB and LARS read the
norm of the whole row. Where several ranks store columns of a table, each computes part of the sum. All of them get the
same ids, so they agree on the touched rows and their order. Only the partial sums are exchanged, 4 bytes for each
touched row and sum; no sizes are.

Shape letters: U touched rows of a slot, k sums a row (one or two).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from recshard_lab.comm import ShardingEnv, all_to_all
from recshard_lab.distributed.step.layout import Layout

_Part = tuple[int, slice, Tensor]  # number of a shard, its rows among the touched ones of a slot, their partial sums


class RowNormExchange:
    """Completes squared row norms over the shards of column-split tables.

    Args:
        layout: the layout.
        env: the ranks.
        slots: (table, shard) of this rank's slots, in the kernel's order.
        device: of the shards.
    """

    def __init__(
        self, layout: Layout, env: ShardingEnv, slots: Sequence[tuple[int, int]], device: torch.device
    ) -> None:
        self.env, self.device = env, device
        self.rows = [layout.shards[table][number].rows for table, number in slots]
        self.numbers = [number for _, number in slots]
        #: for each rank: (my slot, row range shared with one of its shards, whether it is all rows of both), sorted the
        #: same way on both ends
        self.sends: list[list[tuple[int, int, int, bool]]] = []
        self.receives: list[list[tuple[int, int, int, bool]]] = []
        self.senders: list[list[int]] = []  # the shard that sends each of them
        for rank in range(env.world_size):
            sends, receives = [], []
            for position, (table, number) in enumerate(slots):
                mine = layout.shards[table][number]
                for other, theirs in enumerate(layout.shards[table]):
                    start, end = max(mine.rows[0], theirs.rows[0]), min(mine.rows[1], theirs.rows[1])
                    if theirs.rank != rank or other == number or start >= end:
                        continue
                    same = mine.rows == theirs.rows
                    sends.append((table, number, other, position, start, end, same))
                    receives.append((table, other, number, position, start, end, same))
            self.sends.append([entry[3:] for entry in sorted(sends)])
            self.receives.append([entry[3:] for entry in sorted(receives)])
            self.senders.append([entry[1] for entry in sorted(receives)])
        shared = {entry for entries in self.sends + self.receives for entry in entries if not entry[3]}
        cuts = sorted({(slot, row) for slot, start, end, _ in shared for row in (start, end)})
        #: for each slot the rows, counted from its first, at which a range shared with other rows begins or ends
        self.cuts = [[row - first for own, row in cuts if own == slot] for slot, (first, _) in enumerate(self.rows)]
        self.edges = [torch.tensor(own, dtype=torch.int64, device=device) for own in self.cuts]

    def __call__(self, rows: list[Tensor], squares: list[Tensor]) -> list[Tensor]:
        """Per slot the touched rows ``[U]`` and partial sums ``[U]`` or ``[U, k]`` -> the sums over all columns."""
        width = max((own.shape[1] for own in squares if own.dim() == 2), default=1)
        outgoing, send_sizes = [], []
        places = self._places(rows)
        for entries in self.sends:
            spans = [self._span(rows, places, *entry) for entry in entries]
            outgoing += [squares[entry[0]][span].reshape(-1) for entry, span in zip(entries, spans, strict=True)]
            send_sizes.append(width * sum(span.stop - span.start for span in spans))
        spans_in = [[self._span(rows, places, *entry) for entry in entries] for entries in self.receives]
        receive_sizes = [width * sum(span.stop - span.start for span in spans) for spans in spans_in]
        message = torch.cat(outgoing) if outgoing else torch.empty(0, device=self.device)
        received = all_to_all(message, send_sizes, receive_sizes, self.env, "row_norms")
        parts: list[list[_Part]] = [
            [(number, slice(0, len(own)), own)] for number, own in zip(self.numbers, squares, strict=True)
        ]
        position = 0
        for entries, senders, spans in zip(self.receives, self.senders, spans_in, strict=True):
            for (slot, *_), sender, span in zip(entries, senders, spans, strict=True):
                shape = squares[slot][span].shape
                parts[slot].append((sender, span, received[position : position + shape.numel()].view(shape)))
                position += shape.numel()
        return self._add(squares, parts)

    def _add(self, squares: list[Tensor], parts: list[list[_Part]]) -> list[Tensor]:
        """Adds in one order on all ranks, so that the states of a row stay equal to the last bit on all of them.

        All slots are added at once, those with the most shards first: one copy, then one addition for each further
        shard of the most split table. A shard that has some of a slot's rows adds zero to the others.
        """
        for own in parts:
            own.sort(key=lambda part: part[0])
        slots = sorted((slot for slot, own in enumerate(parts) if len(own) > 1), key=lambda slot: -len(parts[slot]))
        if not slots:
            return squares
        whole = all(len(part) == len(squares[slot]) for slot in slots for *_, part in parts[slot])
        most = 0 if whole else max(squares[slot].numel() for slot in slots)
        zeros = squares[0].new_zeros(most) if most else squares[0].new_empty(0)
        addends, sizes = [], []
        for at in range(len(parts[slots[0]])):
            some = [slot for slot in slots if at < len(parts[slot])]  # of all slots the first
            sizes.append(sum(squares[slot].numel() for slot in some))
            for slot in some:
                _, span, part = parts[slot][at]
                before, end = span.start * part[:1].numel(), span.stop * part[:1].numel()
                addends += [zeros[:before], part.reshape(-1), zeros[: squares[slot].numel() - end]]
        total, *others = torch.cat(addends).split(sizes)
        for other in others:
            total[: len(other)].add_(other)
        sums = dict(zip(slots, total.split([squares[slot].numel() for slot in slots]), strict=True))
        return [sums[slot].view_as(own) if slot in sums else own for slot, own in enumerate(squares)]

    def nothing(self, like: Tensor, rounds: int) -> None:
        """Takes part without a touched row, because the other ranks wait for this one."""
        squares = [like.new_empty(0) for _ in self.rows]
        for _ in range(rounds):
            self([own.long() for own in squares], squares)

    def _places(self, rows: list[Tensor]) -> dict[tuple[int, int], int]:
        """(slot, row) -> the first touched row that is not below it, for all `cuts`, with one copy to the host."""
        keys = [(slot, self.rows[slot][0] + cut) for slot, own in enumerate(self.cuts) for cut in own]
        if not keys:
            return {}
        found = [torch.searchsorted(own, edges) for own, edges in zip(rows, self.edges, strict=True)]
        return dict(zip(keys, torch.cat(found).tolist(), strict=True))

    def _span(
        self, rows: list[Tensor], places: dict[tuple[int, int], int], slot: int, start: int, end: int, same: bool
    ) -> slice:
        if same:  # both have the same touched rows, and the same padding after them
            return slice(0, rows[slot].numel())
        return slice(places[slot, start], places[slot, end])
