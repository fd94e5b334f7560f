"""Host synchronisations, operators, collectives and memory of a sharded step on a device, for each layout and world.

Counted on the ledger device (``benchmarks.ledger``): one process is rank 0 of W, and all ranks have its batch.
A lookup kernel counts as one operator forward and one backward, as fbgemm's on CUDA. The counted step is the second.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import Figure, ledger
from benchmarks.apparatus.run_cases import Sides, run_cases
from benchmarks.apparatus.sides import SideFailed
from benchmarks.apparatus.step_case import BY_NODE, FLAT, ROWWISE, SGD, SHORT, StepCase, from_dict, named
from benchmarks.apparatus.step_ours import batch_of, sharded
from benchmarks.ledger.mirror import mirrored_world
from recshard_lab.comm.trace import trace

WORLDS, NODES = (2, 8, 128), 2
SIZES = {"tables": 26, "rows": 128, "dim": 64, "batch": 128, "pooling": 5}
OWN_KERNELS = ("ledger_fbgemm", "native")  # what they do on a device besides looking up is counted too
COUNT_S = 1800.0
MOST = "most of all layouts"
# replicas are looked up, and indices of distinct rows computed, after the last collective is issued
WITH_REPLICAS = ("data_parallel", "mixed", "every_scheme", "distinct_rows")
TORCHREC_OPERATORS = "operators over TorchRec's"
TARGETS = {
    f"waits forward, {MOST}": 1,
    f"waits backward, {MOST}": 0,
    f"kernels to join outputs, {MOST} without replicas": 2,
    f"collectives a step, {MOST}": 4,
    f"collectives a step with row norms, {MOST}": 5,
    f"peak extra bytes over bytes sent, {MOST}": 2,
    f"W=2 table_wise, SGD: {TORCHREC_OPERATORS}": 1.0,
}


def cases() -> list[StepCase]:
    """Every layout in every world, then what else costs waits: row norms, FP16 messages, this library's own kernels."""
    sizes: dict[str, Any] = SIZES
    found = []
    for ranks in WORLDS:
        for layout in (*FLAT, *BY_NODE, "every_scheme"):
            by_node = layout in (*BY_NODE, "every_scheme")
            local = max(1, ranks // NODES) if by_node else ranks
            found.append(StepCase(layout, SGD, "uniform", ranks=ranks, local_ranks=local, **sizes))
        found.append(StepCase("column_wise", ROWWISE, "uniform", ranks=ranks, local_ranks=ranks, **sizes))
        found.append(StepCase("row_wise", SGD, "uniform", ranks=ranks, local_ranks=ranks, wire="fp16", **sizes))
        found.append(
            StepCase("row_wise", SGD, "uniform", ranks=ranks, local_ranks=ranks, route="distinct_rows", **sizes)
        )
    return [*found, *(StepCase("row_wise", SGD, "uniform", kernel=kernel, **sizes) for kernel in OWN_KERNELS)]


def label(case: StepCase) -> str:
    """A case as `figures` names it.

    >>> label(StepCase("grid_shard", SGD, "uniform", ranks=8, local_ranks=4))
    'W=8 grid_shard, 2 nodes x 4, SGD'
    """
    return f"W={case.ranks} {case.name.replace(', uniform', '')}"


@dataclass(frozen=True)
class StepCounts:
    """What one step costs the host of one rank.

    Attributes:
        forward, backward: host synchronisations by cause and line.
        reads: those in forward that wait for a number; the others are blocking copies to the device.
        launches: kernels, the lookup as one forward and one backward; collectives not included.
        operators: all dispatched operators, views included.
        join: kernels in forward after its last collective.
        collectives: of the step.
        extra_bytes: peak bytes above those at the start of the step.
        sent_bytes: bytes sent in collectives, this rank's own share included.
        by_phase: operators that launch kernels, by name, in each phase of `recshard_lab.planner.model.cost.PHASES`; the
            dense phase is empty.
    """

    forward: dict[str, int]
    backward: dict[str, int]
    reads: int
    launches: int
    operators: int
    join: int
    collectives: int
    extra_bytes: int
    sent_bytes: int
    by_phase: list[dict[str, int]]

    @property
    def lines(self) -> list[str]:
        """Each line that synchronises, and how often a step."""
        passes = {"forward": self.forward, "backward": self.backward}
        return [f"{count:>5} x {name}: {line}" for name, found in passes.items() for line, count in found.items()]


def figures(
    *, with_torchrec: bool = False, quick: bool = False, only: Sequence[str] = (), lines: bool = False
) -> list[Figure]:
    """A row for each layout and world, its synchronisations forward as the value; then the largest of each count.

    Args:
        with_torchrec: dispatched operators of a step beside TorchRec's, both on 2 CPU ranks.
        quick: worlds of 2 ranks only.
        only: parts of case names.
        lines: the lines that synchronise, under the table.
    """
    chosen = named([case for case in cases() if not quick or case.ranks == WORLDS[0]], only)
    counted = {label(case): counts for case, counts in zip(chosen, count_in_new_process(chosen), strict=True)}
    rows = [_row(name, counts, lines) for name, counts in counted.items()] + _most(counted)
    if with_torchrec:
        rows += _beside_torchrec([case for case in chosen if case.ranks == WORLDS[0]])
    return rows


def _row(name: str, counts: StepCounts, lines: bool) -> Figure:
    beside = {
        "of them reads": counts.reads,
        "backward": sum(counts.backward.values()),
        "kernels": counts.launches,
        "operators": counts.operators,
        "kernels to join": counts.join,
        "collectives": counts.collectives,
        "extra KB": counts.extra_bytes / 1e3,
        "sent KB": counts.sent_bytes / 1e3,
    }
    note = "\n".join(f"{name} {line}" for line in counts.lines) if lines else ""
    return Figure(name, sum(counts.forward.values()), "waits forward", beside=beside, note=note)


def _most(counted: Mapping[str, StepCounts]) -> list[Figure]:
    """The largest of each count that has a target."""
    every = list(counted.values())
    with_norms = [counts for name, counts in counted.items() if SHORT[ROWWISE] in name]
    without = [counts for counts in every if counts not in with_norms]
    found: dict[str, list[float]] = {
        f"waits forward, {MOST}": [sum(own.forward.values()) for own in every],
        f"waits backward, {MOST}": [sum(own.backward.values()) for own in every],
        f"kernels to join outputs, {MOST} without replicas": [
            own.join for name, own in counted.items() if not any(layout in name for layout in WITH_REPLICAS)
        ],
        f"collectives a step, {MOST}": [own.collectives for own in without],
        f"collectives a step with row norms, {MOST}": [own.collectives for own in with_norms],
        f"peak extra bytes over bytes sent, {MOST}": [own.extra_bytes / own.sent_bytes for own in every],
    }
    return [Figure(name, max(values), "") for name, values in found.items() if values]


def count_in_new_process(chosen: Sequence[StepCase]) -> list[StepCounts]:
    """Runs `count` on each case in one separate process, because the device is registered for a whole process.

    Raises:
        RuntimeError: a step failed on the device; the message carries its traceback.
    """
    command = [sys.executable, "-m", "benchmarks.launches", json.dumps([case.to_dict() for case in chosen])]
    quiet = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=COUNT_S, check=False)
    counted = [StepCounts(**json.loads(line)) for line in done.stdout.splitlines()]
    if done.returncode:
        raise RuntimeError(f"{label(chosen[len(counted)])} could not be counted: {done.stderr.strip()}")
    return counted


