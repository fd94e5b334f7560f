"""The checks of a self-test. Each is a function that returns what it saw, and raises where something is wrong.

A check that raises does not end the others. Ranks that a check has lost are replaced for the next one.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from recshard_lab.embedding import EmbeddingBagConfig
from recshard_lab.lab.compare.measure import measure_plan
from recshard_lab.lab.draw.theme import bytes_text
from recshard_lab.launcher import RankError, Ranks, launch
from recshard_lab.launcher.doctor import checkup, torch_and_backends
from recshard_lab.launcher.lines import Printer
from recshard_lab.planner import Workload, estimate
from recshard_lab.selftest import on_ranks
from recshard_lab.selftest.report import Report, Result, facts
from recshard_lab.sharding import ParameterSharding, ShardingPlan, Topology
from recshard_lab.sharding.schemes import scheme_names

__all__ = ["Check", "NotApplicable", "Seen", "Way", "all_checks", "command", "run_checks"]

APART = 1e-5  # of the largest value: a different order of the same fp32 sums
LOSSES_APART = 1e-4  # of the loss: sums of atomic additions and other kernels, over several steps
MEMORY_APART = 0.10  # of the allocator's bytes
LIMIT_S = 1.0  # time limit of the cell that is interrupted
PROMPT_S = 6.0  # from that limit until the ranks are usable again
KINDS = ["TrainPipelineBase", "TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist"]


class NotApplicable(Exception):
    """This machine cannot run a check. The message is the reason."""


@dataclass(frozen=True)
class Seen:
    """What a check saw: a sentence, and figures by name, as text with units."""

    detail: str = ""
    figures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Way:
    """One way to launch ranks."""

    name: str
    ranks: int
    options: Mapping[str, Any]
    device: str  # "cpu" or "cuda"


@dataclass(frozen=True)
class Check:
    """A named check."""

    name: str
    run: Callable[[], Seen]


class _Quiet(Printer):
    """Drops what ranks print and what the launcher reports of them: the errors are expected."""

    def emit(self, ranks: tuple[int, ...], stream: str, content: Any) -> None:
        pass

    def notice(self, text: str) -> None:
        pass


class Launched:
    """The ranks of the checks: one world at a time, kept while checks ask for the same way."""

    def __init__(self) -> None:
        self._way: Way | None = None
        self._ranks: Ranks | None = None

    def ranks(self, way: Way) -> Ranks:
        """Usable ranks that were launched this way."""
        if self._way != way or self._ranks is None or not self._ranks.usable:
            self.stop()
            self._ranks, self._way = launch(way.ranks, **way.options), way
        return self._ranks

    def stop(self) -> None:
        """Ends the ranks, if there are any."""
        if self._ranks is not None:
            self._ranks.stop()
        self._ranks = None


def run_checks(
    gpu: bool = False,
    on_result: Callable[[Result], object] = lambda result: None,
    checks: Sequence[Check] | None = None,
    skip: Sequence[str] = (),
    full: bool = False,
    known: Mapping[str, Result] | None = None,
) -> Report:
    """Runs all checks of this machine's CPU, or with ``gpu`` those of its GPUs too.

    Args:
        gpu: also run what needs an NVIDIA GPU.
        on_result: called with each result as soon as it is known.
        checks: run these instead.
        skip: checks whose names contain one of these texts are not run. The report lists them as skipped.
        full: run the checks of `recshard_lab.selftest.full` on the CPU and on the GPUs that torch finds. With ``gpu``
            also those that only GPUs have.
        known: results of an earlier run, by name. A check that passed then is not run again.

    Raises:
        ValueError: ``gpu``, and torch finds no GPU.
    """
    if gpu and torch.cuda.device_count() == 0:
        why = next(found for found in torch_and_backends() if found.name == "GPUs" or found.ok is False)
        raise ValueError(
            f"recshard selftest --gpu found 0 GPUs: {why.value}. "
            f"Fix: {why.fix or 'run recshard selftest, without --gpu'}."
        )
    launched = Launched()
    try:
        results = []
        for check in _chosen(launched, gpu, full) if checks is None else checks:
            before = (known or {}).get(check.name)
            if before is not None and before.status == "passed":
                results.append(before)
            elif any(text in check.name for text in skip):
                results.append(Result(check.name, "skipped", 0.0, "left out"))
            else:
                results.append(run_check(check))
            on_result(results[-1])
    finally:
        launched.stop()
    return Report(facts(command()), results)


def command() -> str:
    """The command line of this process without folders: reports travel."""
    return shlex.join(["recshard", *(Path(word).name if "/" in word else word for word in sys.argv[1:])])


def _chosen(launched: Launched, gpu: bool, full: bool) -> list[Check]:
    if not full:
        return all_checks(launched, gpu)
    from recshard_lab.selftest.full import full_checks

    return [*full_checks(launched), *(gpu_checks(launched) if gpu else [])]


def run_check(check: Check) -> Result:
    """The result of one check. Only an interrupt by the user is raised."""
    begun = time.perf_counter()
    figures: Mapping[str, str] = {}
    try:
        seen = check.run()
        status, detail, figures = "passed", seen.detail, seen.figures
    except NotApplicable as reason:
        status, detail = "not applicable", str(reason)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        words = error.headline() if isinstance(error, RankError) else str(error)
        status, detail = "failed", f"{type(error).__name__}: {words}"
    return Result(check.name, status, time.perf_counter() - begun, detail, figures)  # type: ignore[arg-type]


def all_checks(launched: Launched, gpu: bool) -> list[Check]:
    """Every check in the order in which it runs."""
    cpu = Way("2 CPU ranks, Gloo", 2, {"backend": "gloo"}, "cpu")
    found = [Check("checkup", partial(check_machine, launched)), *checks_of(launched, cpu)]
    if gpu:
        for way in (nccl(), shared(2)):
            found += checks_of(launched, way)
        found += gpu_checks(launched)
    return found


def nccl() -> Way:
    """A rank on each GPU."""
    gpus = torch.cuda.device_count()
    return Way(f"{gpus} rank{'s' if gpus > 1 else ''}, NCCL", gpus, {"backend": "nccl"}, "cuda")


def shared(ranks: int) -> Way:
    """Ranks on one GPU, over Gloo."""
    return Way(f"{ranks} ranks share a GPU", ranks, {"share_gpu": True}, "cuda")


def gpu_checks(launched: Launched) -> list[Check]:
    """What only GPUs have: their memory, graphs and speeds, then the tests and notebooks of a checkout."""
    from recshard_lab.selftest.checkout import checkout_checks

    one = nccl()
    found = [
        Check(f"allocator within 10% of predicted: {way.name}", partial(check_memory, launched, way))
        for way in (one, shared(2))
    ]
    found += [
        Check(f"CUDA graphs: {one.name}", partial(check_graphs, launched, one)),
        Check(f"pinned copies: {one.name}", partial(check_pinned, launched, one)),
        Check(f"bandwidth: {one.name}", partial(check_bandwidth, launched, one)),
        Check(f"lookups: {one.name}", partial(check_lookups, launched, one)),
    ]
    return [*found, *checkout_checks(launched.stop)]


def checks_of(launched: Launched, way: Way) -> list[Check]:
    """What is checked on ranks of every kind."""
    found = [Check(f"launch: {way.name}", partial(check_launch, launched, way))]
    found += [
        Check(f"parity of {scheme}: {way.name}", partial(check_parity, launched, way, scheme))
        for scheme in scheme_names()
    ]
    return [
        *found,
        Check(f"pipelines: {way.name}", partial(check_pipelines, launched, way)),
        Check(f"interrupt: {way.name}", partial(check_interrupt, launched, way)),
        Check(f"killed rank: {way.name}", partial(check_kill, launched, way)),
    ]


# ---- the checks ----


def check_machine(launched: Launched) -> Seen:
    """What ``recshard doctor`` finds."""
    launched.stop()
    findings = checkup()
    broken = [f"{finding.name}: {finding.value}" for finding in findings if finding.ok is False]
    if broken:
        raise RuntimeError("; ".join(broken))
    return Seen(f"{len(findings)} findings, none broken", {})


def check_launch(launched: Launched, way: Way) -> Seen:
    """The ranks, their devices, and one sum over all of them."""
    ranks = launched.ranks(way)
    found = ranks.run(on_ranks.rank_facts)
    expected = sum(range(1, way.ranks + 1))
    for rank, (device, total, placed) in enumerate(found):
        if not device.startswith(way.device):
            raise RuntimeError(f"rank {rank} is on {device}, expected {way.device}")
        if total != expected:
            raise RuntimeError(f"all_reduce returned {total} on rank {rank}, expected {expected}")
        if not placed:
            raise RuntimeError(f"a model on rank {rank} is not on {device}")
    devices = ", ".join(sorted({device for device, _, _ in found}))
    return Seen(f"on {devices}", {"launch": f"{ranks.launch_s:.2f} s"})


def parity_tables() -> list[EmbeddingBagConfig]:
    """Tables of uneven sizes; one serves two features."""
    sizes = {"large": (1000, 32), "narrow": (500, 16), "tiny": (37, 8)}
    more = {"large": ["twin"]}
    return [
        EmbeddingBagConfig(rows, dim, name=name, feature_names=[name, *more.get(name, [])])
        for name, (rows, dim) in sizes.items()
    ]


def plan_under(scheme: str, tables: Sequence[EmbeddingBagConfig], ranks: Ranks) -> ShardingPlan:
    """Every table under one scheme, for these ranks."""
    entries = {table.name: ParameterSharding(scheme) for table in tables}
    plan = ShardingPlan({"": entries})  # type: ignore[dict-item]
    return plan.resolved(tables, ranks.world_size, ranks.local_world_size)


def check_parity(launched: Launched, way: Way, scheme: str) -> Seen:
    """Outputs and trained weights under a scheme against unsharded tables."""
    ranks, tables = launched.ranks(way), parity_tables()
    plan = plan_under(scheme, tables, ranks)
    found = ranks.run(on_ranks.run_beside_truth, plan.to_json(), tables, Workload(64, 3.0), 4)
    apart = {kind: max(one[f"{kind}_apart"] for one in found) for kind in ("outputs", "weights")}
    for kind, value in apart.items():
        if not value <= APART:
            raise RuntimeError(f"{kind} differ from the unsharded tables by {value:.1e} of the largest, above {APART}")
    kernels = ", ".join(sorted({name for one in found for name in one["backends"].values()}))
    return Seen(f"outputs apart {apart['outputs']:.0e}, weights {apart['weights']:.0e}; kernel {kernels}")


def compare_losses(name: str, losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference. Raises if it is above `LOSSES_APART`, or not a number."""
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    if not apart <= LOSSES_APART:
        raise RuntimeError(f"losses of {name} differ from the plain loop by {apart:.1e}, above {LOSSES_APART}")
    return apart


