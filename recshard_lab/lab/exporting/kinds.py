"""The kinds of file that an export can be, and what writes each. A new kind is an entry of `KINDS`."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

from recshard_lab.lab.draw.sheet import png_of, sheet
from recshard_lab.lab.draw.svg import standalone
from recshard_lab.lab.exporting.assumptions import versions
from recshard_lab.lab.exporting.exportable import Exportable
from recshard_lab.lab.exporting.report import Attachment, Code, Part, Section, report_text
from recshard_lab.sharding.export.script import shell_of


@dataclass(frozen=True)
class Options:
    """What may be said of an export beside what and where.

    Args:
        plan: which of several plans goes into a file that holds one.
        plotly: of a page, see `write_report`.
        theme: of a PNG, "light" or "dark".
        scale: of a PNG, its pixels for one of the picture's.
        model: of a script, see `ShardingPlan.to_script`.
    """

    plan: str = ""
    plotly: str = "embed"
    theme: str = "light"
    scale: float = 2.0
    model: str | None = None


def page_of(found: Exportable, plotly: str = "embed") -> str:
    """The page of an export: what it shows, the Python that makes it, its plans as files inside it, the versions.

    Raises:
        ValueError: more than 3 MB.
    """
    sections = [each for each in found.sections if each.parts]
    if found.python:
        sections.append(Section("The Python that makes it", [Code(found.python)]))
    files: list[Part] = []
    for name, each in found.stems.items():
        assert each.plan is not None
        files.append(Attachment(f"{name}.json", each.plan.to_json(), f"{each.name}, for ShardingPlan.from_json"))
    if files:
        sections.append(Section("Downloads", files))
    return report_text(
        found.title,
        sections,
        subtitle=found.subtitle,
        note=f"{found.note} {versions(plotly)}".strip(),
        plotly=plotly,
    )


def kind_of(path: Path) -> str:
    """The kind of file that a path asks for: one of `KINDS`, or "folder".

    Raises:
        ValueError: another suffix.

    >>> kind_of(Path("plans.html")), kind_of(Path("everything"))
    ('html', 'folder')
    """
    suffix = path.suffix.lower().lstrip(".")
    if not suffix or path.is_dir():
        return "folder"
    if suffix not in KINDS:
        known = ", ".join(f".{name} ({kind.about})" for name, kind in KINDS.items())
        raise ValueError(f"{path.name}: .{suffix} is no kind of file that is written. There are: {known}, and a folder")
    return suffix


def kinds_for(found: Exportable) -> list[str]:
    """The kinds of file that something can be exported as."""
    has = {"picture": any(found.pictures.values()), "plan": bool(found.planned), "": True}
    return [name for name, kind in KINDS.items() if has[kind.needs]]


@dataclass(frozen=True)
class Kind:
    """A kind of file: what it is, what a thing must have for it, and what writes it."""

    about: str
    needs: str
    write: Callable[[Exportable, Options], bytes]


def _html(found: Exportable, options: Options) -> bytes:
    return page_of(found, options.plotly).encode()


def _svg(found: Exportable, options: Options) -> bytes:
    return f"{standalone(str(sheet(found.pictures, found.title)))}\n".encode()


def _png(found: Exportable, options: Options) -> bytes:
    return png_of(sheet(found.pictures, found.title), options.theme, options.scale)


def _json(found: Exportable, options: Options) -> bytes:
    plan = found.candidate(options.plan).plan
    assert plan is not None
    return f"{plan.to_json(indent=2)}\n".encode()


def _py(found: Exportable, options: Options) -> bytes:
    return found.candidate(options.plan).script(options.model).encode()


def _sh(found: Exportable, options: Options) -> bytes:
    candidate = found.candidate(options.plan)
    topology = candidate.topology
    return shell_of(candidate.script(options.model), topology.world_size, topology.local_world_size).encode()


def _zip(found: Exportable, options: Options) -> bytes:
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in everything(found, options).items():
            archive.writestr(f"{found.stem}/{name}", data)
    return packed.getvalue()


def everything(found: Exportable, options: Options) -> dict[str, bytes]:
    """File name -> bytes of every kind; ``about.txt`` says what each is, and why one is not there."""
    made: dict[str, bytes] = {}
    told: list[str] = []
    able = kinds_for(found)
    wanted = [(f"{found.stem}.{kind}", kind, options) for kind in able if KINDS[kind].needs != "plan" and kind != "zip"]
    for stem, each in found.stems.items():
        wanted += [(f"{stem}.{kind}", kind, replace(options, plan=each.name)) for kind in ("json", "py", "sh")]
    for name, kind, own in wanted:
        try:
            made[name] = KINDS[kind].write(found, own)
            told.append(f"{name}: {KINDS[kind].about}")
        except (ValueError, ImportError) as error:
            told.append(f"{name} is not here: {error}")
    made["about.txt"] = "\n".join([found.title, "", *told, "", versions(options.plotly), ""]).encode()
    return made


KINDS: dict[str, Kind] = {
    "html": Kind("a page", "", _html),
    "svg": Kind("a picture", "picture", _svg),
    "png": Kind("a picture in pixels", "picture", _png),
    "json": Kind("a plan", "plan", _json),
    "py": Kind("a script for torchrun", "plan", _py),
    "sh": Kind("the same, run by the shell", "plan", _sh),
    "zip": Kind("all of them", "", _zip),
}
