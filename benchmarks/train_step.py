"""Samples per second of a training step of the embeddings: every scheme, fused SGD and row-wise Adagrad.

A step is forward, backward from a fixed gradient, and the optimizer. It has no dense part. Tables of 100k x 64, pooling
10, Gloo, one thread a rank. TorchRec is installed in a temporary environment. Both sides stay alive and take turns, so
that other load on the machine slows both. The ratio is the median over rounds of TorchRec's seconds over ours. Both run
the same shards, ids and weights.

``--only w1``: `DistributedModelParallel` in one process without a process group, beside `FusedEmbeddingBagCollection`.
Both are in this process and take turns, on the GPU if there is one. The figure is the ratio of their times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median

import torch

from benchmarks import Figure, torch_threads
from benchmarks.apparatus.run_cases import Sides, run_cases
from benchmarks.apparatus.sides import SideFailed
from benchmarks.apparatus.step_case import BY_NODE, FLAT, ROWWISE, SGD, StepCase, named
from benchmarks.apparatus.step_ours import Ours, batch_of
from benchmarks.apparatus.step_worker import BATCHES, EPS, LEARNING_RATE, target_of
from recshard_lab.sharding import scheme_names

ROUNDS, QUICK_ROUNDS = 11, 5
ROUND_S = 0.25
W1_CASES = [
    StepCase("w1", optimizer, ids, tables=26, batch=4096, ranks=1, local_ranks=1, threads=2)
    for optimizer, ids in product((SGD, ROWWISE), ("uniform", "zipf"))
]
TARGETS = {case.name: 1.05 for case in W1_CASES}


def cases() -> list[StepCase]:
    """Every registered scheme, and one process."""
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
    """The promised multiple of TorchRec's samples per second."""
    if case.layout == "data_parallel":
        return 5.0 if case.ids == "uniform" else 10.0
    if case.layout == "fused":
        return 1.2 if case.threads == 1 else 2.0
    return 2.0 if case.layout == "mixed" else 1.5


def figures(*, with_torchrec: bool = False, quick: bool = False, only: Sequence[str] = ()) -> list[Figure]:
    """Samples/s of each case; with TorchRec the ratio, and both rates beside it.

    Args:
        with_torchrec: installs TorchRec in a temporary environment; both sides take turns.
        quick: five rounds instead of eleven.
        only: parts of case names, e.g. ``row_wise`` or ``"row_wise, SGD, zipf"``; all when left out.

    Raises:
        ValueError: an `only` that no case has in its name.
    """
    rounds = QUICK_ROUNDS if quick else ROUNDS
    chosen = named([*cases(), *W1_CASES], only)
    beside = [case for case in chosen if case not in W1_CASES]
    found = run_cases(beside, partial(one, rounds=rounds), with_torchrec=with_torchrec) if beside else []
    return found + [world_of_one(case, rounds) for case in chosen if case in W1_CASES]


def world_of_one(case: StepCase, rounds: int) -> Figure:
    """Seconds of a step of `DistributedModelParallel` over those of the fused collection: the median over rounds."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layouts = {"DMP": "table_wise", "fused": "fused"}
    taken: dict[str, list[float]] = {name: [] for name in layouts}
    with torch_threads(case.threads):
        sides = {
            name: Ours(replace(case, layout=layout), None, LEARNING_RATE, EPS, {}, device=device)
            for name, layout in layouts.items()
        }
        batches = [batch_of(case, device, number=number) for number in range(BATCHES)]
        gradient = target_of(case, 0).to(device)
        for number in range(2 + rounds):  # two warm up
            for name, side in sides.items():
                begun = _clock()
                side.forward(batches[number % BATCHES]).backward(gradient)
                taken[name].append(_clock() - begun)
    dmp, fused = (times[2:] for times in taken.values())
    beside = {f"{name} ms": 1e3 * median(times[2:]) for name, times in taken.items()}
    return Figure(case.name, median(a / b for a, b in zip(dmp, fused, strict=True)), "x", beside=beside)


def _clock() -> float:
    """Seconds, once the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def one(case: StepCase, sides: Sides, rounds: int) -> Figure:
    """Measures a case on all sides. A side that cannot run it is restarted, and its error is reported."""
    why: dict[str, str] = {}
    counts: dict[str, int] = {}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
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
            seconds[name].append(sides[name].steps(count))
    ours = case.samples / median(seconds["ours"])
    if "theirs" not in sides:
        return Figure(case.name, ours, "samples/s")
    if "theirs" in why:
        return Figure(f"{case.name}: TorchRec cannot: {why['theirs']}", math.nan, "x", beside={"ours": ours})
    ratio = median(theirs / mine for theirs, mine in zip(seconds["theirs"], seconds["ours"], strict=True))
    rates = {"ours": ours, "TorchRec": case.samples / median(seconds["theirs"])}
    return Figure(case.name, ratio, "x", target=target(case), at_most=False, beside=rates)
