"""Measures operators and steps on launched ranks and fits the planner's figures to them.

::

    clock.py         how a function on a device is timed
    operators.py     one rank's operators alone: launches, reads, lookups, dense layers, copies
    collectives.py   collectives by size and group
    alone.py         both of these, and the figures that follow
    cases.py         random models and plans; batches.py: their batches
    steps.py         the steps of a case
    predict.py       the planner's predictions of many cases
    fit.py           the figures that make predictions and measurements agree
    calibrating.py   all of these in one call
    drift.py         whether a stored profile still describes the machine
"""

from recshard_lab.calibration.calibrating import Calibration as Calibration
from recshard_lab.calibration.calibrating import calibrate as calibrate
from recshard_lab.calibration.drift import Drift as Drift
from recshard_lab.calibration.drift import check as check
