"""RanksPanel: shows state, memory and output of the launched ranks, with buttons to interrupt, restart and stop them.

Separate threads read the ranks, so the panel also updates while a cell runs. Its buttons work then too, with an
ipykernel that has subshells (7.0.1 and later). With an older one, JupyterLab's stop button interrupts a running cell.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from html import escape
from time import monotonic, strftime
from typing import TYPE_CHECKING, Any

import ipywidgets as ipw

from recshard_lab.lab.draw.theme import MEMORY, bytes_text
from recshard_lab.lab.exporting.exportable import Exportable
from recshard_lab.lab.exporting.report import Code, Part, Section
from recshard_lab.lab.live.ranks_gone import lost_text
from recshard_lab.lab.views.registry import reason
from recshard_lab.lab.widgets import controls, page
from recshard_lab.lab.widgets.base import LabWidget
from recshard_lab.lab.widgets.export_control import ExportControl, Exports
from recshard_lab.launcher import LaunchError, current
from recshard_lab.launcher.world import named
from recshard_lab.planner.answers.text import ranks_word
from recshard_lab.text_table import TextTable

if TYPE_CHECKING:
    from recshard_lab.launcher.device_memory import RankMemory

LINES = 12  # of output shown
MEASURE_S = 1.0  # between two measurements of memory, each of which takes a rank 10 ms
MODULES_S = 5.0  # for which a running rank reuses its list of modules
CONFIRM_S = 15.0  # seconds within which a second click confirms the first
_SIGNS = {"idle": "○", "running": "●"}
_SOURCES = {
    "allocator": "Memory: tensors on the GPU, from torch's allocator.",
    "counted": "Memory: all tensors of a rank, counted as on a GPU with this capacity.",
    "process": "Memory: the rank's share of the host's memory (PSS), with Python and its libraries.",
}

STYLE = """<style>
.recshard-ranks table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.recshard-ranks th,.recshard-ranks td{padding:2px 14px 2px 0;text-align:left;white-space:nowrap;min-width:62px;
 color:var(--jp-ui-font-color1,inherit)}
