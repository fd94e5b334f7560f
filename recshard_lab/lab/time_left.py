"""How long a list of jobs will still take, from an estimate for each and from the time that the finished work took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

PACE_PRIOR_S, JOB_PRIOR_S = 5.0, 1.0
"""Seconds of all work, and of the running job, in which estimate and measured pace have equal weight."""


class TimeLeft:
    """Predicts the seconds left of jobs that run one after another.

    Pace is measured over estimated time: 2 means that the work takes twice its estimate. The running job has its own
    pace, because its estimate may be wrong. Later jobs take the pace of everything so far, because other programs may
    use the machine.

    Args:
        estimates: seconds of each job, from a short measurement.
        clock: seconds now.

    >>> now = [0.0]
    >>> left = TimeLeft([10.0, 10.0], clock=lambda: now[0])
    >>> left.at(0, 0.0)
    20.0
    >>> now[0] = 20.0  # the first job took twice its estimate
    >>> 15 < left.at(1, 0.0) < 20
    True
    """

    def __init__(self, estimates: Sequence[float], clock: Callable[[], float] = perf_counter) -> None:
        self.estimates, self.clock = list(estimates), clock
        self._began = self._job_began = clock()

    def share(self, job: int, share: float) -> float:
        """The share of all work that is done, in [0, 1], when `share` of job number `job` is done."""
        return (sum(self.estimates[:job]) + share * self.estimates[job]) / sum(self.estimates)

    def at(self, job: int, share: float) -> float:
        """Seconds left when `share`, in [0, 1], of job number `job` is done."""
        now = self.clock()
        if share == 0.0:
            self._job_began = now  # time before the first step does not count as time of its steps
        estimate = self.estimates[job]
        done = share * estimate
        pace = (now - self._began + PACE_PRIOR_S) / (sum(self.estimates[:job]) + done + PACE_PRIOR_S)
        own_pace = (now - self._job_began + JOB_PRIOR_S * pace) / (done + JOB_PRIOR_S)
        return own_pace * (estimate - done) + pace * sum(self.estimates[job + 1 :])
