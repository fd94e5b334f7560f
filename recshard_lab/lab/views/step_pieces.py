"""What is shown of a recorded step: for each stage, the ids and rows that each rank has, and where they come from.

::

    RecordedStep --shown_frames--> Frame of each stage --> a panel for each rank --> groups of lines of pieces

A piece is one id or one row. It has the ids of table rows and the samples that it belongs to, so that one of them can
be followed through all stages.

Shape letters: B samples of a rank, D columns, N ids, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import TypeAlias

import numpy as np

from recshard_lab.lab.draw.theme import bytes_text, count_text, counted, ms_text, number
from recshard_lab.lab.live.recorded_step import STAGES, RecordedStep, ShardFeatureRecord, ShardInfo, SourceRows

MOST_FEATURES, MOST_RANKS, MOST_IDS = 3, 8, 6
Rows: TypeAlias = tuple[tuple[str, np.ndarray], ...]
"""Name and values ``[D]`` of each state of a table row."""


@dataclass(frozen=True)
class Piece:
    """One id, or one row of numbers.

    Attributes:
        key: names it in its frame.
        label: what is written on it, or before its row.
        feature: position of the feature among those shown; -1 for none.
        note: small print.
        rows: ``(name, values [D])``; empty for an id.
        ids: rows of tables that it belongs to, such as ``movie:7``.
        samples: names of samples that it belongs to.
        origin: keys of the pieces of earlier frames that it comes from.
    """

    key: str
    label: str
    feature: int = -1
    note: str = ""
    rows: Rows = ()
    ids: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    origin: tuple[str, ...] = ()


@dataclass
class Line:
    """Pieces side by side, with a name before them; or a sentence."""

    name: str
    pieces: list[Piece] = field(default_factory=list)
    feature: int = -1


@dataclass
class Group:
    """Lines under a heading."""

    heading: str
    lines: list[Line] = field(default_factory=list)


@dataclass
class Frame:
    """One stage.

    Attributes:
        stage: key of `STAGES`.
        number: from 1.
        sentence: what happens.
        cost: bytes and milliseconds, in words.
        panels: rank -> its groups.
        scale: power of ten by which numbers are divided.
    """

    stage: str
    number: int
    sentence: str
    cost: str
    panels: list[list[Group]]
    scale: int = 0

    @property
    def title(self) -> str:
        return f"{self.number}. {STAGES[self.stage]}"

    @cached_property
    def pieces(self) -> list[Piece]:
        """All pieces, rank after rank."""
        return [p for panel in self.panels for group in panel for line in group.lines for p in line.pieces]

    @cached_property
    def largest(self) -> float:
        """Largest absolute value of its rows; 0 without any."""
        values = [np.abs(v[np.isfinite(v)]).max(initial=0.0) for piece in self.pieces for _, v in piece.rows]
        return float(max(values, default=0.0))


@dataclass
class Shown:
    """What is shown of a step.

    Args:
        step: the step.
        samples: how many of them are shown at most, over all ranks.
        features: names of those that are shown; the first three when left out.

    Raises:
        ValueError: a feature that the collection does not have, or no sample.
    """

    step: RecordedStep
    samples: int = 8
    features: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples!r}. Fix: samples=8")
        known = [block.feature for block in self.step.blocks]
        wanted = known[:MOST_FEATURES] if self.features is None else list(self.features)
        if unknown := [name for name in wanted if name not in known]:
            raise ValueError(
                f"feature {unknown[0]!r} is not one of the collection: its features are {known}. "
                f"Fix: features={known[:MOST_FEATURES]}"
            )
        self.blocks = [number for number, block in enumerate(self.step.blocks) if block.feature in wanted]
        self.num_ranks = min(self.step.world_size, MOST_RANKS)
        each, names = max(1, self.samples // max(1, self.num_ranks)), count()
        #: (rank, sample) -> its name
        self.names = {
            (rank, sample): _letters(next(names))
            for rank in range(self.num_ranks)
            for sample in range(min(each, self.step.ranks[rank].batch_size))
        }

    @property
    def left_out(self) -> str:
        """What is not shown, in a sentence; empty if all is."""
        step = self.step
        samples = sum(record.batch_size for record in step.ranks) - len(self.names)
        parts = [counted(samples, "sample")] if samples else []
        if len(self.blocks) < len(step.blocks):
            parts.append(counted(len(step.blocks) - len(self.blocks), "feature"))
        if self.num_ranks < step.world_size:
            parts.append(counted(step.world_size - self.num_ranks, "rank"))
        return f"Not shown: {', '.join(parts)}." if parts else ""

    def bag(self, rank: int, sample: int, block: int) -> np.ndarray:
        """``[N]`` ids of one sample and feature."""
        lengths, ids = self.step.ranks[rank].batch[self.step.blocks[block].feature]
        end = int(lengths[: sample + 1].sum())
        return ids[end - int(lengths[sample]) : end]

    def table(self, block: int) -> str:
        return self.step.blocks[block].table

    def feature(self, block: int) -> int:
        """Position among the shown features."""
        return self.blocks.index(block)

    def shards(self, rank: int) -> Iterator[ShardFeatureRecord]:
        """The shown shard features of a rank."""
        return (own for own in self.step.ranks[rank].shard_features if own.shard.block in self.blocks)

    def elements(
        self, source: int, shard: ShardInfo, ids: np.ndarray, bags: bool
    ) -> Iterator[tuple[int, int, list[int]]]:
        """``(position, id of the table, shown samples)`` of the ids that a rank sent to a shard, if they are shown."""
        shown = [sample for rank, sample in self.names if rank == source]
        if not bags:
            for place, own in enumerate(ids.tolist()):
                whole = own + shard.rows[0]
                members = [sample for sample in shown if whole in self.bag(source, sample, shard.block)]
                if members:
                    yield place, whole, members
            return
        place = 0
        for sample in shown:  # the first ones of the batch, whose ids come first
            inside = self.bag(source, sample, shard.block)
            for _ in range(int(((shard.rows[0] <= inside) & (inside < shard.rows[1])).sum())):
                yield place, int(ids[place]) + shard.rows[0], [sample]
                place += 1


def shown_frames(shown: Shown) -> list[Frame]:
    """A frame for each stage of the step."""
    made = [
        _batch(shown),
        _sent(shown),
        _arrived(shown),
        _lookup(shown),
        _partial(shown),
        _output(shown),
        _dense(shown),
        _gradient(shown),
        _gradients_arrived(shown),
        _optimizer(shown),
    ]
    for frame in made:
        if frame.largest and not 0.01 <= frame.largest < 1000:
            frame.scale = int(np.floor(np.log10(frame.largest)))
    return made


def followed(frames: Sequence[Frame]) -> list[tuple[str, str]]:
    """What can be followed: ``(name for a reader, key)`` of samples, then of table rows."""
    samples = dict.fromkeys(name for frame in frames for piece in frame.pieces for name in piece.samples)
    ids = dict.fromkeys(name for frame in frames for piece in frame.pieces for name in piece.ids)
    rows = sorted((name.rpartition(":") for name in ids), key=lambda parts: (parts[0], int(parts[2])))
    return [(f"sample {name}", f"sample {name}") for name in samples] + [
        (f"{table} id {row}", f"{table}:{row}") for table, _, row in rows
    ]


def _frame(shown: Shown, stage: str, sentence: str, panels: list[list[Group]]) -> Frame:
    return Frame(stage, list(STAGES).index(stage) + 1, sentence, _cost(shown.step, stage), panels)


def _cost(step: RecordedStep, stage: str) -> str:
    """Bytes and milliseconds of a stage."""
    traffic = step.traffic(stage)
    stays = int(np.trace(traffic))
    parts = []
    if traffic.any():
        parts.append(f"{bytes_text(int(traffic.sum()) - stays)} between ranks, {bytes_text(stays)} stay on their rank")
    if ms := step.ms(stage):
        parts.append(ms_text(ms))
    return ", ".join(parts)


def _by_sample(shown: Shown, line: Callable[[int, int, int], Line]) -> list[list[Group]]:
    """The groups of every rank: one for each of its samples, with the line of each (rank, sample, block)."""
    panels: list[list[Group]] = [[] for _ in range(shown.num_ranks)]
    for (rank, sample), name in shown.names.items():
        panels[rank].append(Group(f"sample {name}", [line(rank, sample, block) for block in shown.blocks]))
    return panels


def _batch(shown: Shown) -> Frame:
    def line(rank: int, sample: int, block: int) -> Line:
        ids = shown.bag(rank, sample, block).tolist()
        pieces = [
            Piece(
                _element(rank, sample, block, place),
                str(own),
                shown.feature(block),
                ids=(f"{shown.table(block)}:{own}",),
                samples=(shown.names[rank, sample],),
            )
            for place, own in enumerate(ids[:MOST_IDS])
        ]
        if len(ids) > MOST_IDS:
            pieces.append(Piece(f"more.{rank}.{sample}.{block}", f"+{len(ids) - MOST_IDS}"))
        return Line(shown.step.blocks[block].feature, pieces, shown.feature(block))

    sentence = "Each rank reads its own samples. A sample has a bag of ids for each feature."
    return _frame(shown, "batch", sentence, _by_sample(shown, line))


def _sent(shown: Shown) -> Frame:
    step = shown.step
    panels = []
    for source in range(shown.num_ranks):
        groups: dict[int, Group] = {}
        for shard, ids in step.ranks[source].sent:
            if shard.block not in shown.blocks or shard.rank >= shown.num_ranks:
                continue
            group = groups.setdefault(shard.rank, Group(f"to rank {shard.rank}" + " (itself)" * (shard.rank == source)))
            there = next(own for own in step.ranks[shard.rank].shard_features if own.shard == shard)
            bags = there.sources[source].lengths is not None  # and not distinct ids
            pieces = list(_tokens(shown, source, shard, ids, bags, "sent"))
            if pieces:
                group.lines.append(Line(_where(shown, shard), pieces, shown.feature(shard.block)))
        panels.append([group for group in groups.values() if group.lines])
    sentence = (
        "Each id goes to the rank whose shard stores its row. Small print: the row counted from the shard's first row."
        if step.world_size > 1
        else "There is one rank: all ids stay on it."
    )
    return _frame(shown, "ids_sent", sentence, panels)


def _arrived(shown: Shown) -> Frame:
    panels = []
    for rank in range(shown.num_ranks):
        groups = []
        for own in shown.shards(rank):
            group = Group(_where(shown, own.shard))
            for source, rows in enumerate(own.sources[: shown.num_ranks]):
                pieces = list(_tokens(shown, source, own.shard, rows.ids, rows.lengths is not None, "arrived"))
                if pieces:
                    group.lines.append(Line(f"from rank {source}", pieces, shown.feature(own.shard.block)))
            groups.append(group)
        panels.append([group for group in groups if group.lines])
    return _frame(
        shown, "ids_arrived", "Each rank now has all ids of the rows that it stores, from every rank's samples.", panels
    )


def _tokens(shown: Shown, source: int, shard: ShardInfo, ids: np.ndarray, bags: bool, stage: str) -> Iterator[Piece]:
    """The shown ids that a rank sends to a shard."""
    for place, whole, samples in shown.elements(source, shard, ids, bags):
        before = "sent" if stage == "arrived" and shown.step.ranks[source].sent else ""
        origin = (
            (_token(before, source, shard, place),)
            if before
            else tuple(
                _element(source, sample, shard.block, int(n))
                for sample in samples
                for n in np.flatnonzero(shown.bag(source, sample, shard.block) == whole)
            )
        )
        yield Piece(
            _token(stage, source, shard, place),
            str(whole),
            shown.feature(shard.block),
            f"row {whole - shard.rows[0]}",
            ids=(f"{shown.table(shard.block)}:{whole}",),
            samples=tuple(shown.names[source, sample] for sample in samples),
            origin=origin,
        )


def _lookup(shown: Shown) -> Frame:
    def row(own: ShardFeatureRecord, whole: int, tokens: list[str], samples: list[str]) -> tuple[Rows, list[str]]:
        return (("", own.before[np.searchsorted(own.touched, whole - own.shard.rows[0])]),), tokens

    sentence = "Each rank reads the rows of these ids from its shards."
    return _frame(shown, "lookup", sentence, _by_table(shown, True, row))


def _optimizer(shown: Shown) -> Frame:
    def row(own: ShardFeatureRecord, whole: int, tokens: list[str], samples: list[str]) -> tuple[Rows, list[str]]:
        place = np.searchsorted(own.touched, whole - own.shard.rows[0])
        origin = []
        for source, got in enumerate(own.sources[: shown.num_ranks]):
            if got.lengths is None:
                origin += [
                    _token("grad", source, own.shard, n)
                    for n, found, _ in shown.elements(source, own.shard, got.ids, bags=False)
                    if found == whole
                ]
            else:
                origin += [
                    _partial_key("grad", source, sample, own.shard)
                    for (r, sample), name in shown.names.items()
                    if r == source and name in samples
                ]
        return (("before", own.before[place]), ("after", own.after[place])), origin

    replicated = any(own.shard.replicated for record in shown.step.ranks for own in record.shard_features)
    sentence = "Each rank steps the rows that it stores, with the gradients of all samples that read them."
    sentence += " Replicas take the same step on every rank." if replicated else ""
    return _frame(shown, "optimizer", sentence, _by_table(shown, False, row))


def _by_table(
    shown: Shown,
    forward: bool,
    row: Callable[[ShardFeatureRecord, int, list[str], list[str]], tuple[Rows, list[str]]],
) -> list[list[Group]]:
    """The groups of every rank: one for each shard, with the values and origin of each (shard feature, id, keys of its
    ids that arrived, samples), in the order of ids."""
    panels = []
    for rank in range(shown.num_ranks):
        groups: dict[str, Group] = {}
        for own, rows in _table_rows(shown, rank, forward):
            heading = f"table {shown.table(own.shard.block)}: {_area(shown, own.shard)}"
            group = groups.setdefault(heading, Group(heading))
            for whole, tokens, samples in rows:
                _add_row(group, shown, own.shard, whole, *row(own, whole, tokens, samples), samples)
            group.lines.sort(key=lambda line: int(line.name))
        panels.append([group for group in groups.values() if group.lines])
    return panels


def _add_row(
    group: Group,
    shown: Shown,
    shard: ShardInfo,
    whole: int,
    values: Rows,
    origin: Sequence[str],
    samples: Sequence[str],
) -> None:
    """Adds a table row to a group; a row of two features is one line."""
    table = shown.table(shard.block)
    key = f"row.{shard.rank}.{table}.{whole}.{shard.cols[0]}"
    for line in group.lines:
        old = line.pieces[0]
        if old.key == key:
            both = tuple(dict.fromkeys([*old.samples, *samples]))
            line.pieces[0] = replace(old, samples=both, origin=(*old.origin, *origin))
            return
    ids = (f"{table}:{whole}",)
    feature = next(n for n, block in enumerate(shown.blocks) if shown.table(block) == table)
    piece = Piece(key, str(whole), feature, "", values, ids, tuple(samples), tuple(origin))
    group.lines.append(Line(str(whole), [piece], piece.feature))


def _table_rows(
    shown: Shown, rank: int, forward: bool
) -> Iterator[tuple[ShardFeatureRecord, list[tuple[int, list[str], list[str]]]]]:
    """The shown rows of each shard feature: ``(id, keys of its ids that arrived, samples)``.

    A replica reads rows for its own samples only, and is stepped for all.
    """
    for own in shown.shards(rank):
        rows: dict[int, tuple[list[str], list[str]]] = {}
        for source, got in enumerate(own.sources[: shown.num_ranks]):
            if forward and own.shard.replicated and source != rank:
                continue
            for place, whole, samples in shown.elements(source, own.shard, got.ids, got.lengths is not None):
                tokens, names = rows.setdefault(whole, ([], []))
                tokens.append(_token("arrived", source, own.shard, place))
                names += [shown.names[source, sample] for sample in samples]
        yield own, [(whole, *rows[whole]) for whole in sorted(rows)]


def _partial(shown: Shown) -> Frame:
    sentence = (
        "The kernel adds the rows of each bag: a row for each sample that has ids in the shard, with these ids. It is "
        "partial where other shards store the rest of the rows or columns."
    )
    return _frame(shown, "partial_rows", sentence, _by_shard(shown, "rows"))


def _gradients_arrived(shown: Shown) -> Frame:
    ranks = f", divided by {counted(shown.step.world_size, 'rank')}" if shown.step.world_size > 1 else ""
    sentence = f"Each gradient returns to the ranks that sent the rows{ranks}."
    if any(shown.step.blocks[block].mean for block in shown.blocks):
        sentence += " Of mean pooling it is divided by the ids of the bag."
    return _frame(shown, "gradients_arrived", sentence, _by_shard(shown, "grad"))


def _by_shard(shown: Shown, what: str) -> list[list[Group]]:
    """The groups of every rank: one for each shard feature, with its pooled rows or their gradients."""
    panels = [
        [Group(_where(shown, own.shard), list(_pooled(shown, rank, own, what))) for own in shown.shards(rank)]
        for rank in range(shown.num_ranks)
    ]
    return [[group for group in panel if group.lines] for panel in panels]


def _pooled(shown: Shown, rank: int, own: ShardFeatureRecord, what: str) -> Iterator[Line]:
    """Pooled rows of one shard feature, or their gradients: a line for each shown sample with ids in the shard."""
    shard, block = own.shard, own.shard.block
    table, feature = shown.table(block), shown.feature(block)
    for source, got in enumerate(own.sources[: shown.num_ranks]):
        values = got.rows if what == "rows" else got.grads
        if values is None:
            continue
        if got.lengths is None and not (what == "rows" and shard.replicated):
            yield from _distinct_rows(shown, source, own, got, values, what)
            continue
        for (other, sample), name in shown.names.items():
            inside = shown.bag(other, sample, block)
            inside = inside[(shard.rows[0] <= inside) & (inside < shard.rows[1])].tolist()
            if other != source or not inside:
                continue
            origin = [f"row.{rank}.{table}.{whole}.{shard.cols[0]}" for whole in dict.fromkeys(inside)]
            if what == "grad":
                origin = [f"grad.{source}.{sample}.{block}"]
            piece = Piece(
                _partial_key(what, source, sample, shard),
                name,
                feature,
                _sum_text(inside),
                (("", values[sample]),),
                tuple(f"{table}:{whole}" for whole in dict.fromkeys(inside)),
                (name,),
                tuple(origin),
            )
            yield Line(f"sample {name}", [piece], feature)


def _distinct_rows(
    shown: Shown, source: int, own: ShardFeatureRecord, got: SourceRows, values: np.ndarray, what: str
) -> Iterator[Line]:
    """Rows of the distinct ids of a rank, which are sent instead of pooled rows."""
    shard, table = own.shard, shown.table(own.shard.block)
    for place, whole, samples in shown.elements(source, shard, got.ids, bags=False):
        names = tuple(shown.names[source, sample] for sample in samples)
        origin = [f"row.{shard.rank}.{table}.{whole}.{shard.cols[0]}"]
        if what == "grad":
            origin = [f"grad.{source}.{sample}.{shard.block}" for sample in samples]
        piece = Piece(
            _token(what, source, shard, place),
            str(whole),
            shown.feature(shard.block),
            ", ".join(names),
            (("", values[place]),),
            (f"{table}:{whole}",),
            names,
            tuple(origin),
        )
        yield Line(f"rank {source}", [piece], piece.feature)


def _output(shown: Shown) -> Frame:
    joins = adds = False

    def line(rank: int, sample: int, block: int) -> Line:
        nonlocal joins, adds
        info, size = shown.step.blocks[block], len(shown.bag(rank, sample, block))
        parts, origin = _contributors(shown, rank, sample, block)
        joins, adds = joins or len(parts) > 1, adds or any(len(own) > 1 for own in parts.values())
        note = " | ".join(" + ".join(f"rank {k}" for k in own) for own in parts.values())
        note += f", mean of {size}" if info.mean and size > 1 else ""
        output = shown.step.ranks[rank].output
        return _output_line(shown, "out", rank, sample, block, note or "empty bag", output, origin)

    panels = _by_sample(shown, line)
    sentence = "Partial rows return to the ranks of their samples."
    sentence += " rank 0 + rank 1: partial sums are added." if adds else ""
    sentence += " rank 0 | rank 1: columns are joined." if joins else ""
    return _frame(shown, "output", sentence, panels)


def _gradient(shown: Shown) -> Frame:
    def line(rank: int, sample: int, block: int) -> Line:
        parts, _ = _contributors(shown, rank, sample, block)
        ranks = sorted({k for own in parts.values() for k in own})
        if any(own.shard.replicated and own.shard.block == block for own in shown.shards(rank)):
            ranks = [k for k in range(shown.num_ranks) if ranks]
        note = f"to rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "empty bag"
        origin = [f"out.{rank}.{sample}.{block}"]
        return _output_line(shown, "grad", rank, sample, block, note, shown.step.ranks[rank].grad, origin)

    sentence = (
        "Backward has reached the output of the tables: the gradient of each pooled row, of this rank's own loss."
    )
    return _frame(shown, "gradient", sentence, _by_sample(shown, line))


def _output_line(
    shown: Shown, what: str, rank: int, sample: int, block: int, note: str, output: np.ndarray, origin: Sequence[str]
) -> Line:
    """The row of a sample and feature in the output ``[B, D of all features]``, or in its gradient."""
    info = shown.step.blocks[block]
    ids = dict.fromkeys(f"{shown.table(block)}:{own}" for own in shown.bag(rank, sample, block).tolist())
    piece = Piece(
        f"{what}.{rank}.{sample}.{block}",
        info.feature,
        shown.feature(block),
        note,
        (("", output[sample, info.start : info.start + info.dim]),),
        tuple(ids),
        (shown.names[rank, sample],),
        tuple(origin),
    )
    return Line(piece.label, [piece], piece.feature)


def _contributors(
    shown: Shown, rank: int, sample: int, block: int
) -> tuple[dict[tuple[int, int], list[int]], list[str]]:
    """Columns -> ranks whose rows are added there; and the keys of these partial rows."""
    bag = shown.bag(rank, sample, block)
    parts: dict[tuple[int, int], list[int]] = {}
    origin = []
    for owner in range(shown.num_ranks):
        for own in shown.shards(owner):
            shard = own.shard
            inside = bag[(shard.rows[0] <= bag) & (bag < shard.rows[1])]
            if shard.block != block or not len(inside) or (shard.replicated and owner != rank):
                continue
            parts.setdefault(shard.cols, []).append(owner)
            got = own.sources[rank]
            if got.lengths is None and not shard.replicated:
                places = np.searchsorted(got.ids, np.unique(inside) - shard.rows[0]).tolist()
                origin += [_token("rows", rank, shard, place) for place in places]
            else:
                origin.append(_partial_key("rows", rank, sample, shard))
    return dict(sorted(parts.items())), origin


def _dense(shown: Shown) -> Frame:
    step = shown.step
    stepped = "stepped by their optimizer" if step.dense_stepped else "not stepped: no optimizer was passed"
    panels = []
    for rank in range(shown.num_ranks):
        own = step.ranks[rank]
        words = [
            f"input: {counted(own.output.shape[0], 'sample')} x {counted(own.output.shape[1], 'column')}",
            f"dense parameters: {count_text(step.dense_parameters)}",
            f"{stepped}" if step.dense_parameters else "",
        ]
        lines = [Line(word) for word in words if word]
        panels.append([Group("dense layers", lines), Group("loss of this rank", [Line(number(own.loss, 4))])])
    sentence = "The dense layers run on each rank's own samples. Their gradients are averaged over ranks."
    if not step.dense_parameters:
        sentence = "The loss is computed on each rank's own samples."
    return _frame(shown, "dense", sentence, panels)


def _where(shown: Shown, shard: ShardInfo) -> str:
    """The feature and the shard, in a line."""
    return f"{shown.step.blocks[shard.block].feature}: {_area(shown, shard)}"


def _area(shown: Shown, shard: ShardInfo) -> str:
    text = f"rows {count_text(shard.rows[0])} to {count_text(shard.rows[1] - 1)}"
    if shard.cols != (0, shown.step.blocks[shard.block].dim):
        text += f", columns {shard.cols[0]} to {shard.cols[1] - 1}"
    return text + (", replica" if shard.replicated else "")


def _sum_text(ids: Sequence[int]) -> str:
    more = f" + {len(ids) - 3} more" if len(ids) > 3 else ""
    return " + ".join(map(str, ids[:3])) + more


def _element(rank: int, sample: int, block: int, place: int) -> str:
    return f"id.{rank}.{sample}.{block}.{place}"


def _token(stage: str, source: int, shard: ShardInfo, place: int) -> str:
    return f"{stage}.{source}.{shard.block}.{shard.rank}.{shard.rows[0]}.{shard.cols[0]}.{place}"


def _partial_key(what: str, source: int, sample: int, shard: ShardInfo) -> str:
    return f"{what}.{source}.{shard.block}.{shard.rank}.{shard.rows[0]}.{shard.cols[0]}.sample{sample}"


def _letters(number: int) -> str:
    """A, B, ..., Z, AA, AB, ...

    >>> _letters(0), _letters(25), _letters(26)
    ('A', 'Z', 'AA')
    """
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)
