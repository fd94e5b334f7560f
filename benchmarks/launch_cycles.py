"""What 100 launches and stops of four ranks leave behind: processes, files, open descriptors, memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import Figure

RANKS = 4
CYCLES = 100
SETTLED = 20  # cycles until caches and allocators have what they want
_SPAN = f"after {CYCLES} launches and stops"
TARGETS = {
    f"processes left {_SPAN}": 0.0,
    f"files more {_SPAN}": 0.0,
    f"files left {_SPAN}, when the process has ended": 0.0,
    f"open descriptors more {_SPAN}": 0.0,
    f"threads more {_SPAN}": 0.0,
    f"memory more {_SPAN}": 2.0,
}

# Runs in a separate process, so that nothing else is counted. Prints one JSON object.
_CYCLES = f"""
import gc, json, os, time, psutil
from recshard_lab.launcher import launch
from recshard_lab.launcher.engines.fork import forkserver

def count():
    gc.collect()
    time.sleep(0.3)
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return dict(
        processes=len(family) - 2,  # without this one and the one that ranks are forked from
        descriptors=sum(process.num_fds() for process in family),
        threads=sum(process.num_threads() for process in family),
        memory=sum(process.memory_full_info().uss for process in family),
        files=sum(len(files) + len(folders) for _, folders, files in os.walk(os.environ["TMPDIR"])),
        shared=len(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else 0,
    )

with launch({RANKS}): pass
forkserver().warmed.wait(120)
begun = time.perf_counter()
for cycle in range(1, {CYCLES} + 1):
    with launch({RANKS}): pass
    if cycle == {SETTLED}: before = count()
after = count()
print(json.dumps(dict(before=before, after=after, seconds=time.perf_counter() - begun - 0.6)))
"""


def figures() -> list[Figure]:
    """Growth from cycle 20 to cycle 100, and what is left when the process has ended."""
    with tempfile.TemporaryDirectory(prefix="rsb-") as folder, tempfile.TemporaryDirectory(prefix="rsb-") as torchs:
        done = subprocess.run(
            [sys.executable, "-c", _CYCLES],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": torchs},  # torch's own cache stays
        )
        if done.returncode:
            raise RuntimeError(f"the cycles ended with code {done.returncode}:\n{done.stderr}")
        result = json.loads(done.stdout.splitlines()[-1])
        left = len(list(Path(folder).rglob("*")))
    before, after = result["before"], result["after"]
    grown = {name: after[name] - before[name] for name in after}
    return [
        Figure(f"processes left {_SPAN}", after["processes"], "processes"),
        Figure(f"files more {_SPAN}", grown["files"] + grown["shared"], "files"),
        Figure(f"files left {_SPAN}, when the process has ended", left, "files"),
        Figure(f"open descriptors more {_SPAN}", grown["descriptors"], "descriptors"),
        Figure(f"threads more {_SPAN}", grown["threads"], "threads"),
        Figure(f"memory more {_SPAN}", grown["memory"] / 1e6, "MB"),
        Figure("one launch and stop", result["seconds"] / CYCLES, "s"),
    ]
