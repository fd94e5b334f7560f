"""What `import recshard_lab` costs beyond `import torch`."""

from __future__ import annotations

from statistics import median

from recshard_lab.bench import Figure, seconds_in_new_python

PAIRS = 7
_IMPORT = "import time; begun = time.perf_counter(); import {module}; print(time.perf_counter() - begun)"
_EVERY_NAME = (
    "import time, torch; begun = time.perf_counter(); import recshard_lab; "
    "[getattr(recshard_lab, name) for name in recshard_lab.__all__ if name != 'PlanCompare']; "
    "print(time.perf_counter() - begun)"
)


def figures() -> list[Figure]:
    """Fresh interpreters, alternating, so that a machine that slows down slows down both."""
    torch, ours = (_IMPORT.format(module=module) for module in ("torch", "recshard_lab"))
    seconds_in_new_python(ours)  # writes the bytecode caches
    pairs = [(seconds_in_new_python(torch), seconds_in_new_python(ours)) for _ in range(PAIRS)]
    names = median(seconds_in_new_python(_EVERY_NAME) for _ in range(3))
    return [
        Figure("import recshard_lab beyond import torch", median(b - a for a, b in pairs), "s", target=0.3),
        Figure("import torch alone", median(a for a, _ in pairs), "s"),
        Figure("every public name but the widget, torch imported", names, "s"),
    ]