def count(case: StepCase) -> StepCounts:
    """Counts a step of rank 0 of a mirrored world. Registers the ledger device in this process."""
    ledger.register()
    torch.set_num_threads(1)
    with mirrored_world(case.ranks, case.local_ranks):
        return count_second_step(case)


def count_second_step(case: StepCase) -> StepCounts:
    """Counts the second of two steps of this rank in the default process group, on the ledger device."""
    model = sharded(case, ledger.DEVICE)
    for _ in range(2):
        batch = batch_of(case, ledger.DEVICE)
        gradient = torch.ones(case.batch, case.tables * case.dim, device=ledger.DEVICE)
        with trace() as traced, ledger.record() as step:
            with ledger.record() as forward:
                rows = model(batch).values()
            with ledger.record() as backward:
                rows.backward(gradient)
        del rows
    return StepCounts(
        forward=dict(Counter(f"{sync.cause}, {sync.where}" for sync in forward.syncs)),
        backward=dict(Counter(f"{sync.cause}, {sync.where}" for sync in backward.syncs)),
        reads=len(forward.reads),
        launches=step.launches,
        operators=step.operators.total(),
        join=forward.launches_after_last_collective(),
        collectives=len(traced.events),  # those of CPU tensors, too
        extra_bytes=step.peak_extra_bytes,
        sent_bytes=traced.bytes_sent(),
        by_phase=[dict(Counter(names)) for names in by_phase(forward.events, backward.events)],
    )


def by_phase(forward: Sequence[str], backward: Sequence[str]) -> list[list[str]]:
    """Names of kernels by phase. Input distribution ends before the first lookup; in backward, gradients have arrived
    before the first lookup or update."""
    lookups = {"lookup_forward", "lookup_backward"}
    if lookups.isdisjoint(forward):  # kernel native
        lookups = {"_embedding_bag_forward_only"}
    first = next(i for i, name in enumerate(forward) if name in lookups)
    update = next(i for i, name in enumerate(backward) if name in lookups)
    looked_up = [name for name in forward if name in lookups]
    others = [name for name in forward[first:] if name not in lookups]
    phases = [forward[:first], looked_up, others, [], backward[:update], backward[update:]]
    return [[name for name in names if not name.startswith("c10d::")] for names in phases]


# ---- beside TorchRec ----


def _beside_torchrec(chosen: Sequence[StepCase]) -> list[Figure]:
    """Operators of a step over TorchRec's: both on CPU ranks, without copies to a device."""
    own = [case for case in chosen if case.kernel or case.route != "direct"]  # only in this library
    return run_cases([case for case in chosen if case not in own], _one, with_torchrec=True)


def _one(case: StepCase, sides: Sides) -> Figure:
    totals: dict[str, float] = {}
    for name, side in tuple(sides.items()):
        try:
            side.build(case, backend="ledger" if name == "ours" else None)
            side.steps(2)
            totals[name] = max(sum(answer.values()) for answer in side.order({"do": "operators"}))
        except SideFailed as error:
            if name == "ours":
                raise
            sides.start(name)
            return Figure(f"{label(case)}: TorchRec cannot: {error}", math.nan, "x", beside={"ours": totals["ours"]})
    ratio = totals["ours"] / totals["theirs"]
    beside = {"ours": totals["ours"], "TorchRec": totals["theirs"]}
    return Figure(f"{label(case)}: {TORCHREC_OPERATORS}", ratio, "x", beside=beside)


if __name__ == "__main__":
    for data in json.loads(sys.argv[1]):
        print(json.dumps(asdict(count(from_dict(data)))), flush=True)
