"""Notices that a machine no longer has the speed that its device profile was measured with.

A profile stores the milliseconds of operators that were timed alone, and of the reference step (`steps.reference`).
`check` times them again, which takes a few seconds, and compares. Operators of one name at several sizes count as their
geometric mean. A new driver, other clocks, a busy machine or another kernel change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log1p
from typing import Any

import numpy as np

from recshard_lab.arguments import checks_arguments
from recshard_lab.calibration.alone import time_alone
from recshard_lab.calibration.calibrating import REFERENCE, check_ranks, machine
from recshard_lab.calibration.clock import TimedOperator, by_op
from recshard_lab.calibration.load import OtherLoad, load_warning
from recshard_lab.calibration.steps import reference, time_cases, usual_ms
from recshard_lab.sharding.hardware.device_profile import DeviceProfile
from recshard_lab.text_table import Printable, TextTable

THRESHOLD = 0.25
ROUNDS = 3  # of the reference step
FACTS = ("processor", "cores", "device", "driver", "torch", "backend", "nccl")  # a change of these is reported


@dataclass(frozen=True)
class Moved:
    """One operator, when the profile was measured and now.

    Attributes:
        op: name of the operator.
        ratio: its time now divided by its time in the profile, geometric mean over sizes.
        moved: whether ``ratio`` is above ``1 + threshold`` or below ``1 / (1 + threshold)``.
    """

    op: str
    ratio: float
    moved: bool


@checks_arguments
@dataclass(frozen=True, eq=False)
class Drift(Printable):
    """The result of `check`.

    Attributes:
        rows: the operators of the profile.
        date: of the profile.
        changed: facts of the machine that differ from the profile's, as "torch 2.13.0 -> 2.14.0".
        other_load: share of the cores that other programs used during the check, 0 to 1.
    """

    rows: tuple[Moved, ...]
    date: str
    changed: tuple[str, ...] = ()
    other_load: float = 0.0

    @property
    def moved(self) -> tuple[str, ...]:
        """The operators whose time moved."""
        return tuple(row.op for row in self.rows if row.moved)

    def parts(self) -> list[str | TextTable]:
        table = TextTable(
            ("operator", f"time now / on {self.date:.10}", ""),
            [(row.op, f"{row.ratio:.2f}x", "moved" * row.moved) for row in self.rows],
            right=(1,),
        )
        count = len(self.moved)
        verdict = (
            f"{count} of {len(self.rows)} operators moved: the profile does not describe this machine as it is now. "
            f"Fix: calibrate again on a quiet machine (recshard calibrate --out FILE)."
        )
        notes = [*(f"Changed: {fact}." for fact in self.changed), load_warning(self.other_load)]
        return [table, *(note for note in notes if note), verdict if count else "No operator moved."]


def check(ranks: Any, profile: DeviceProfile, threshold: float = THRESHOLD) -> Drift:
    """Times the operators of a profile again and compares.

    Args:
        ranks: as many launched ranks as the profile has, on the same kind of device.
        profile: from `calibrate`.
        threshold: relative change of a time from which an operator counts as moved; 0.25 is 25%.

    Raises:
        ValueError: other ranks than the profile's, a profile without operators, a threshold that is not positive.
    """
    check_ranks(ranks)
    kind = "cpu" if ranks.devices[0].type == "cpu" else "cuda"
    devices = ", devices='cpu'" if profile.compute_device == "cpu" else ""
    if (ranks.world_size, kind) != (profile.world_size, profile.compute_device):
        raise ValueError(
            f"the profile has {profile.world_size} {profile.compute_device} ranks, but {ranks.world_size} {kind} ranks "
            f"are launched. Fix: launch({profile.world_size}{devices})"
        )
    if not threshold > 0:
        raise ValueError(f"threshold must be positive, got {threshold!r}. Fix: threshold={THRESHOLD}")
    if not profile.operators:
        raise ValueError("the profile has no operators to time again. Fix: calibrate again")
    stored = [TimedOperator(one["op"], tuple(one["sizes"]), one["ms"]) for one in profile.operators]
    load = OtherLoad(ranks)
    now = time_alone(ranks, short=True)
    step = [time_cases(ranks, [reference(ranks.world_size)], turns=5)[0] for _ in range(ROUNDS)]
    now.append(TimedOperator(REFERENCE, (), usual_ms(step)))
    facts = ranks.run(machine)[0]
    changed = [
        f"{name} {profile.machine[name]} -> {facts[name]}"
        for name in FACTS
        if name in profile.machine and name in facts and profile.machine[name] != facts[name]
    ]
    return Drift(compared(stored, now, threshold), profile.date, tuple(changed), load.share())


def compared(stored: Sequence[TimedOperator], now: Sequence[TimedOperator], threshold: float) -> tuple[Moved, ...]:
    """One row for each operator that both lists have at equal sizes.

    >>> then, now = TimedOperator("read", (1,), 0.5), TimedOperator("read", (1,), 1.0)
    >>> compared([then], [now], 0.25)
    (Moved(op='read', ratio=2.0, moved=True),)
    """
    ms = {(one.op, one.sizes): one.ms for one in stored}
    rows: list[Moved] = []
    for op, timed in by_op(now).items():
        logs = [np.log(one.ms / ms[op, one.sizes]) for one in timed if (op, one.sizes) in ms]
        if logs:
            mean = float(np.mean(logs))
            rows.append(Moved(op, float(np.exp(mean)), abs(mean) > log1p(threshold)))
    return tuple(rows)
