"""``recshard demo``: trains one model unsharded and under several plans, prints the comparison, writes a report.

It needs no browser. `training.py` trains and compares.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from recshard_lab.cores import machine
from recshard_lab.data import load_ratings
from recshard_lab.lab import views
from recshard_lab.lab.demo import training
from recshard_lab.lab.demo.experiment import moved_bytes
from recshard_lab.lab.demo.training import (
    SHORT_RECIPE,
    SHORT_SCHEMES,
    SHORT_SPLITS,
    SPLITS,
    Comparison,
    Run,
    compare_schemes,
)
from recshard_lab.lab.draw.theme import SCHEMES, bytes_text, look_of, with_notes
from recshard_lab.lab.exporting.assumptions import assumptions
from recshard_lab.lab.exporting.exportable import Candidate, Exportable
from recshard_lab.lab.exporting.exporting import write_page
from recshard_lab.lab.exporting.report import Section
from recshard_lab.sharding import Topology
from recshard_lab.text_table import TextTable
from recshard_lab.train import MOVIELENS_100K

PREDICTED = (
    "Predicted step times come from a cost model that is not calibrated on this machine. Measured ones are medians. "
    "They include waiting for a core where ranks share cores."
)
SHORT_RANKS, FULL_RANKS = 2, 4
SHORT = SHORT_SCHEMES, SHORT_RECIPE, SHORT_SPLITS


def run_demo(
    data: Path | None, world_size: int | None, out: Path, console: Console, plotly: str = "embed", full: bool = False
) -> bool:
    """Trains, prints the comparison on the console, and writes the report. Returns whether every requirement holds.

    Args:
        data: path of MovieLens. None tries the environment variable, the cache and the network, then generates ratings.
        world_size: number of ranks. None takes 2, or 4 if `full`.
        out: path of the HTML report.
        plotly: source of its interactive pictures, see `write_report`.
        full: train under every scheme on both splits by the whole recipe. Otherwise: `SHORT_SCHEMES`, `SHORT_SPLITS`,
            `SHORT_RECIPE`.
    """
    ranks = world_size or (FULL_RANKS if full else SHORT_RANKS)
    with console.status("looking for ratings"):
        ratings = load_ratings(data)
    console.print(f"[bold]{escape(ratings.source)}[/], from {escape(ratings.origin)}")
    console.print(f"{escape(machine())}; {ranks} ranks, 1 thread per rank")
    if not full:
        console.print(
            f"Short run: {len(SHORT_SCHEMES)} schemes and the planner's plan, {len(SHORT_SPLITS)} split, "
            f"{SHORT_RECIPE.epochs} of {MOVIELENS_100K.epochs} epochs. recshard demo --full runs everything."
        )
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("preparing", total=None, left="")

        def on_progress(progress: training.Progress) -> None:
            left = "" if progress.left_s is None else f"{progress.left_s:.0f} s left"
            total = None if progress.share is None else 1.0
            bar.update(task, description=progress.action, completed=progress.share, total=total, left=left)

        def on_outcome(run: Run, split: str) -> None:
            outcome = run.outcomes[split]
            bar.console.print(
                f"{run.name:<18} test AUC {outcome.auc:.4f}  {outcome.step_ms:5.1f} ms per step  ({SPLITS[split]})"
            )

        schemes, recipe, splits = (None, MOVIELENS_100K, [*SPLITS]) if full else SHORT
        result = compare_schemes(ratings, ranks, schemes, recipe, splits, on_progress, on_outcome)
    console.print()
    console.print(summary_table(result))
    for note in result.notes():
        console.print(note, style="dim")
    for good, words in result.verdicts():
        console.print(f"[green]yes[/] {words}" if good else f"[bold red]NO[/]  {words}")
    console.print(PREDICTED, style="dim")
    with console.status("writing the report"):
        write_page(out, demo_page(result), plotly)
    console.print(f"Report: {escape(str(out))} ({bytes_text(out.stat().st_size)})")
    return all(good for good, _ in result.verdicts())


def summary_table(found: Comparison) -> Group:
    """One row per run, measured before predicted, with a title and a legend that wrap at the terminal's width."""
    table = Table(box=None, header_style="bold underline", pad_edge=False)
    for head in ("plan", "test AUC", "step, ms", "memory", "moved"):
        table.add_column(head, justify="left" if head == "plan" else "right", no_wrap=True)
    for row in rows_of(found):
        table.add_row(*row)
    legend = with_notes(
        f"AUC: {' | '.join(SPLITS[split] for split in found.splits)}. Memory: fullest rank. "
        "Moved: embeddings between ranks, per step.",
        [found.times_note],
    )
    title = f"DLRM on {found.ratings.source}, {found.shape}: measured | predicted"
    return Group(Text(title, style="italic"), table, Text(legend, style="dim italic"))


def rows_of(found: Comparison) -> list[list[str]]:
    """The cells of the summary as text."""
    rows = []
    for run in found.runs:
        outcome = run.first
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
    """Two amounts of bytes. An equal unit is written once.

    >>> _pair(355_000, 356_000), _pair(999_000, 1_200_000)
    ('355 | 356 KB', '999 KB | 1.2 MB')
    """
    left, right = bytes_text(measured), bytes_text(predicted)
    (value, _, unit), other = left.partition(" "), right.partition(" ")[2]
    return f"{value} | {right}" if unit == other else f"{left} | {right}"


def demo_page(found: Comparison) -> Exportable:
    """The comparison as a page: the table, the loss curves, the pictures of each plan."""
    note = found.ratings.source
    heads = ("plan", *(f"AUC, {SPLITS[split]}" for split in found.splits), "step, ms", "memory", "moved per step")
    rows = [[name, *auc.split(" | "), step.rstrip("| "), *rest] for name, auc, step, *rest in rows_of(found)]
    legend = (
        "AUC: on test ratings. Other columns: measured | predicted. Memory: fullest rank. "
        "Moved: embeddings between ranks."
    )
    losses = {split: {run.name: run.outcomes[split].losses for run in found.runs} for split in found.splits}
    verdicts = ". ".join(words[0].upper() + words[1:] for _, words in found.verdicts()) + "."
    sections = [
        Section(f"The same model, {len(found.runs)} ways", [TextTable(heads, rows), legend, *found.notes(), verdicts]),
        Section(
            "Loss curves",
            [views.curves(losses[split], note=f"{note}, {SPLITS[split]}") for split in found.splits],
        ),
    ]
    tables = found.recipe.tables(found.ratings)
    candidates, columns = [], {}
    for run in found.runs:
        if run.plan is None or run.predicted is None:
            continue
        measured = run.first.measured
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
        note=with_notes(f"Ratings: {found.ratings.source}. {PREDICTED}", [found.times_note]),
        pictures=columns,
        candidates=candidates,
        name="demo",
    )
