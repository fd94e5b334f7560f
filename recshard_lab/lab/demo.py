"""``recshard demo``: one model on real ratings under every scheme, measured beside predicted, and a report.

Headless: a progress bar, a table, verdicts, one HTML file. What is trained and compared lies in `comparison.py`.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from recshard_lab.cores import machine
from recshard_lab.data import load_ratings
from recshard_lab.lab import views
from recshard_lab.lab.assumptions import assumptions
from recshard_lab.lab.comparison import SPLITS, Comparison, compare_schemes
from recshard_lab.lab.experiment import moved_bytes
from recshard_lab.lab.exportable import Candidate, Exportable
from recshard_lab.lab.exporting import write_page
from recshard_lab.lab.report import Section
from recshard_lab.lab.theme import SCHEMES, bytes_text, look_of
from recshard_lab.lab.view import Numbers
from recshard_lab.sharding import Topology

PREDICTED = (
    "Step times are predicted by a cost model that was not calibrated on this machine; measured ones are medians and, "
    "where ranks share cores, include waiting for one."
)


def run_demo(data: Path | None, world_size: int, out: Path, console: Console, plotly: str = "embed") -> bool:
    """The whole path, told on the console; False where a verdict is not what it must be.

    Args:
        data: where MovieLens is; the variable, the cache, the network, then the generator when left out.
        world_size: ranks.
        out: the HTML report.
        plotly: where its interactive pictures come from, see `write_report`.
    """
    with console.status("looking for ratings"):
        ratings = load_ratings(data)
    console.print(f"[bold]{escape(ratings.source)}[/], from {escape(ratings.origin)}")
    console.print(f"{escape(machine())}; {world_size} ranks, one thread each")
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("launching", total=None)

        def told(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        found = compare_schemes(ratings, world_size, on_progress=told)
    console.print(summary_table(found))
    for words in found.left_out():
        console.print(words, style="dim")
    for good, words in found.verdicts():
        console.print(f"[green]yes[/] {words}" if good else f"[bold red]NO[/]  {words}")
    console.print(PREDICTED, style="dim")
    write_page(out, demo_page(found), plotly)
    console.print(f"Report: {escape(str(out))} ({bytes_text(out.stat().st_size)})")
    return all(good for good, _ in found.verdicts())


def summary_table(found: Comparison) -> Table:
    """One line a run; measured stands before predicted."""
    table = Table(
        title=f"DLRM on {escape(found.ratings.source)}, {found.shape}: measured | predicted",
        caption="AUC: split at random | by time. Memory: fullest rank. Moved: from rank to rank in a step.",
        title_justify="left",
        caption_justify="left",
        box=None,
        header_style="bold underline",
        pad_edge=False,
    )
    for head in ("plan", "test AUC", "step, ms", "memory", "moved"):
        table.add_column(head, justify="left" if head == "plan" else "right", no_wrap=True)
    for row in rows_of(found):
        table.add_row(*row)
    return table


def rows_of(found: Comparison) -> list[list[str]]:
    """The cells of the summary as text."""
    rows = []
    for run in found.runs:
        outcome = run.outcomes["random"]
        cells = [run.name, " | ".join(f"{auc:.4f}" for auc in run.aucs), f"{outcome.step_ms:.1f} |     ", "", ""]
        if run.predicted is not None and outcome.measured is not None:
            held = float(outcome.measured.memory_bytes.sum(axis=1).max())
            cells[2:] = [
                f"{outcome.step_ms:.1f} | {run.predicted.step_ms:4.1f}",
                _pair(held, run.predicted.fullest_bytes),
                _pair(*(moved_bytes(sent.traffic_bytes) for sent in (outcome.measured, run.predicted))),
            ]
        rows.append(cells)
    return rows


def _pair(measured: float, predicted: float) -> str:
    """Two amounts of bytes, their unit once where it is the same.

    >>> _pair(355_000, 356_000), _pair(999_000, 1_200_000)
    ('355 | 356 KB', '999 KB | 1.2 MB')
    """
    left, right = bytes_text(measured), bytes_text(predicted)
    (value, _, unit), other = left.partition(" "), right.partition(" ")[2]
    return f"{value} | {right}" if unit == other else f"{left} | {right}"


def demo_page(found: Comparison) -> Exportable:
    """The comparison as a page: the table, the loss curves, and each plan's pictures."""
    note = found.ratings.source
    heads = ("plan", *(f"AUC, {words}" for words in SPLITS.values()), "step, ms", "memory", "moved a step")
    rows = [[name, *auc.split(" | "), *rest] for name, auc, *rest in rows_of(found)]
    legend = (
        "AUC on test ratings; the others measured | predicted. Memory: fullest rank. Moved: embeddings between ranks."
    )
    losses = {split: {run.name: run.outcomes[split].losses for run in found.runs} for split in SPLITS}
    verdicts = ". ".join(words.capitalize() for _, words in found.verdicts()) + "."
    sections = [
        Section(f"The same model, {len(found.runs)} ways", [Numbers(heads, rows), legend, *found.left_out(), verdicts]),
        Section(
            "Loss curves",
            [views.curves(losses[split], note=f"{note}, {words}") for split, words in SPLITS.items()],
        ),
    ]
    tables = found.recipe.tables(found.ratings)
    candidates, columns = [], {}
    for run in found.runs:
        if run.plan is None or run.predicted is None:
            continue
        measured = run.outcomes["random"].measured
        topology = Topology(found.world_size)
        known = {"plan": run.plan, "tables": tables, "topology": topology, "note": note}
        known |= {"estimate": run.predicted, "measured": measured}
        pictures = [views.draw(name, **known) for name in views.views_of(*known)]
        label = look_of(run.name, SCHEMES).label.capitalize()
        sections.append(Section(label, pictures))
        columns[label] = pictures
        candidates.append(Candidate(label, run.plan, tables, topology, found.workload, run.predicted, measured))
    sections.append(assumptions(Topology(found.world_size), found.workload))
    return Exportable(
        f"One DLRM under {len(found.runs) - 1} sharding plans, {found.shape}",
        sections,
        subtitle=f"{note}. {machine()}.",
        note=f"Ratings: {found.ratings.source}. {PREDICTED}",
        pictures=columns,
        candidates=candidates,
        name="demo",
    )
