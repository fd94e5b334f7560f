"""Measures what steps cost on launched ranks and fits the planner's figures to it.

Read `cases.py` first (what is run), then `steps.py` (how it is timed), `fit.py`, and `calibrating.py`, which does all
of it. `held_out.py` tells how right the predictions are.
"""

from recshard_lab.calibration.calibrating import Calibration as Calibration
from recshard_lab.calibration.calibrating import calibrate as calibrate