def check_pipelines(launched: Launched, way: Way, **switches: Any) -> Seen:
    """Every training pipeline against the plain loop."""
    apart = 0.0
    for found in launched.ranks(way).run(on_ranks.pipeline_losses, KINDS, **switches):
        plain = found.pop("plain loop")
        apart = max(apart, *(compare_losses(kind, losses, plain) for kind, losses in found.items()))
    return Seen(f"{', '.join(KINDS)}: losses apart {apart:.0e}")


_ENDLESS = "while True:\n    torch.ones(64, device=device).sum().item()"
_STUCK = "if rank == 0:\n    alone = torch.ones(4, device=device)\n    dist.all_reduce(alone)\n    alone.sum().item()"
_KILL = "import os, signal\nif rank == {last}:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
_SUM = "together = torch.ones(1, device=device)\ndist.all_reduce(together)"


def check_interrupt(launched: Launched, way: Way) -> Seen:
    """A cell that never ends is stopped; the ranks keep their variables and can use collectives again."""
    ranks = launched.ranks(way)
    ranks.exec("kept = rank")
    begun = time.perf_counter()
    try:
        ranks.exec(_ENDLESS if way.ranks == 1 else _STUCK, timeout_s=LIMIT_S, printer=_Quiet(list(range(way.ranks))))
    except RankError:
        took = time.perf_counter() - begun - LIMIT_S
    else:
        raise RuntimeError("a cell that never ends has ended")
    ranks.exec(_SUM, timeout_s=60)
    kept, sums = ranks.pull("kept"), ranks.eval("together.item()")
    if kept != list(range(way.ranks)) or sums != [way.ranks] * way.ranks:
        raise RuntimeError(f"after the interrupt the ranks have kept={kept} and sum to {sums}")
    if took > PROMPT_S:
        raise RuntimeError(f"the ranks were stuck for {took:.1f} s after the limit, above {PROMPT_S:g} s")
    return Seen("variables kept, collectives work again", {"limit to prompt": f"{took:.2f} s"})


