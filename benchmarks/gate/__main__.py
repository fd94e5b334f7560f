"""``python -m benchmarks.gate``: check the promised figures, record them, write them into the docs and the README."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from benchmarks import benchmark_named
from benchmarks.gate import GATED, docs
from benchmarks.gate.record import Record, measure
from benchmarks.gate.verdicts import Verdict, judge, write

RECORD = Path(".ci/figures.json")


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, or 1 when a figure is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=__doc__)
    parser.add_argument("--record", type=Path, default=RECORD, help="the committed file of recorded figures")
    what = parser.add_subparsers(dest="what", required=True)
    check = what.add_parser("check", help="measure and compare; exit with 1 when a figure is missed")
    check.add_argument("names", nargs="*", help=f"benchmarks; all of {', '.join(GATED)} when left out")
    check.add_argument("--out", type=Path, default=Path("test-artifacts/figures.json"), help="all figures, as JSON")
    record = what.add_parser("record", help="measure several times and keep the medians")
    record.add_argument("names", nargs="+")
    record.add_argument("--passes", type=int, default=10)
    record.add_argument("--with-torchrec", action="store_true", help="in turn with TorchRec, as train_step needs it")
    pages = what.add_parser("docs", help="write the recorded figures into docs/benchmarks.md and the README")
    pages.add_argument("root", nargs="?", type=Path, default=Path(), help="the checkout")
    asked = parser.parse_args(arguments)
    kept = Record(asked.record)
    if asked.what == "record":
        for name in asked.names:
            kept.add(benchmark_named(name), asked.passes, partial(measure, with_torchrec=asked.with_torchrec))
        return 0
    if asked.what == "docs":
        docs.write(asked.root, kept)
        return 0
    verdicts: list[Verdict] = []
    try:
        for name in asked.names or GATED:
            found = judge(benchmark_named(name), kept.figures(name.replace("-", "_")))
            for verdict in found:
                print(_line(verdict), flush=True)
            verdicts += found
    finally:
        write(asked.out, verdicts)
    return int(any(verdict.missed for verdict in verdicts))


def _line(verdict: Verdict) -> str:
    figure, steps = verdict.figure, ""
    if verdict.steps is not None:
        steps = f"; {verdict.steps:.4g} reference steps, at most {verdict.most:.4g}"
    state = "MISSED" if verdict.missed else "kept"
    return f"{figure.name}: {figure.value:.4g} {figure.unit}, {figure.bound}{steps}. {state}"


if __name__ == "__main__":
    sys.exit(main())
