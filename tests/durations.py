"""How long tests take, in `.ci/durations.json`: by it ``.ci/night`` divides rooms into parts.

``RECSHARD_DURATIONS=TIER pytest ...`` records a run. TIER is ``pytest``, ``gate`` or ``night``.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / ".ci/durations.json"
TIERS = ("pytest", "gate", "night")
SLOWEST = 20


def read() -> dict[str, Any]:
    """Tier -> ``files``: file -> seconds of its tests, and ``slowest``: the slowest tests -> seconds."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def record(reports: list[Any], tier: str) -> None:
    """Adds a run's files to the file. Files of earlier runs stay, unless they are gone."""
    if tier not in TIERS:
        raise ValueError(f"RECSHARD_DURATIONS={tier!r} is not a tier. Fix: use one of {', '.join(TIERS)}.")
    files, tests = Counter[str](), Counter[str]()
    for report in reports:
        files[report.nodeid.partition("::")[0]] += report.duration
        tests[report.nodeid] += report.duration
    known = read()
    before = known.get(tier, {"files": {}, "slowest": {}})
    all_files = {name: s for name, s in before["files"].items() if (FILE.parents[1] / name).exists()} | files
    kept = {test: s for test, s in before["slowest"].items() if test.partition("::")[0] not in files}
    slowest = Counter(kept | tests).most_common(SLOWEST)
    known[tier] = {
        "files": {name: round(all_files[name], 1) for name in sorted(all_files)},
        "slowest": {test: round(seconds, 1) for test, seconds in slowest},
    }
    FILE.write_text(json.dumps(known, indent=1) + "\n")


def at_the_end(reports: dict[str, list[Any]]) -> None:
    """Records the run if ``RECSHARD_DURATIONS`` names its tier."""
    if tier := os.environ.get("RECSHARD_DURATIONS"):
        record([r for kind in reports.values() for r in kind if hasattr(r, "duration")], tier)