def check_kill(launched: Launched, way: Way) -> Seen:
    """A rank that is killed in a collective is reported by number, no process is left, and fresh ranks start."""
    ranks = launched.ranks(way)
    pids, last = ranks.pids, way.ranks - 1
    begun = time.perf_counter()
    try:
        ranks.exec(_KILL.format(last=last) + _SUM + "\ntogether.item()", printer=_Quiet(list(range(way.ranks))))
    except RankError as error:
        took = time.perf_counter() - begun
        if not any(failure.rank == last and failure.kind == "died" for failure in error.failures):
            raise RuntimeError(f"the error does not name rank {last}: {error.headline()}") from error
    else:
        raise RuntimeError("no error was raised")
    if ranks.usable:
        raise RuntimeError("the ranks say that they are usable")
    ranks.restart()
    ranks.exec(_SUM, timeout_s=60)
    alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    if alive:
        raise RuntimeError(f"processes {alive} are left")
    return Seen(f"rank {last} is named, fresh ranks work", {"kill to error": f"{took:.2f} s"})


# ---- GPUs alone ----


def check_memory(launched: Launched, way: Way) -> Seen:
    """The allocator's bytes against the prediction: what the tables hold, and the peak of a training step."""
    ranks = launched.ranks(way)
    tables = large_tables(share=0.02)
    workload = Workload(2048, 5.0, optimizer="exact_row_wise_adagrad")
    plan = plan_under("row_wise", tables, ranks)
    predicted = estimate(plan, tables, Topology(way.ranks, "cuda"), workload)
    kept = [predicted.memory_categories.index(name) for name in ("weights", "optimizer_state")]
    found = ranks.run(on_ranks.device_memory, plan.to_json(), tables, workload)
    figures, wrong = {}, []
    for rank, one in enumerate(found):
        expected = {"held": predicted.memory_bytes[rank, kept].sum(), "peak": predicted.memory_bytes[rank].sum()}
        for name, want in expected.items():
            off = want / one[name] - 1 if one[name] else float("inf")
            text = f"{bytes_text(one[name])}, predicted {bytes_text(float(want))} ({100 * off:+.1f}%)"
            figures[f"{name}, rank {rank}"] = text
            if not abs(off) <= MEMORY_APART:
                wrong.append(f"{name} of rank {rank}: {text}")
    if wrong:
        raise RuntimeError("; ".join(wrong))
    return Seen(f"{len(tables)} tables, row-wise Adagrad", figures)