.recshard-ranks th{font-weight:600;border-bottom:1px solid var(--jp-border-color1,#c4c9d0)}
.recshard-ranks .rs-wide{overflow-x:auto}
.recshard-ranks .rs-bar span{display:inline-block;height:11px;vertical-align:middle;box-sizing:border-box;
 border-right:1px solid #1b1f24}
.recshard-ranks .rs-alert{border-left:4px solid #d9480f;padding:4px 10px;line-height:1.4;white-space:pre-wrap;
 overflow-wrap:anywhere}
.recshard-ranks .widget-html,.recshard-ranks .widget-html-content{min-width:0;max-width:100%}
.recshard-ranks .widget-html-content{white-space:normal;line-height:1.4;width:100%}
.recshard-ranks pre{margin:4px 0 0;padding:6px 10px;max-height:230px;overflow:auto;line-height:1.35;
 color:var(--jp-content-font-color1,inherit);background:var(--jp-cell-editor-background,transparent);
 border:1px solid var(--jp-border-color2,#d8dce1)}
</style>"""

PYTHON = (
    "from recshard_lab.launcher import current\n"
    "ranks = current()\n"
    "ranks.status()     # process and state of each rank\n"
    "ranks.memory()     # bytes by use, now and at the peak; reset_peak=True: the peak counts anew\n"
    "ranks.output()     # the last lines they printed\n"
    "ranks.interrupt()  # what runs ends, variables stay\n"
    "ranks.restart()    # fresh ranks, variables gone\n"
    "ranks.stop()"
)


class RanksPanel(Exports, LabWidget):
    """Shows the ranks that are running, whichever they are, twice a second.

    Args:
        every_s: seconds between two looks.

    Raises:
        ValueError: `every_s` is not positive.
    """

    def __init__(self, every_s: float = 0.5) -> None:
        self._over = threading.Event()  # first, for `close` is called of a panel that was refused too
        if not every_s > 0:
            raise ValueError(f"every_s must be positive, got {every_s!r}")
        self.every_s = every_s
        self._measured: tuple[list[int], list[RankMemory]] = ([], [])  # process ids, and the memory of these ranks
        self._working: threading.Thread | None = None
        self._asked: ipw.Button | None = None  # the button whose second click loses variables
        self._asked_until = 0.0
        self.table, self.printed, self.told = controls.wide_html(), controls.wide_html(), ipw.HTML()
        # The widget is the stop of Tab, not a part of its value: new figures would take the focus away.
        self.table.tabbable, self.table.tooltip = True, "state and memory of the ranks"
        self.table.add_class("rs-wide")
        self.interrupt_button = self._button(
            "Interrupt", "stop", "what runs on the ranks ends; variables stay", _interrupt
        )
        hint = "replaces the ranks by fresh ones of the same shape; their variables are lost"
        self.restart_button = self._button("Restart", "refresh", hint, _restart, loses=True)
        self.stop_button = self._button(
            "Stop", "power-off", "ends every rank; their variables are lost", _stop, loses=True
        )
        buttons = controls.row([self.interrupt_button, self.restart_button, self.stop_button, self.told])
        code = f"<details><summary>The same in Python</summary><pre>{escape(PYTHON)}</pre></details>"
        self.exports = ExportControl(self, "ranks", kinds=("html",))
        foot = controls.foot(self.exports, ipw.HTML(code))
        super().__init__([ipw.HTML(STYLE), self.table, buttons, self.printed, foot])
        self.add_class("recshard-ranks")
        self.refresh()
        self._watch = threading.Thread(target=self._look, name="recshard-ranks-panel", daemon=True)
        self._watch.start()
        self._gauge = threading.Thread(target=self._measure, name="recshard-ranks-memory", daemon=True)
        self._gauge.start()

    def refresh(self) -> None:
        """Looks once, now."""
        ranks = current()
        states = [] if ranks is None else ranks.status()
        self._set(self.table, _table(ranks, states, self._memory_of(ranks, states)))
        lines = [] if ranks is None else ranks.output(LINES)
        self._set(
            self.printed, f"<pre aria-label='output of the ranks'>{escape(chr(10).join(lines))}</pre>" if lines else ""
        )
        idle = self._working is None or not self._working.is_alive()
        self.interrupt_button.disabled = not any(one.state == "running" for one in states)
        self.restart_button.disabled = self.stop_button.disabled = ranks is None or not idle
        if self._asked is not None and monotonic() > self._asked_until:
            self._forget_question()
            self._set(self.told, "")

    def exportable(self) -> Exportable:
        """The ranks as they are now, and what they printed last, for `export`."""
        ranks = current()
        states = [] if ranks is None else ranks.status()
        told: list[Part] = ["No ranks are running."]
        if ranks is not None and states:
            memory = self._memory_of(ranks, states)
            heads, rows = _columns(ranks, states, memory)
            told = [TextTable(tuple(heads), rows), *_notes(memory)]
        lines = [] if ranks is None else ranks.output(10 * LINES)
        sections = [
            Section("Ranks", told),
            *([Section("What they printed last", [Code("\n".join(lines))])] if lines else []),
        ]
        about = "No ranks are running." if ranks is None else repr(ranks)[1:-1]
        return Exportable("Ranks", sections, f"{about}, {strftime('%Y-%m-%d %H:%M:%S')}", python=PYTHON)

    def _memory_of(self, ranks: Any, states: list[Any]) -> list[RankMemory]:
        """The last measurement, if it is of these ranks and all of them run."""
        measured, memory = self._measured
        return memory if ranks is not None and ranks.usable and measured == [one.pid for one in states] else []

    def _measure(self) -> None:
        while not self._over.wait(MEASURE_S):
            ranks = current()
            try:
                if ranks is not None:
                    busy = any(one.state == "running" for one in ranks.status())
                    self._measured = ranks.pids, ranks.memory(max_age_s=MODULES_S if busy else 0.0)
            except LaunchError:  # the ranks end, or one is in a call that lets no other thread run
                continue

    def close(self) -> None:
        """Stops looking and takes the panel off the page; the ranks go on."""
        self._over.set()
        super().close()

    def _look(self) -> None:
        while not self._over.wait(self.every_s):
            try:
                self.refresh()
            except Exception as error:  # the next look may succeed: ranks may be stopping
                self._set(self.told, page.alert(reason(error)))

    def _button(
        self, label: str, icon: str, hint: str, action: Callable[[Any], str], loses: bool = False
    ) -> ipw.Button:
        """A button that runs `action`; with `loses`, on the second click if the ranks hold variables."""
        button = ipw.Button(description=label, icon=icon, tooltip=hint, layout=ipw.Layout(width="120px"))
        button.on_click(lambda _: None if loses and self._questioned(button) else self._act(action))
        return button

    def _questioned(self, button: ipw.Button) -> bool:
        """Whether this click only asks whether the variables may be lost."""
        ranks, confirmed = current(), self._asked is button and monotonic() <= self._asked_until
        self._forget_question()
        if confirmed or ranks is None or not ranks.variables:
            return False
        self._asked, self._asked_until = button, monotonic() + CONFIRM_S
        button.button_style = "danger"
        name = button.description
        count = len(ranks.variables)
        lost = f"{name} loses {count} variable{'s' * (count > 1)} on the ranks: {named(ranks.variables)}."
        self._set(self.told, page.alert(f"{lost} Click {name} again within {CONFIRM_S:.0f} s to go on."))
        return True

    def _forget_question(self) -> None:
        if self._asked is not None:
            self._asked.button_style = ""
            self._asked = None

    def _act(self, action: Callable[[Any], str]) -> None:
        """Runs an action in a thread, because a restart takes longer than a blink."""
        self._forget_question()
        if self._working is not None and self._working.is_alive():
            return

        def work() -> None:
            try:
                ranks = current()
                if ranks is None:
                    raise LaunchError("no ranks are running. Start some in a cell: %recshard_launch -n 4")
                self._set(self.told, page.note(action(ranks)))
            except Exception as error:
                self._set(self.told, page.alert(reason(error)))

        self._set(self.told, page.note("…"))
        self._working = threading.Thread(target=work, name="recshard-ranks-panel-work", daemon=True)
        self._working.start()

    @staticmethod
    def _set(html: ipw.HTML, value: str) -> None:
        """Sends a value to the page if it changed."""
        if html.value != value:
            html.value = value

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and for pages without a kernel the table as it stood."""
        bundle = super()._repr_mimebundle_(**kwargs) or {}
        ranks = current()
        plain = [repr(ranks)[1:-1] if ranks else "no ranks are running"]
        plain += [f"[{r.rank}] {r.state}, {bytes_text(r.memory_bytes)}" for r in (ranks.status() if ranks else [])]
        return {**bundle, "text/html": self.table.value, "text/plain": "\n".join(plain)}


def _interrupt(ranks: Any) -> str:
    return "The ranks were interrupted. Their variables are kept." if ranks.interrupt() else "The ranks are idle."


def _restart(ranks: Any) -> str:
    lost = lost_text(ranks.variables)
    ranks.restart()
    return f"Fresh ranks, ready in {ranks.launch_s:.2f} s.{lost}"


def _stop(ranks: Any) -> str:
    lost = lost_text(ranks.variables)
    ranks.stop()
    return f"The ranks are stopped.{lost}"


def _table(ranks: Any, states: list[Any], memory: list[RankMemory]) -> str:
    """One row per rank: state by sign and word, device memory by use in numbers and as a bar."""
    if ranks is None:
        return '<div role="status">No ranks are running. Start some in a cell: <code>%recshard_launch -n 4</code></div>'
    heads, rows = _columns(ranks, states, memory)
    parts = [one.parts for one in memory]
    most = max((one.capacity or sum(part.values()) for one, part in zip(memory, parts, strict=True)), default=0) or 1
    body = ""
    for one, cells in zip(states, rows, strict=True):
        bar = "".join(
            f'<span title="{MEMORY[name].label}: {bytes_text(size)}" '
            f'style="width:{160 * size / most:.1f}px;background:{MEMORY[name].fill}"></span>'
            for name, size in (parts[one.rank] if memory else {}).items()
            if size
        )
        body += f'<tr data-rank="{one.rank}" data-state="{escape(one.state)}">'
        body += "".join(f"<td>{escape(cell)}</td>" for cell in cells) + f'<td class="rs-bar">{bar}</td></tr>'
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in [*heads, "at the peak"])
    notes = "".join(f"<div>{escape(line)}</div>" for line in [*_notes(memory), ranks.times_note] if line)
    caption = escape(repr(ranks)[1:-1])
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div>{caption}</div>{table}{notes}"


def _columns(ranks: Any, states: list[Any], memory: list[RankMemory]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the table, in words. Memory has a column for each use that any rank has."""
    parts = [one.parts for one in memory]
    used = [name for name in (parts[0] if parts else ()) if any(part[name] for part in parts)]
    limited = any(one.capacity for one in memory)
    on_gpus = any(one.device != "cpu" for one in states)
    heads = ["rank", *(["node"] if ranks.nodes > 1 else []), "process", "state", *(["device"] if on_gpus else [])]
    heads += ["in use", "peak", *(["capacity"] if limited else []), *(MEMORY[name].label for name in used)]
    rows = []
    for one in states:
        row = [str(one.rank), *([str(one.node)] if ranks.nodes > 1 else []), str(one.pid)]
        row += [f"{_SIGNS.get(one.state, '✗')} {one.state}", *([one.device] if on_gpus else [])]
        if memory:
            held, part = memory[one.rank], parts[one.rank]
            row += [bytes_text(held.in_use), "" if held.peak is None else bytes_text(held.peak)]
            row += [bytes_text(held.capacity or 0)] if limited else []
            row += [bytes_text(part[name]) for name in used]
        else:
            row += [bytes_text(one.memory_bytes) if one.memory_bytes else "", ""]
        rows.append(row)
    return heads, rows


def _notes(memory: list[RankMemory]) -> list[str]:
    """Where the figures come from, and what each GPU holds beside the ranks' tensors."""
    lines = [_SOURCES[source] for source in dict.fromkeys(one.source for one in memory)]
    for gpu in dict.fromkeys(one.gpu for one in memory if one.gpu):
        there = [one for one in memory if one.gpu == gpu]
        held = there[0]
        lines.append(
            f"{held.device}: {bytes_text(held.gpu_used)} of {bytes_text(held.gpu_total)} in use, of which "
            f"{bytes_text(held.gpu_rest)} outside the allocators of {ranks_word([one.rank for one in there])}: CUDA "
            "contexts, NCCL, CUDA graphs, other programs."
        )
        for one in there:
            if one.process is not None:
                lines.append(f"Rank {one.rank}'s process uses {bytes_text(one.process)} of {one.device}.")
    return lines
