"""The results of a calibration as a file: figures of a `Topology`, and where, when and how they were measured.

A file is one JSON object: ``format`` and ``version``, then every field of `DeviceProfile`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from recshard_lab.arguments import checks_arguments, names_wrong_arguments
from recshard_lab.documents import json_content, read_text, with_fix
from recshard_lab.sharding.hardware.topology import DEVICE_DEFAULTS, Topology

FORMAT, VERSION = "recshard_lab device profile", 4
PER_OPTIMIZER = ("update_cost", "update_id_ns", "update_number_ns")


@checks_arguments
@dataclass(frozen=True)
class DeviceProfile:
    """A calibrated machine.

    Args:
        world_size, local_world_size: number of measured ranks, and ranks per host.
        compute_device: "cpu" or "cuda".
        cores_per_host: cores that the ranks shared.
        figures: argument of `Topology` -> value; for `PER_OPTIMIZER`, optimizer -> value.
        spread: figure -> uncertainty as a factor, up or down.
        machine: processor, system, versions of Python and torch, the ranks' backend; of GPUs also device, driver, CUDA.
        date: start, ISO 8601. seconds: duration.
        kernels: optimizer -> lookup kernels in use.
        operators: operators that were timed alone: op, sizes, ms. `calibration.drift` times them again.
        cases: number of fitted cases (a model under a plan). error: geometric mean of their errors; 0.1 is 10%.
        other_load: share of the cores that other programs used, from 0 to 1.

    Raises:
        ValueError: a figure that `Topology` does not have, a negative or infinite value, or a size below 1.
    """

    world_size: int
    local_world_size: int
    compute_device: str
    cores_per_host: int
    figures: Mapping[str, Any]
    machine: Mapping[str, str]
    date: str
    seconds: float = 0.0
    spread: Mapping[str, float] = field(default_factory=dict)
    kernels: Mapping[str, Any] = field(default_factory=dict)
    operators: tuple[Mapping[str, Any], ...] = ()
    cases: int = 0
    error: float = 0.0
    other_load: float = 0.0

    def __post_init__(self) -> None:
        for name in ("world_size", "local_world_size", "cores_per_host"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r:.60}")
        defaults = DEVICE_DEFAULTS.get(self.compute_device) if isinstance(self.compute_device, str) else None
        if defaults is None:
            raise ValueError(f"compute_device must be 'cpu' or 'cuda', got {self.compute_device!r:.60}")
        for name in ("figures", "spread", "machine", "kernels"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"{name} must map names to values, got {getattr(self, name)!r:.60}")
        for name in ("seconds", "error", "other_load"):
            _check_number(name, getattr(self, name))
        if not isinstance(self.date, str):
            raise ValueError(f"date must be text, got {self.date!r:.60}")
        for name, value in self.figures.items():
            if name not in defaults:
                raise ValueError(f"unknown figure {name!r:.60}; known: {', '.join(defaults)}")
            if name not in PER_OPTIMIZER:
                _check_number(name, value)
            elif not isinstance(value, Mapping):
                raise ValueError(f"{name} must map optimizers to numbers, got {value!r:.60}")
            else:
                for optimizer, number in value.items():
                    _check_number(f"{name}[{optimizer}]", number)

    @property
    def optimizers(self) -> tuple[str, ...]:
        """The measured optimizers. The planner refuses plans for others."""
        return tuple(self.figures.get("update_cost", ()))

    def topology(self, **figures: Any) -> Topology:
        """The measured topology.

        Args:
            figures: arguments of `Topology` that override the profile's.

        Raises:
            ValueError: other ranks than the measured ones.
        """
        for name, measured in (("world_size", self.world_size), ("local_world_size", self.local_world_size)):
            requested = figures.get(name, measured)
            if not isinstance(requested, int) or requested != measured:
                raise ValueError(
                    f"the profile was measured with {name} {measured}, but {requested!r:.40} is requested: costs "
                    f"between ranks change with their number. Fix: recshard calibrate --ranks {requested!r:.40}, or "
                    f"omit {name}"
                )
        sizes = {name: getattr(self, name) for name in ("world_size", "local_world_size", "compute_device")}
        return Topology(**{**sizes, "cores_per_host": self.cores_per_host, **self.figures, **figures})

    def to_json(self) -> str:
        """This profile as a JSON object."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
        return json.dumps({"format": FORMAT, "version": VERSION, **plain}, indent=1)

    @names_wrong_arguments
    def save(self, path: str | Path) -> None:
        """Writes `to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    @names_wrong_arguments
    def from_json(cls, text: str) -> DeviceProfile:
        """Reads `to_json`.

        Raises:
            ValueError: not JSON, not a profile, a profile of another version, a missing or unknown field.
        """
        try:
            return cls._read(json_content(text, "the device profile"))
        except (ValueError, TypeError) as error:
            raise ValueError(with_fix(error, "calibrate again: recshard calibrate --out FILE")) from None

    @classmethod
    def _read(cls, document: Any) -> DeviceProfile:
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"not a device profile: field 'format' must be {FORMAT!r}")
        if document.get("version") != VERSION:
            raise ValueError(
                f"the device profile has format version {document.get('version')!r:.40}, but this recshard_lab reads "
                f"version {VERSION}. Fix: recshard calibrate --out FILE, which takes a minute."
            )
        values = {name: value for name, value in document.items() if name not in ("format", "version")}
        known = [spec.name for spec in fields(cls)]
        if unknown := [name for name in values if name not in known]:
            raise ValueError(f"the device profile has the field {unknown[0]!r:.40}, unknown in version {VERSION}")
        if missing := [name for name in known if name not in values]:
            raise ValueError(f"the device profile lacks {', '.join(missing)}: it is truncated or was edited")
        if not isinstance(values["operators"], list):
            raise ValueError(f"operators must be a list, got {values['operators']!r:.60}")
        return cls(**{**values, "operators": tuple(values["operators"])})

    @classmethod
    @names_wrong_arguments
    def load(cls, path: str | Path) -> DeviceProfile:
        """Reads a file that `save` wrote.

        Raises:
            ValueError: as `from_json`, with the file's name. OSError: the file does not exist.
        """
        path, text = read_text(path, ())
        try:
            return cls.from_json(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a number that is not negative, got {value!r:.60}")
