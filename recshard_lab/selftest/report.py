"""The report of a self-test: the machine, one row per check, the figures."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

__all__ = ["Report", "Result", "Status", "facts"]

Status = Literal["passed", "failed", "not applicable", "skipped"]


@dataclass(frozen=True)
class Result:
    """The result of one check.

    Attributes:
        name: the check, and the ranks that it ran on.
        status: ``passed``, ``failed``, ``not applicable`` or ``skipped``.
        seconds: wall-clock time.
        detail: what was seen; the reason if it failed or was not applicable.
        figures: name -> value with its unit.
    """

    name: str
    status: Status
    seconds: float
    detail: str = ""
    figures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All results and the machine that they hold for.

    Attributes:
        facts: date, card, driver and versions.
        results: one per check, in order.

    >>> report = Report({"date": "2026-01-01"}, [Result("launch", "failed", 0.5, "no ranks")])
    >>> report.ok
    False
    >>> print(report.markdown())
    # recshard selftest: 1 of 1 checks failed
    <BLANKLINE>
    - date: 2026-01-01
    <BLANKLINE>
    | check | result | seconds | detail |
    |---|---|---:|---|
    | launch | **failed** | 0.5 | no ranks |
    """

    facts: Mapping[str, str]
    results: Sequence[Result]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(result.status != "failed" for result in self.results)

    @property
    def title(self) -> str:
        """How many checks failed, passed, were not applicable and were skipped, in one line."""
        count = Counter(result.status for result in self.results)
        skipped = f", {count['skipped']} skipped" if count["skipped"] else ""
        if count["failed"]:
            return f"recshard selftest: {count['failed']} of {len(self.results)} checks failed{skipped}"
        return f"recshard selftest: {count['passed']} checks passed, {count['not applicable']} not applicable{skipped}"

    def markdown(self) -> str:
        """The report as Markdown, readable as plain text."""
        lines = [f"# {self.title}", "", *(f"- {name}: {value}" for name, value in self.facts.items()), ""]
        lines += ["| check | result | seconds | detail |", "|---|---|---:|---|"]
        for result in (each for each in self.results if each.status != "skipped"):
            status = f"**{result.status}**" if result.status == "failed" else result.status
            lines.append(f"| {_cell(result.name)} | {status} | {result.seconds:.1f} | {_cell(result.detail)} |")
        if skipped := [result.name for result in self.results if result.status == "skipped"]:
            lines += ["", f"Skipped on request: {', '.join(skipped)}."]
        figures = [(result.name, *pair) for result in self.results for pair in result.figures.items()]
        if figures:
            lines += ["", "| check | figure | value |", "|---|---|---:|"]
            lines += [f"| {' | '.join(map(_cell, figure))} |" for figure in figures]
        return "\n".join(lines)

    def as_json(self) -> str:
        """One object: ``ok``, ``facts`` and ``results``."""
        results = [asdict(result) for result in self.results]
        return json.dumps({"ok": self.ok, "facts": dict(self.facts), "results": results})

    @classmethod
    def read(cls, path: Path) -> Report:
        """The report in a file that has what `as_json` wrote.

        Raises:
            ValueError: another file.
        """
        try:
            found = json.loads(path.read_text())
            return cls(found["facts"], [Result(**result) for result in found["results"]])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not the JSON report of a self-test. Fix: name a new file") from error

    def same_build(self, other: Report) -> bool:
        """Whether both are of one machine, the same sources of this library, and one build of torch."""
        names = ("system", "cards", "Python", "torch", "sources", "lookup kernels")
        return all(self.facts.get(name) == other.facts.get(name) for name in names)


def _cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def facts(command: str) -> dict[str, str]:
    """Date, machine, cards, driver and versions.

    Args:
        command: how the self-test was started.
    """
    import torch

    import recshard_lab
    from recshard_lab.cores import driver, free_memory, usable_cores
    from recshard_lab.embedding import kernels
    from recshard_lab.launcher.doctor import FBGEMM_BUILDS, version_of

    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    builds = [f"{name} {version}" for name in FBGEMM_BUILDS if (version := version_of(name))]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, {usable_cores()} cores, "
        f"{free_memory()[1] / 1e9:.0f} GB",
        "cards": cards(),
        "driver": driver(),
        "Python": ".".join(map(str, sys.version_info[:3])),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none (CPU build)'}",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if nccl else "not in this torch",
        "recshard_lab": f"{recshard_lab.__version__}, {origin()}",
        "sources": digest(),
        "lookup kernels": f"{', '.join(kernels.available())} ({', '.join(builds) or 'fbgemm is not installed'})",
    }


def digest() -> str:
    """Twelve digits that differ if a source file of this package does: a commit does not name edits after it."""
    root, found = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def origin() -> str:
    """Whether this package is installed or runs from a checkout, and the checkout's commit. No path: reports travel."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "tests").is_dir():
        return "installed"
    try:
        done = subprocess.run(["git", "-C", root, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    except OSError:  # no git here
        return "from a checkout"
    return f"from a checkout at {done.stdout.strip()}" if done.returncode == 0 else "from a checkout without git"


def cards() -> str:
    """Names and memory of the GPUs; why they cannot be read, if they cannot."""
    import torch

    try:
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except Exception as error:  # the report of a broken GPU is the one that is needed
        return f"cannot be read: {type(error).__name__}: {error}"
    return ", ".join(f"{gpu.name} ({gpu.total_memory / 1e9:.0f} GB)" for gpu in gpus) or "none"
