"""Memory over time: bytes by category during one step of a rank, where the peak is, and what it consists of."""

from __future__ import annotations

import numpy as np

from recshard_lab.lab.charts import spec
from recshard_lab.lab.draw.theme import MEMORY, WARNING, bytes_text, look_of, ms_text, number, with_notes
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.live.memory_history import MemoryHistory
from recshard_lab.lab.views.registry import register_view
from recshard_lab.text_table import TextTable

MOST_POINTS, NAMED = 300, 3
_SOURCES = {
    "counted": "Counted: the tensors that operators allocate on CPU, and the model's own.",
    "allocator": "From the history of torch's CUDA allocator.",
}


@register_view("Memory over time", place=21)
def memory_over_time(memory_history: MemoryHistory, *, note: str = "", width: int = 860) -> View:
    """Device memory of one rank during a step, by category, with its peak.

    Args:
        memory_history: of one rank, as `lab.record_memory` returns it.
        note: a sentence under the picture.
        width: of the static picture, in pixels.
    """
    history, title = memory_history, f"Memory over time, rank {memory_history.rank}"
    if not len(history.ms) or not history.total.any():
        return message_view("memory_over_time", title, "No byte was recorded during the step.")
    peak_ms, peak = history.peak
    start = int(history.total[0])
    summary = f"Peak {bytes_text(peak)} at {ms_text(peak_ms)}: {bytes_text(start)} before the step and "
    summary += f"{bytes_text(peak - start)} more."
    if history.capacity:
        share = f"{number(100 * peak / history.capacity, 2)}% of {bytes_text(history.capacity)}"
        summary += f" That is {share}." if peak <= history.capacity else f" It exceeds {bytes_text(history.capacity)}."
    sizes = {look_of(name, MEMORY).label: values for name, values in history.size.items()}
    rows = [
        [label, *(bytes_text(int(values[n])) for n in (0, history.peak_index, -1))] for label, values in sizes.items()
    ]
    rows += [[f"of these: {where}", "", bytes_text(size), ""] for _, size, where in history.blocks]
    numbers = TextTable(("category", "at the start", "at the peak", "at the end"), rows)
    held = sorted(((values[history.peak_index], label) for label, values in sizes.items()), reverse=True)
    notes = [f"At the peak: {', '.join(f'{label} {bytes_text(size)}' for size, label in held if size > 0)}"]
    if history.blocks:
        largest = ", ".join(f"{bytes_text(size)} by {where}" for _, size, where in history.blocks[:NAMED])
        notes.append(f"Largest allocations of the step in it: {largest}")
    notes += [_SOURCES.get(history.source, ""), note]
    chart = spec.Chart(
        title,
        summary,
        ((_panel(history),),),
        with_notes("", [words.removesuffix(".") for words in notes]),
        warn=bool(history.capacity and peak > history.capacity),
    )
    return View.of_chart("memory_over_time", chart, numbers, width)


def _points(history: MemoryHistory) -> np.ndarray:
    """Indices of the points that are drawn: of each span of time the fullest, and both ends."""
    count = len(history.ms)
    if count <= MOST_POINTS:
        return np.arange(count)
    spans = np.array_split(np.arange(count), MOST_POINTS)
    fullest = [span[int(np.argmax(history.total[span]))] for span in spans]
    return np.unique([0, *fullest, count - 1])


def _panel(history: MemoryHistory) -> spec.Panel:
    """A stack of the categories, their sum, the capacity where it is near, and the peak."""
    places = _points(history)
    ms = tuple(history.ms[places].tolist())
    marks: list[spec.Mark] = []
    below = np.zeros(len(places))
    for name, values in history.size.items():
        above = below + values[places]
        if values.any():
            look = look_of(name, MEMORY)
            held = f"{bytes_text(values[history.peak_index])} at the peak, {bytes_text(values.max())} at most"
            marks.append(
                spec.Area(look.label, look, ms, tuple(below.tolist()), tuple(above.tolist()), f"{look.label}\n{held}")
            )
        below = above
    hovers = tuple(f"{ms_text(at)}\n{bytes_text(size)} in all" for at, size in zip(ms, below.tolist(), strict=True))
    marks.append(spec.Lines("all", ms, tuple(below.tolist()), width=1.2, step="hv", hover=hovers, legend=False))
    peak_ms, peak = history.peak
    if history.capacity and history.capacity <= 1.06 * peak:
        marks.append(spec.Rule(y=history.capacity, words=f"capacity {bytes_text(history.capacity)}", colour=WARNING))
    marks.append(spec.Rule(x=peak_ms, words=f"peak {bytes_text(peak)}", dash="3 3"))
    x = spec.Axis("linear", 0.0, float(history.ms[-1]) or 1.0, "since the start of the step", "ms")
    return spec.Panel(x, spec.linear([peak], "", "bytes", pad=0.06), tuple(marks), height=220.0)
