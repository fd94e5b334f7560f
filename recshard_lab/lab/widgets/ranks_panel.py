"""RanksPanel: state, memory and output of the launched ranks, with buttons that interrupt, restart and stop them.

Threads read the ranks, so the panel also updates while a cell runs. Its buttons work then too, with an ipykernel that
has subshells (7.0.1 and later). With an older one, JupyterLab's stop button interrupts a running cell.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from time import monotonic, strftime
from typing import TYPE_CHECKING, Any

import ipywidgets as ipw

from recshard_lab.lab.draw.theme import MEMORY, bytes_text, counted
from recshard_lab.lab.exporting.exportable import Exportable
from recshard_lab.lab.exporting.report import Code, Part, Section
from recshard_lab.lab.live.ranks_gone import lost_text
from recshard_lab.lab.widgets import controls, page
from recshard_lab.lab.widgets.base import LabWidget
from recshard_lab.launcher import LaunchError, current
from recshard_lab.launcher.errors import named
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

PYTHON = (
    "from recshard_lab.launcher import current\n"
    "ranks = current()\n"
    "ranks.status()     # process and state of each rank\n"
    "ranks.memory()     # bytes by use, now and at the peak; reset_peak=True resets the peak\n"
    "ranks.output()     # the last lines they printed\n"
    "ranks.interrupt()  # ends running code, variables stay\n"
    "ranks.restart()    # fresh ranks, variables are lost\n"
    "ranks.stop()"
)


class RanksPanel(LabWidget):
    """Shows the running ranks twice a second.

    Args:
        every_s: seconds between two looks.

    Raises:
        ValueError: `every_s` is not positive.
    """

    def __init__(self, every_s: float = 0.5) -> None:
        if not every_s > 0:
            raise ValueError(f"every_s must be positive, got {every_s!r}")
        super().__init__("ranks", "ranks", kinds=("html",))
        self.every_s = every_s
        self._measured: tuple[list[int], list[RankMemory]] = ([], [])  # process ids, and the memory of these ranks
        self._asked: ipw.Button | None = None  # the button whose second click loses variables
        self._asked_until = 0.0
        self.table, self.printed = controls.wide_html("rs-figures"), controls.wide_html()
        # The widget is the stop of Tab, not a part of its value: new figures would take the focus away.
        self.table.tabbable, self.table.tooltip = True, "state and memory of the ranks"
        self.interrupt_button = self._button("Interrupt", "stop", "ends running code; variables stay", _interrupt)
        hint = "replaces the ranks by fresh ones of the same shape; their variables are lost"
        self.restart_button = self._button("Restart", "refresh", hint, _restart, loses=True)
        hint = "ends every rank; their variables are lost"
        self.stop_button = self._button("Stop", "power-off", hint, _stop, loses=True)
        self.code.value = page.code(PYTHON)
        buttons = [self.interrupt_button, self.restart_button, self.stop_button, self.message]
        self.lay_out([self.table, controls.row(buttons), self.printed])
        self.refresh()
        self.worker.every(self.every_s, self._look, "look")
        self.worker.every(MEASURE_S, self._measure, "memory")

    def refresh(self) -> None:
        """Looks once, now."""
        ranks = current()
        states = [] if ranks is None else ranks.status()
        self.table.value = _table(ranks, states, self._memory_of(ranks, states))
        lines = [] if ranks is None else ranks.output(LINES)
        output = f"<pre aria-label='output of the ranks'>{escape(chr(10).join(lines))}</pre>"
        self.printed.value = output if lines else ""
        self.interrupt_button.disabled = not any(one.state == "running" for one in states)
        self.restart_button.disabled = self.stop_button.disabled = ranks is None or self.worker.busy("work")
        if self._asked is not None and monotonic() > self._asked_until:
            self._forget_question()
            self.message.show()

    def exportable(self) -> Exportable:
        """The ranks as they are now, and their last output, for `export`."""
        ranks = current()
        states = [] if ranks is None else ranks.status()
        parts: list[Part] = ["No ranks are running."]
        if ranks is not None and states:
            memory = self._memory_of(ranks, states)
            heads, rows = _columns(ranks, states, memory)
            parts = [TextTable(tuple(heads), rows), *_notes(memory)]
        lines = [] if ranks is None else ranks.output(10 * LINES)
        sections = [
            Section("Ranks", parts),
            *([Section("Last output", [Code("\n".join(lines))])] if lines else []),
        ]
        about = "No ranks are running." if ranks is None else repr(ranks)[1:-1]
        return Exportable("Ranks", sections, f"{about}, {strftime('%Y-%m-%d %H:%M:%S')}", python=PYTHON)

    def _memory_of(self, ranks: Any, states: list[Any]) -> list[RankMemory]:
        """The last measurement, if it is of these ranks and all of them run."""
        measured, memory = self._measured
        return memory if ranks is not None and ranks.usable and measured == [one.pid for one in states] else []

    def _measure(self) -> None:
        ranks = current()
        try:
            if ranks is not None:
                busy = any(one.state == "running" for one in ranks.status())
                self._measured = ranks.pids, ranks.memory(max_age_s=MODULES_S if busy else 0.0)
        except LaunchError:  # the ranks end, or one is in a call that lets no other thread run
            return

    def _look(self) -> None:
        try:
            self.refresh()
        except Exception as error:  # the next look may succeed: ranks may be stopping
            self.message.fail(error)

    def _button(
        self, label: str, icon: str, hint: str, action: Callable[[Any], str], loses: bool = False
    ) -> ipw.Button:
        """A button that runs `action`; with `loses`, on the second click if the ranks have variables."""
        button = controls.button(label, hint, icon, width="120px")
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
        lost = f"{name} loses {counted(len(ranks.variables), 'variable')} on the ranks: {named(ranks.variables)}."
        self.message.fail(f"{lost} Click {name} again within {CONFIRM_S:.0f} s to confirm.")
        return True

    def _forget_question(self) -> None:
        if self._asked is not None:
            self._asked.button_style = ""
            self._asked = None

    def _act(self, action: Callable[[Any], str]) -> None:
        """Runs an action in the background, because a restart takes long."""

        def work() -> str:
            ranks = current()
            if ranks is None:
                raise LaunchError("no ranks are running. Fix: launch them in a cell with %recshard_launch -n 4")
            return action(ranks)

        self._forget_question()
        self.run_in_background(work, "…", "work")

    def static(self) -> tuple[str, str]:
        """The table as it is now, without process ids: they mean nothing on another machine."""
        ranks = current()
        states = [] if ranks is None else ranks.status()
        plain = [repr(ranks)[1:-1] if ranks else "no ranks are running"]
        plain += [f"[{one.rank}] {one.state}, {bytes_text(one.memory_bytes)}" for one in states]
        return _table(ranks, states, self._memory_of(ranks, states), pids=False), "\n".join(plain)


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


def _table(ranks: Any, states: list[Any], memory: list[RankMemory], pids: bool = True) -> str:
    """One row per rank: state by sign and word, device memory by use in numbers and as a bar."""
    if ranks is None:
        return (
            '<div role="status">No ranks are running. Launch them in a cell: <code>%recshard_launch -n 4</code></div>'
        )
    heads, rows = _columns(ranks, states, memory, pids)
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


def _columns(
    ranks: Any, states: list[Any], memory: list[RankMemory], pids: bool = True
) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the table, in words. Memory has a column for each use that any rank has."""
    parts = [one.parts for one in memory]
    used = [name for name in (parts[0] if parts else ()) if any(part[name] for part in parts)]
    limited = any(one.capacity for one in memory)
    on_gpus = any(one.device != "cpu" for one in states)
    heads = [
        "rank",
        *(["node"] if ranks.nodes > 1 else []),
        *(["process"] if pids else []),
        "state",
        *(["device"] if on_gpus else []),
    ]
    heads += ["in use", "peak", *(["capacity"] if limited else []), *(MEMORY[name].label for name in used)]
    rows = []
    for one in states:
        row = [str(one.rank), *([str(one.node)] if ranks.nodes > 1 else []), *([str(one.pid)] if pids else [])]
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
