"""Milliseconds of a whole training step: pipelines beside the plain loop and TorchRec's, over local batch sizes.

DLRM-like: 8 tables of 100k x 64, pooling 10, Zipf ids, table-wise, row-wise Adagrad; two small MLPs under DDP; 2 ranks
over Gloo, one thread a rank. Three groups:

- ``pipelines``: `TrainPipelineSparseDist`, the other pipelines, the plain loop, and with TorchRec its pipelines take
  turns. Beside them the times of copying and input_dist alone, of the rest of a plain step (compute), and the largest
  of the three: the shortest step possible if everything overlaps. Ranks with one core cannot gain from overlap,
  because hidden work needs that core too. The target is to lose nothing.
- ``slow link``: the same over an emulated link, on which each exchange of embeddings takes at least so many ms. Waiting
  needs no core. The target is the largest of the three.
- ``switch``: one setting on and off, in turn: one lookup for all tables, one message for all collections, threads,
  torch.compile of the dense part.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from benchmarks import Figure, note
from benchmarks.apparatus.environments import TorchRecEnv
from benchmarks.apparatus.sides import Side
from benchmarks.apparatus.train_case import TrainCase

SPARSE, PREFETCH, SEMI = "TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist", "TrainPipelineSemiSync"
KINDS = {"plain": "plain", "base": "TrainPipelineBase", "sparse_dist": SPARSE, "prefetch": PREFETCH, "semi_sync": SEMI}
BATCHES, QUICK_BATCHES = (32, 128, 512, 2048), (32, 512)
LINKS_MS = (2.0, 8.0)
ROUNDS, QUICK_ROUNDS = 9, 5
ROUND_S = 0.15
GPU_NOTE = (
    "graph_dense (CUDA graphs of the dense part) and pin_memory=True (page-locked host memory) need an NVIDIA GPU: not "
    "measured on this machine."
)
Sides = dict[str, Side]


@dataclass(frozen=True)
class _Job:
    """What one figure needs: its name, the cases by side, and what makes the figure of the live sides."""

    name: str
    cases: Mapping[str, TrainCase]
    measure: Callable[[str, Sides, int], Figure]


def figures(*, with_torchrec: bool = False, quick: bool = False, only: Sequence[str] = ()) -> list[Figure]:
    """A figure a local batch size, a slow link, a switch and batch size.

    Args:
        with_torchrec: puts TorchRec's plain loop and `TrainPipelineSparseDist` beside ours, in turn.
        quick: fewer batch sizes and rounds.
        only: parts of figures' names, e.g. ``"slow link"`` or ``"switch threads"``; all when left out.

    Raises:
        ValueError: an `only` that no figure has in its name.
        PeersMissing: TorchRec cannot be installed beside the torch that is here.
    """
    jobs = list(_jobs(QUICK_BATCHES if quick else BATCHES, with_torchrec))
    for part in only:
        if not any(part in job.name for job in jobs):
            raise ValueError(f"no figure has {part!r} in its name; there are: {'; '.join(job.name for job in jobs)}")
    chosen = [job for job in jobs if not only or any(part in job.name for part in only)]
    with ExitStack() as stack:
        theirs = stack.enter_context(TorchRecEnv()).python if with_torchrec else ""
        sides: Sides = {}
        found = []
        for job in chosen:
            note(f"{job.name} ...")
            for name, case in job.cases.items():
                if name not in sides or case.link_ms:  # a link stays in the environment of its ranks
                    if name in sides:
                        sides[name].close()
                    python = theirs if name == "theirs" else sys.executable
                    side = "theirs" if name == "theirs" else "ours"
                    sides[name] = stack.enter_context(Side(side, python, program="train_worker"))
                sides[name].order({"do": "build", "case": case.to_dict()})
            live = {name: sides[name] for name in job.cases}
            found.append(job.measure(job.name, live, QUICK_ROUNDS if quick else ROUNDS))
    return found


def _jobs(batches: Sequence[int], with_torchrec: bool) -> Iterator[_Job]:
    for batch in batches:
        case = _sized(TrainCase(), batch)
        cases = {"inline": replace(case, threads=False), "threads": replace(case, threads=True)}
        yield _Job(f"pipelines, local batch {batch}", cases | ({"theirs": case} if with_torchrec else {}), _pipelines)
    off: dict[str, tuple[str, TrainCase, TrainCase]] = {
        "batch_tables": ("plain", TrainCase(), TrainCase(batch_tables=False)),
        "fuse_exchanges": (SPARSE, TrainCase(collections=8), TrainCase(collections=8, fuse_exchanges=False)),
        "one collection": (SPARSE, TrainCase(), TrainCase(collections=8)),
        "threads": (SPARSE, TrainCase(threads=True), TrainCase(threads=False)),
        "compile_dense": ("plain", TrainCase(compiled=True), TrainCase()),
    }
    for name, (kind, on, without) in off.items():
        for batch in batches[:: len(batches) - 1]:
            cases = {"on": _sized(on, batch), "off": _sized(without, batch)}
            yield _Job(f"switch {name}, local batch {batch}", cases, partial(_switch, kind))
    for ms in LINKS_MS:
        case = replace(_sized(TrainCase(), 512), link_ms=ms)
        cases = {"inline": replace(case, threads=False), "threads": case}
        yield _Job(f"slow link {ms:g} ms, local batch 512", cases, _pipelines)


def _sized(case: TrainCase, batch: int) -> TrainCase:
    return replace(case, step=replace(case.step, batch=batch))


def _pipelines(name: str, sides: Sides, rounds: int) -> Figure:
    """Every pipeline with and without threads, round by round; the figure is what a pipeline chooses by itself here."""
    wanted = [("threads", kind) for kind in KINDS] + [("inline", kind) for kind in ("sparse_dist", "prefetch")]
    wanted += [("theirs", kind) for kind in ("plain", "sparse_dist") if "theirs" in sides]
    taken = _in_turn(sides, wanted, rounds)
    parts = [each["threads"] for each in _stages(sides, rounds)]
    copy, dist = median(part["copy"] for part in parts), median(part["dist"] for part in parts)
    plain = taken["threads", "plain"]
    bound = max(copy, dist, plain - copy - dist)
    hidden = median(answer["hidden"] for answer in sides["threads"].order({"do": "hidden", "kind": SPARSE}))
    beside = {"plain": plain, "copy": copy, "dist": dist, "compute": plain - copy - dist, "max": bound}
    beside |= {"no threads": taken["inline", "sparse_dist"], "threads": taken["threads", "sparse_dist"]}
    beside |= {"prefetch": min(taken["threads", "prefetch"], taken["inline", "prefetch"])}
    beside |= {"semi_sync": taken["threads", "semi_sync"], "base": taken["threads", "base"], "hidden": hidden}
    if "theirs" in sides:
        beside |= {"TorchRec plain": taken["theirs", "plain"], "TorchRec pipeline": taken["theirs", "sparse_dist"]}
    slow = name.startswith("slow link")  # there every rank counts as a node, which has all cores
    chosen = "threads" if (os.cpu_count() or 1) >= 2 * (1 if slow else sides["threads"].ranks) else "inline"
    target = 1.15 * bound if slow else 1.1 * plain
    return Figure(name, taken[chosen, "sparse_dist"], "ms", target=target, beside=beside)


def _stages(sides: Sides, rounds: int) -> Iterator[dict[str, dict[str, float]]]:
    """Of the slowest rank, round by round."""
    for _ in range(rounds):
        answers = sides["threads"].order({"do": "stages", "count": 5})
        yield {"threads": {part: max(answer[part] for answer in answers) for part in ("copy", "dist")}}


def _switch(kind: str, name: str, sides: Sides, rounds: int) -> Figure:
    """How many times as long a step takes without it."""
    taken = _in_turn(sides, [("on", kind), ("off", kind)], rounds)
    on, off = taken["on", kind], taken["off", kind]
    return Figure(f"{name} (off / on)", off / on, "x", beside={"on": on, "off": off}, note=GPU_NOTE)


def _in_turn(sides: Sides, wanted: Sequence[tuple[str, str]], rounds: int) -> dict[tuple[str, str], float]:
    """(side, kind) -> median milliseconds of a step, the sides taking turns."""
    counts: dict[tuple[str, str], int] = {}
    for side, kind in wanted:
        order = {"do": "steps", "kind": KINDS.get(kind, kind)}
        sides[side].order({**order, "count": 4})  # warms up, compiles
        seconds = max(answer["seconds"] for answer in sides[side].order({**order, "count": 3})) / 3
        counts[side, kind] = min(max(round(ROUND_S / seconds), 3), 40)
    samples: dict[tuple[str, str], list[float]] = {place: [] for place in wanted}
    for _ in range(rounds):
        for (side, kind), count in counts.items():
            answers = sides[side].order({"do": "steps", "kind": KINDS.get(kind, kind), "count": count})
            samples[side, kind].append(1e3 * max(answer["seconds"] for answer in answers) / count)
    return {place: median(times) for place, times in samples.items()}
