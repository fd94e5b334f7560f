"""``recshard selftest``: what works on this machine, on its CPU and its GPUs, as a report for an issue.

::

    report.py      Result, Report: Markdown and JSON, and the facts of the machine
    checks.py      the checks, in order; each is a function that raises where something is wrong
    on_ranks.py    what the ranks run for them
    full.py        the checks of --full: every scheme, optimizer and codec; full_on_ranks.py is what ranks run for them
    checkout.py    what only a checkout of the repository can run: tests and notebooks
"""

from recshard_lab.selftest.checks import run_checks as run_checks
from recshard_lab.selftest.report import Report as Report
from recshard_lab.selftest.report import Result as Result

__all__ = ["Report", "Result", "run_checks"]
