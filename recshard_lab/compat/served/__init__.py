"""TorchRec's names and their classes here, one file for each of its packages.

Each ``SERVED`` maps a module of TorchRec to {room here: names}. ``Theirs=Ours`` if the names differ. A room that starts
with ``torch`` or ``typing`` is a module of torch or Python. A room ``compat.X`` is an adapter.
"""

from __future__ import annotations

from functools import lru_cache

from recshard_lab.compat.served import (
    datasets,
    distributed,
    inference,
    metrics,
    models,
    modules,
    optim,
    pipelines,
    planner,
    quant,
    sparse,
    tracing,
)

_PACKAGES = (
    sparse, modules, quant, distributed, pipelines, planner, optim, models, metrics, datasets, inference, tracing
)  # fmt: skip


def target_of(module: str, name: str) -> str | None:
    """The target of a name of TorchRec as ``module:name``; None if it is not served.

    >>> target_of("torchrec", "KeyedJaggedTensor")
    'recshard_lab.sparse:KeyedJaggedTensor'
    """
    return served_modules().get(module, {}).get(name)


@lru_cache(maxsize=1)
def served_modules() -> dict[str, dict[str, str]]:
    """Module -> name -> ``module:name``."""
    found: dict[str, dict[str, str]] = {}
    for package in _PACKAGES:
        for module, rooms in package.SERVED.items():
            names = found.setdefault(module, {})
            for room, text in rooms.items():
                home = room if room.partition(".")[0] in ("torch", "typing") else f"recshard_lab.{room}"
                for entry in text.split():
                    theirs, _, ours = entry.partition("=")
                    names[theirs] = f"{home}:{ours or theirs}"
    return found
