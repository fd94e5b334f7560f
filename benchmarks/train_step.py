"""Samples per second of a training step of the embeddings: every scheme, fused SGD and row-wise Adagrad.

Forward, backward from a fixed gradient, optimizer; no dense part, which would be the same on both sides. Tables of
100k x 64, pooling 10, Gloo, one thread a rank. With TorchRec, which is installed in an environment thrown away, both
sides stay alive and take turns, so that a busy minute hits both: a round of ours, a round of theirs, ...; the ratio is
the median over rounds of theirs / ours in seconds. Both run the same rectangles, ids and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from statistics import median

from benchmarks import Figure
from benchmarks.apparatus.run_cases import Sides, run_cases
from benchmarks.apparatus.sides import SideFailed
from benchmarks.apparatus.step_case import BY_NODE, FLAT, ROWWISE, SGD, StepCase, named
from recshard_lab.sharding import scheme_names

ROUNDS, QUICK_ROUNDS = 11, 5
ROUND_S = 0.25


def cases() -> list[StepCase]:
    """All that is measured; schemes as far as they are registered."""
    known = {*scheme_names(), "mixed"}
    found = [
        StepCase(layout, optimizer, ids)
        for layout, optimizer, ids in product(FLAT, (SGD, ROWWISE), ("uniform", "zipf"))
        if layout in known
    ]
    found += [
        StepCase(layout, optimizer, ids, ranks=4, local_ranks=2)
        for layout, optimizer, ids in product(BY_NODE, (SGD, ROWWISE), ("uniform", "zipf"))
        if layout in known
    ]
    found += [
        StepCase("fused", optimizer, ids, tables=26, batch=4096, ranks=1, local_ranks=1, threads=threads)
        for threads, optimizer, ids in product((1, 2), (SGD, ROWWISE), ("uniform", "zipf"))
    ]
    return found


def target(case: StepCase) -> float:
    """Times TorchRec's samples per second that this library promises."""
    if case.layout == "data_parallel":
        return 5.0 if case.ids == "uniform" else 10.0
    if case.layout == "fused":
        return 1.2 if case.threads == 1 else 2.0
    return 2.0 if case.layout == "mixed" else 1.5


def figures(*, with_torchrec: bool = False, quick: bool = False, only: Sequence[str] = ()) -> list[Figure]:
    """A figure a case: ours alone in samples/s, or beside TorchRec the ratio, with both rates told.

    Args:
        with_torchrec: installs TorchRec in a throw-away environment and measures it in turn with ours.
        quick: five rounds instead of eleven.
        only: parts of case names, e.g. ``row_wise`` or ``"row_wise, SGD, zipf"``; all when left out.

    Raises:
        ValueError: an `only` that no case has in its name.
    """
    one_of = partial(one, rounds=QUICK_ROUNDS if quick else ROUNDS)
    return run_cases(named(cases(), only), one_of, with_torchrec=with_torchrec)


def one(case: StepCase, sides: Sides, rounds: int) -> Figure:
    """A case on the sides that can run it; one that cannot is started anew for the next and its words are kept."""
    why: dict[str, str] = {}
    counts: dict[str, int] = {}
    told: dict[str, list[float]] = {side: [] for side in sides}
    for name, side in tuple(sides.items()):
        try:
            side.build(case)
            side.steps(3)
            counts[name] = min(max(round(ROUND_S / side.steps(2)), 2), 20)
        except SideFailed as error:
            if name == "ours":
                raise
            why[name] = str(error)
            sides.start(name)
    for _ in range(rounds):
        for name, count in counts.items():
            told[name].append(sides[name].steps(count))
    ours = case.samples / median(told["ours"])
    if "theirs" not in sides:
        return Figure(case.name, ours, "samples/s")
    if "theirs" in why:
        return Figure(f"{case.name}: TorchRec cannot: {why['theirs']}", math.nan, "x", beside={"ours": ours})
    ratio = median(theirs / mine for theirs, mine in zip(told["theirs"], told["ours"], strict=True))
    rates = {"ours": ours, "TorchRec": case.samples / median(told["theirs"])}
    return Figure(case.name, ratio, "x", target=target(case), at_most=False, beside=rates)
