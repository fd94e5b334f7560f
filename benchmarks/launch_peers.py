"""Four ranks by multiprocess spawn, ipyparallel, nbdistributed and us: start, cell and memory, side by side.

The others are installed in an environment that is thrown away. Each round gives every launcher a fresh kernel,
one after the other, so that a busy minute hits all of them; figures are medians over the rounds. Every kernel
lives in a network of its own, in which there is nothing but loopback: nbdistributed listens on every interface
and unpickles what comes.
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
    """Told without targets: theirs are not ours to promise. A peer that cannot be installed is named on stderr."""
    if why := own_network():
        raise ValueError(f"other launchers are measured in a network of their own, which is not to be had here: {why}")
    note("creating a temporary environment for other launchers, which takes about two minutes ...")
    with PeerEnv([recipe.package for recipe in RECIPES if recipe.package]) as peers:
        for name, why in peers.missing.items():
            note(f"NOT MEASURED: {name} could not be installed: {why}")
        there = [recipe for recipe in RECIPES if recipe.package.split("==")[0] not in peers.missing]
        return side_by_side(there, peers.python)


def side_by_side(recipes: list[Recipe], peers_python: str, rounds: int = ROUNDS) -> list[Figure]:
    """Every recipe in turn, `rounds` times; one that fails in a round is named on stderr, its others count."""
    told: dict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(1, rounds + 1):
        for recipe in recipes:
            note(f"round {turn} of {rounds}: {recipe.name}")
            try:
                measured = measure(recipe, peers_python if recipe.package else sys.executable)
            except (RuntimeError, TimeoutError) as error:
                note(f"FAILED in this round: {recipe.name}: {error}")
                continue
            for what, value in measured.items():
                told[what, recipe.name].append(value)
    texts = {
        "launch": (f"launch of {RANKS} ranks to first all_reduce, in a kernel", "s"),
        "cell": (f"empty cell on {RANKS} ranks, in a kernel", "ms"),
        "memory": (f"{RANKS} idle ranks and their helpers, PSS", "MB"),
    }
    return [
        Figure(f"{text}: {name}", median(values), unit)
        for what, (text, unit) in texts.items()
        for (measured_what, name), values in told.items()
        if measured_what == what
    ]


def measure(recipe: Recipe, python: str) -> Measured:
    """One launcher in a fresh kernel, in a network of its own."""
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