def large_tables(share: float, count: int = 8, dim: int = 128) -> list[EmbeddingBagConfig]:
    """Tables that take this share of the smallest GPU's free memory, at most 4 million rows each."""
    free = min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count()))
    rows = min(4_000_000, int(share * free) // (count * dim * 4))
    return [EmbeddingBagConfig(rows, dim, name=f"t{i}", feature_names=[f"f{i}"]) for i in range(count)]


def check_graphs(launched: Launched, way: Way) -> Seen:
    """CUDA graphs of the dense part: equal losses, and the time of a step."""
    for found in launched.ranks(way).run(on_ranks.graphs):
        if not found["recorded"]:
            raise RuntimeError("no part of the model was recorded")
        apart = compare_losses("the model with graphs", found["graphed"], found["plain"])
    times = {"step": f"{found['plain_ms']:.2f} ms", "step with graphs": f"{found['graphed_ms']:.2f} ms"}
    return Seen(f"{len(found['recorded'])} parts recorded, losses apart {apart:.0e}", times)


def check_pinned(launched: Launched, way: Way) -> Seen:
    """Copies from pinned memory, and pipelines that use them."""
    speeds = launched.ranks(way).run(on_ranks.pinned_copies)
    seen = check_pipelines(launched, way, pin_memory=True)
    slowest = {name: min(one[name] for one in speeds) for name in speeds[0]}
    return Seen(seen.detail, {f"host to GPU, {name}": f"{gbps:.1f} GB/s" for name, gbps in slowest.items()})


def check_bandwidth(launched: Launched, way: Way) -> Seen:
    """The step's rows through device memory in its time, beside the bandwidth of a plain copy."""
    ranks = launched.ranks(way)
    copies = min(ranks.run(on_ranks.copy_speed))
    tables, workload = large_tables(share=0.1, count=16), Workload(8192, 10.0)
    measured = measure_plan(ranks, plan_under("row_wise", tables, ranks), tables, workload, steps=10)
    step_gbps = sum(row_bytes(tables, workload)) / measured.step_ms / 1e6
    return Seen(
        f"{len(tables)} tables of {tables[0].num_embeddings:,} x 128, batch 8192 per rank, 10 ids per bag, SGD",
        {
            "copy inside the GPU": f"{copies:.0f} GB/s",
            "step": f"{measured.step_ms:.2f} ms",
            "rows of the step": f"{step_gbps:.0f} GB/s, {100 * step_gbps / copies:.0f}% of the copy",
        },
    )


def check_lookups(launched: Launched, way: Way) -> Seen:
    """Each kernel alone: the rows that a lookup and its backward read and write, in their time, beside a plain copy."""
    ranks = launched.ranks(way)
    copies = min(ranks.run(on_ranks.copy_speed))
    tables, workload = large_tables(share=0.1, count=16), Workload(8192, 10.0)
    figures = {"copy inside the GPU": f"{copies:.0f} GB/s"}
    for name, times in ranks.run(on_ranks.lookup_times, tables, workload)[0].items():
        for part, ms, moved in zip(("lookup", "backward"), times, row_bytes(tables, workload), strict=True):
            gbps = moved / ms / 1e6
            figures[f"{part}, {name}"] = f"{ms:.2f} ms, {gbps:.0f} GB/s, {100 * gbps / copies:.0f}% of the copy"
    if len(figures) == 1:
        raise RuntimeError("no kernel serves these tables on a GPU")
    rows = f"{len(tables)} tables of {tables[0].num_embeddings:,} x 128"
    return Seen(f"{rows}, batch 8192, 10 uniform ids per bag", figures)


def row_bytes(tables: Sequence[EmbeddingBagConfig], workload: Workload) -> tuple[float, float]:
    """The least bytes of rows that one rank's lookup reads and writes in its memory, and those of its backward.

    A lookup reads a row per id and writes a row per bag. Its backward reads a row per bag, and reads and writes each
    distinct row. Ids are uniform.

    >>> table = EmbeddingBagConfig(1_000_000, 4, name="t", feature_names=["f"])
    >>> row_bytes([table], Workload(1, 1.0))  # rows of 16 bytes: 1 + 1, then 1 + 2
    (32.0, 48.0)
    """
    forward = backward = 0.0
    for table in tables:
        row = table.embedding_dim * 4
        for feature in table.feature_names:
            ids = workload.batch_size * workload.pooling_factor(feature)
            rows = table.num_embeddings
            distinct = rows * -float(np.expm1(ids * np.log1p(-1 / rows)))
            forward += row * (ids + workload.batch_size)
            backward += row * (workload.batch_size + 2 * distinct)
    return round(forward, 3), round(backward, 3)
