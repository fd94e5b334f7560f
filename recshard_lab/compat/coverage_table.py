"""Which of TorchRec's public names are served, module by module."""

from __future__ import annotations

from dataclasses import dataclass

from recshard_lab.compat.not_served import explain
from recshard_lab.compat.served import served_modules
from recshard_lab.compat.torchrec_names import PUBLIC


@dataclass(frozen=True)
class ModuleCoverage:
    """One module of TorchRec.

    Args:
        module: its name.
        served: its public names that are served.
        missing: its other public names.
    """

    module: str
    served: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def share(self) -> float:
        """The share of its names that is served. 1 if it has no names."""
        every = len(self.served) + len(self.missing)
        return len(self.served) / every if every else 1.0


def coverage() -> list[ModuleCoverage]:
    """All modules of TorchRec, in its order.

    >>> coverage()[0].module
    'torchrec'
    """
    found = []
    for module, text in PUBLIC.items():
        names, ours = text.split(), served_modules().get(module, {})
        found.append(
            ModuleCoverage(
                module, tuple(name for name in names if name in ours), tuple(name for name in names if name not in ours)
            )
        )
    return found


def report(missing: bool = True) -> str:
    """Coverage as a text table, and the nearest name here for each name that is not served.

    Args:
        missing: whether to list the names that are not served.
    """
    modules = coverage()
    width = max(len(entry.module) for entry in modules)
    lines = [
        f"{entry.module:{width}}  {len(entry.served):3d} of {len(entry.served) + len(entry.missing):3d}  "
        f"{entry.share:4.0%}"
        for entry in modules
    ]
    served = sum(len(entry.served) for entry in modules)
    every = served + sum(len(entry.missing) for entry in modules)
    lines.append(f"{'TorchRec 1.8, public names':{width}}  {served:3d} of {every:3d}  {served / every:4.0%}")
    if missing:
        lines += ["", "Not served:"]
        lines += [
            explain(f"{m.module}.{name}").removeprefix("recshard_lab does not serve ")
            for m in modules
            for name in m.missing
        ]
    return "\n".join(lines)
