"""The work of ``recshard demo``, imported when it runs: trains, prints the comparison and writes its report."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from recshard_lab.cores import machine
from recshard_lab.data import load_ratings
from recshard_lab.lab import export
from recshard_lab.lab.demo.page import PREDICTED, rows_of
from recshard_lab.lab.demo.training import (
    SHORT_RECIPE,
    SHORT_SCHEMES,
    SHORT_SPLITS,
    SPLITS,
    Comparison,
    Run,
    compare_schemes,
)
from recshard_lab.lab.demo.training import Progress as DemoProgress
from recshard_lab.lab.draw.theme import bytes_text, with_notes
from recshard_lab.train import MOVIELENS_100K

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

        def on_progress(progress: DemoProgress) -> None:
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
        export(result, out, plotly=plotly)
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
