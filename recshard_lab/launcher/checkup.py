"""``recshard doctor``: the machine's findings and a real launch, as a table or as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict

from rich import box
from rich.markup import escape
from rich.table import Table

from .errors import LaunchError, RankError
from .forkserver import warm
from .launching import launch
from .machine import Finding, inspect

__all__ = ["as_json", "as_table", "checkup", "real_launch"]

RANKS = 2
MARK = {True: "[green]✓[/]", False: "[bold red]✗[/]", None: "[dim]-[/]"}


def checkup() -> list[Finding]:
    """All that `inspect` finds, then two real ranks over Gloo, and over NCCL where there are two GPUs."""
    import torch

    warm()  # torch is imported for the ranks while the rest is looked at
    found = inspect()
    found.append(real_launch("gloo"))
    if torch.cuda.device_count() >= RANKS:
        found.append(real_launch("nccl"))
    return found


def real_launch(backend: str) -> Finding:
    """Starts two ranks, has them add up their rank numbers plus one, and stops them; each part timed."""
    name = f"{RANKS} ranks over {backend}"
    begun = time.perf_counter()
    try:
        with launch(RANKS, backend=backend) as ranks:
            ready_s = time.perf_counter() - begun
            sums, seconds = zip(*ranks.run(_all_reduce, "cuda" if backend == "nccl" else "cpu"), strict=True)
    except (LaunchError, RankError, OSError) as error:
        headline = error.headline() if isinstance(error, RankError) else str(error)
        return Finding(name, f"{type(error).__name__}: {headline}", False, "see the findings above marked with a cross")
    if set(sums) != {3.0}:
        return Finding(name, f"all_reduce gave {sums}, expected 3.0 on both", False, "torch's build is broken")
    return Finding(name, f"started in {ready_s:.2f} s, all_reduce {1e3 * max(seconds):.2f} ms", True)


def _all_reduce(device: str) -> tuple[float, float]:
    import torch
    from torch import distributed

    for _ in range(2):  # the second is past the set-up of connections
        ours = torch.full((1,), distributed.get_rank() + 1.0, device=device)
        begun = time.perf_counter()
        distributed.all_reduce(ours)
        result = ours.item()
    return result, time.perf_counter() - begun


def as_table(findings: Sequence[Finding]) -> Table:
    """What there is in a row each, what to do about it under it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(width=1)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        fix = f"\n[yellow]→ {escape(finding.fix)}[/]" if finding.fix else ""
        table.add_row(MARK[finding.ok], escape(finding.name), escape(finding.value) + fix)
    return table


def as_json(findings: Sequence[Finding]) -> str:
    """One object: whether nothing needed is broken, and every finding.

    >>> as_json([Finding("cores", "2 usable", True)])
    '{"ok": true, "findings": [{"name": "cores", "value": "2 usable", "ok": true, "fix": null}]}'
    """
    ok = all(finding.ok is not False for finding in findings)
    return json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]})
