"""One reference page for each room, written from the room's public names. A name is described on one page only."""

import importlib
import inspect
from pathlib import Path
from types import ModuleType

# room -> heading. The first room of a name describes it.
ROOMS = {
    "recshard_lab.sparse": "Jagged tensors",
    "recshard_lab.embedding": "Embedding tables and collections",
    "recshard_lab.optim": "Optimizers",
    "recshard_lab.models": "Models",
    "recshard_lab.data": "Data",
    "recshard_lab.sharding": "Plans, schemes, topologies",
    "recshard_lab.planner": "Planner",
    "recshard_lab.comm": "Groups, collectives, codecs",
    "recshard_lab.distributed": "Sharded models and checkpoints",
    "recshard_lab.train": "Training: loops, pipelines, metrics, runs",
    "recshard_lab.serving": "Serving",
    "recshard_lab.launcher": "Ranks",
    "recshard_lab.calibration": "Calibration",
    "recshard_lab.lab": "Lab: comparisons, views, widgets",
    "recshard_lab.compat": "TorchRec's names",
}
ROOT_NAMES = "recshard_lab"


def public_names(room: str) -> list[str]:
    """The names that a room exports: ``__all__``, or what its ``__init__`` imports under the same name."""
    module = importlib.import_module(room)
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    found = []
    for name in sorted(set(names)):
        value = getattr(module, name)
        if not isinstance(value, ModuleType) and (getattr(value, "__module__", None) or "").startswith(ROOT_NAMES):
            found.append(name)
    return found


def described() -> dict[str, dict[str, str]]:
    """room -> name -> the room that describes it, which may be an earlier one."""
    first: dict[int, str] = {}
    pages: dict[str, dict[str, str]] = {}
    for room in ROOMS:
        module = importlib.import_module(room)
        pages[room] = {name: first.setdefault(id(getattr(module, name)), room) for name in public_names(room)}
    return pages


def write_pages(folder: Path) -> None:
    """Writes ``ROOM.rst`` for each room."""
    folder.mkdir(exist_ok=True)
    pages = described()
    for room, names in pages.items():
        module = importlib.import_module(room)
        title = f"{room}: {ROOMS[room]}"
        lines = [title, "=" * len(title), ""]
        own = [name for name, home in names.items() if home == room]
        elsewhere = [f":py:obj:`~{home}.{name}`" for name, home in names.items() if home != room]
        if elsewhere:
            lines += ["Also exported here: " + ", ".join(elsewhere) + ".", ""]
        for name in own:
            lines += [*_directive(room, name, getattr(module, name)), ""]
        _write(folder / f"{room.rpartition('.')[2]}.rst", lines)
    _write(folder / "root.rst", _root_page(pages))


def _directive(room: str, name: str, value: object) -> list[str]:
    if inspect.isclass(value):
        return [f".. autoclass:: {room}.{name}", "   :members:", "   :show-inheritance:"]
    return [f".. {'autofunction' if callable(value) else 'autodata'}:: {room}.{name}"]


def _root_page(pages: dict[str, dict[str, str]]) -> list[str]:
    module = importlib.import_module(ROOT_NAMES)
    homes = {
        id(getattr(importlib.import_module(room), name)): f"{room}.{name}" for room in pages for name in pages[room]
    }
    rows = []
    for name in public_names(ROOT_NAMES):
        home = homes.get(id(getattr(module, name)))
        if home is not None:
            room = next(room for room, names in pages.items() if names.get(name) == room)
            rows.append(f"   * - :py:obj:`rs.{name} <{room}.{name}>`\n     - ``{room}``")
    title = "recshard_lab: names of every day"
    table = [".. list-table::", "   :header-rows: 1", "", "   * - name", "     - described with", *rows]
    return [title, "=" * len(title), "", "``import recshard_lab as rs`` gives these names.", "", *table, ""]


def _write(file: Path, lines: list[str]) -> None:
    text = "\n".join(lines)
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
