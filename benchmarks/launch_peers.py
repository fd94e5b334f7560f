"""Start, cell and memory of four ranks under multiprocess spawn, ipyparallel, nbdistributed and this library.

The other launchers are installed in a temporary environment. In each round every launcher gets a fresh kernel, one
after the other, so that other load on the machine affects all of them. Figures are medians over the rounds. Every
kernel runs in a private network that contains only loopback, because nbdistributed listens on every interface and
unpickles what it receives.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from statistics import median

from benchmarks import Figure, note
from benchmarks.apparatus.environments import PeerEnv
from benchmarks.apparatus.kernel import Kernel, own_network, pss_mb
from benchmarks.apparatus.peers import RANKS, RECIPES, Recipe

ROUNDS = 3
CELLS = 21
IDLE_S = 0.5

Measured = dict[str, float]  # "launch" s, "cell" ms, "memory" MB


def figures() -> list[Figure]:
    """Figures without targets. A peer that cannot be installed is named on stderr."""
    if why := own_network():
        raise ValueError(
            f"other launchers need a private network, which this machine cannot provide: {why}. "
            f"Fix: leave out --with-peers"
        )
    note("creating a temporary environment for other launchers, which takes about two minutes ...")
    with PeerEnv([recipe.package for recipe in RECIPES if recipe.package]) as peers:
        for name, why in peers.missing.items():
            note(f"NOT MEASURED: {name} could not be installed: {why}")
        there = [recipe for recipe in RECIPES if recipe.package.split("==")[0] not in peers.missing]
        return side_by_side(there, peers.python)


def side_by_side(recipes: list[Recipe], peers_python: str, rounds: int = ROUNDS) -> list[Figure]:
    """Runs every recipe in turn, `rounds` times. A recipe that fails in a round is named on stderr."""
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(1, rounds + 1):
        for recipe in recipes:
            note(f"round {turn} of {rounds}: {recipe.name}")
            try:
                measured = measure(recipe, peers_python if recipe.package else sys.executable)
            except (RuntimeError, TimeoutError) as error:
                note(f"FAILED in this round: {recipe.name}: {error}")
                continue
            for what, value in measured.items():
                samples[what, recipe.name].append(value)
    texts = {
        "launch": (f"launch of {RANKS} ranks to first all_reduce, in a kernel", "s"),
        "cell": (f"empty cell on {RANKS} ranks, in a kernel", "ms"),
        "memory": (f"{RANKS} idle ranks and their helpers, PSS", "MB"),
    }
    return [
        Figure(f"{text}: {name}", median(values), unit)
        for what, (text, unit) in texts.items()
        for (measured_what, name), values in samples.items()
        if measured_what == what
    ]


def measure(recipe: Recipe, python: str) -> Measured:
    """Measures one launcher in a fresh kernel, in a private network."""
    with Kernel(python, isolated=True) as kernel:
        kernel.ok(recipe.prelude)
        before = {process.pid for process in kernel.family()} if recipe.package else set()
        launched = kernel.ok(recipe.launch)
        if f"sum {RANKS}.0" not in launched.text:
            raise RuntimeError(f"the ranks did not add up to {RANKS}:\n{launched.text[-2000:]}")
        measured = {"launch": launched.seconds}
        time.sleep(IDLE_S)
        family = [process for process in kernel.family() if process.pid not in before]
        measured["memory"] = pss_mb(family)
        if recipe.cell:
            for _ in range(3):
                kernel.ok(recipe.cell)
            measured["cell"] = 1e3 * median(kernel.ok(recipe.cell).seconds for _ in range(CELLS))
    return measured
