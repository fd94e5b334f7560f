"""What `import recshard_lab` costs beyond `import torch`."""

from __future__ import annotations

from statistics import median

from benchmarks import Figure, seconds_in_new_python

ROUNDS = 7
_BEYOND_S = "import recshard_lab beyond import torch"
TARGETS = {_BEYOND_S: 0.3}
_TORCH = "import time; begun = time.perf_counter(); import torch; print(time.perf_counter() - begun)"
_BEYOND = "import time, torch; begun = time.perf_counter(); import recshard_lab; print(time.perf_counter() - begun)"
_EVERY_NAME = (
    "import time, torch; begun = time.perf_counter(); import recshard_lab; "
    "[getattr(recshard_lab, name) for name in recshard_lab.__all__ if name != 'PlanCompare']; "
    "print(time.perf_counter() - begun)"
)


def figures() -> list[Figure]:
    """Medians over fresh interpreters, which import torch before the clock starts."""
    seconds_in_new_python(_BEYOND)  # writes the bytecode caches
    return [
        Figure(_BEYOND_S, _median(_BEYOND, ROUNDS), "s"),
        Figure("import torch alone", _median(_TORCH, 3), "s"),
        Figure("every public name but the widget, torch imported", _median(_EVERY_NAME, 3), "s"),
    ]


def _median(code: str, rounds: int) -> float:
    return median(seconds_in_new_python(code) for _ in range(rounds))
