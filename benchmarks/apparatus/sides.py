"""Ranks of one side, kept alive; they take orders from their standard input (``orders.py``)."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.apparatus.environments import with_checkout
from benchmarks.apparatus.step_case import StepCase, rectangles

__all__ = ["Side", "SideFailed"]

ANSWER_S = 240.0


class SideFailed(RuntimeError):
    """A rank of this side returned an error, ended, or did not answer."""


class Side:
    """A context manager: `ranks` processes of one interpreter, joined over Gloo on loopback.

    Args:
        side: "ours" or "theirs".
        python: the interpreter that has the library.
        ranks, local_ranks: in all, and of one virtual node.
        program: what they run: a module of this package.
    """

    def __init__(
        self,
        side: str,
        python: str = sys.executable,
        ranks: int = 2,
        local_ranks: int = 2,
        program: str = "step_worker",
    ) -> None:
        self.side, self.python, self.ranks, self.local_ranks = side, python, ranks, local_ranks
        self.program = program
        self.folder = tempfile.TemporaryDirectory(prefix="recshard-side-")
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Side:
        for rank in range(self.ranks):
            command = [self.python, "-m", f"benchmarks.apparatus.{self.program}", self.side]
            command += [str(rank), str(self.ranks), f"{self.folder.name}/store"]
            with Path(self.folder.name, f"log{rank}").open("w") as log:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        bufsize=1,
                        env=self._environment(rank),
                    )
                )
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends its ranks."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()
        self.processes = []
        self.folder.cleanup()

    def build(self, case: StepCase, comparing: bool = False, backend: str | None = None) -> None:
        """A new model on every rank. comparing: from `StepCase.first_weights`."""
        cut = {} if case.layout == "fused" else rectangles(case.plan())
        self.order(
            {"do": "build", "case": case.to_dict(), "rectangles": cut, "comparing": comparing, "backend": backend}
        )

    def steps(self, count: int) -> float:
        """Seconds that the slowest rank took for one of `count` steps."""
        return max(answer["seconds"] for answer in self.order({"do": "steps", "count": count})) / count

    def train(self, count: int, out: str) -> None:
        """Steps, then each rank's weights to ``{out}.{rank}.npz``."""
        self.order({"do": "train", "count": count, "out": out})

    def order(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Sends an order to every rank, and returns their answers.

        Raises:
            SideFailed: a rank returned an error, ended, or did not answer in 240 s.
        """
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(order) + "\n")
            except BrokenPipeError:
                raise SideFailed(self._last_words(self.processes.index(process))) from None
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self.processes):
                assert process.stdout is not None
                waiting.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.ranks:
                ready = waiting.select(ANSWER_S)
                if not ready:
                    raise SideFailed(f"no answer in {ANSWER_S:g} s to {order['do']}")
                for key, _ in ready:
                    line = self.processes[key.data].stdout.readline()
                    if not line:
                        raise SideFailed(self._last_words(key.data))
                    answers[key.data] = json.loads(line)
                    waiting.unregister(key.fileobj)
                    if "error" in answers[key.data]:
                        raise SideFailed(answers[key.data]["error"])
        return [answers[rank] for rank in sorted(answers)]

    def _last_words(self, rank: int) -> str:
        lines = Path(self.folder.name, f"log{rank}").read_text(errors="replace").strip().splitlines()
        return f"rank {rank} ended: {lines[-1] if lines else 'without a message'}"

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            **with_checkout(),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(rank % self.local_ranks),
            "LOCAL_WORLD_SIZE": str(self.local_ranks),
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform.startswith("linux") else "lo0",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
