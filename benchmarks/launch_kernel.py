"""What four ranks cost the reader of a notebook: a cell, a stop, a rank that dies, memory; in a real kernel."""

from __future__ import annotations

import os
import signal
import time
from statistics import median

import psutil

from benchmarks import Figure
from benchmarks.apparatus.kernel import Kernel, Reply, pss_mb

RANKS = 4
TRIES = 5
CELLS = 100
TARGETS = {
    f"%%recshard pass on {RANKS} ranks through a real kernel": 10.0,
    f"a stuck collective interrupted to a usable prompt, {RANKS} ranks": 2.5,
    "a rank killed to the error shown": 0.5,
    f"%recshard_restart of {RANKS} ranks, warm": 0.3,
    f"{RANKS} idle ranks, PSS": 300.0,
}

_STUCK = """%%recshard
import time
print('go', flush=True)
if rank == 0:
    time.sleep(100)
else:
    dist.all_reduce(torch.ones(1))
"""
_KEPT = "%%recshard\nt = torch.ones(1); dist.all_reduce(t); assert (t.item(), kept) == (world_size, rank), (t, kept)"


def figures() -> list[Figure]:
    """Medians, but for memory, which is measured once, before any cell ran."""
    with Kernel() as kernel:
        start(kernel)
        idle_mb, with_forkserver_mb = idle_memory(kernel)
        cell_ms = round_trip_ms(kernel, "%%recshard\npass")
        plain_ms = round_trip_ms(kernel, "pass")
        stops = [stop_s(kernel) for _ in range(TRIES)]
        deaths, restarts = zip(*(death_s(kernel) for _ in range(TRIES)), strict=True)
    return [
        Figure(f"%%recshard pass on {RANKS} ranks through a real kernel", cell_ms, "ms"),
        Figure("pass through the same kernel, without ranks", plain_ms, "ms"),
        Figure(f"a stuck collective interrupted to a usable prompt, {RANKS} ranks", median(stops), "s"),
        Figure("a rank killed to the error shown", median(deaths), "s"),
        Figure(f"%recshard_restart of {RANKS} ranks, warm", median(restarts), "s"),
        Figure(f"{RANKS} idle ranks, PSS", idle_mb, "MB"),
        Figure(f"{RANKS} idle ranks and the process they are forked from, PSS", with_forkserver_mb, "MB"),
    ]


def start(kernel: Kernel) -> None:
    """Ranks from a forkserver that has imported all it will."""
    kernel.ok("import torch\n%load_ext recshard_lab")
    kernel.ok("from recshard_lab.launcher.engines.fork import forkserver\nforkserver().warmed.wait(120)")
    kernel.ok(f"%recshard_launch -n {RANKS}")


def idle_memory(kernel: Kernel) -> tuple[float, float]:
    """MB of the ranks, and of all that the kernel started."""
    time.sleep(0.5)
    family = kernel.family()
    return pss_mb([psutil.Process(pid) for pid in pids(kernel)]), pss_mb(family)


def pids(kernel: Kernel) -> list[int]:
    """Process ids of the ranks, by rank."""
    result = kernel.ok("import recshard_lab.launcher\nprint(*recshard_lab.launcher.current().pids)").text
    return [int(pid) for pid in result.split()]


def round_trip_ms(kernel: Kernel, source: str, cells: int = CELLS) -> float:
    """Median of sending a cell until its prompt is free."""
    for _ in range(5):
        kernel.ok(source)
    return 1e3 * median(kernel.ok(source).seconds for _ in range(cells))


def stop_s(kernel: Kernel) -> float:
    """Seconds from the stop button until a next cell has done an all_reduce and found its variables."""
    kernel.ok("%%recshard\nkept = rank")
    cell = kernel.send(_STUCK)
    kernel.hear(cell, until=lambda reply: "go" in reply.text)
    time.sleep(0.3)  # the others are inside the collective now
    begun = time.perf_counter()
    kernel.interrupt()
    stopped = kernel.hear(cell)
    if "Interrupt" not in stopped.error:
        raise RuntimeError(f"the interrupted cell ended otherwise: {stopped}")
    kernel.ok(_KEPT)
    return time.perf_counter() - begun


def death_s(kernel: Kernel) -> tuple[float, float]:
    """Seconds from SIGKILL of a rank until its error is shown, and seconds of the restart after it."""
    victim = pids(kernel)[1]
    cell = kernel.send(
        "%%recshard\nprint('go', flush=True)\nif rank != 1: dist.barrier()\nelse: import time; time.sleep(99)"
    )
    kernel.hear(cell, until=lambda reply: "go" in reply.text)
    time.sleep(0.3)
    begun = time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    shown = kernel.hear(cell, until=_has_error)
    taken = time.perf_counter() - begun
    if "rank 1 was killed by SIGKILL" not in shown.error:
        raise RuntimeError(f"the error does not name the rank that was killed: {shown}")
    kernel.hear(cell)
    return taken, kernel.ok("%recshard_restart").seconds


def _has_error(reply: Reply) -> bool:
    return bool(reply.error)
