"""``recshard data``: datasets from text to files, and out of a generator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

app = typer.Typer(help="Datasets: from text to files for loaders, or out of a generator.", no_args_is_help=True)
console = Console(highlight=False)
_MB = 1e6
Told = Callable[[str, str, float, float], None]
"""Takes a step, what it is doing, bytes done and bytes in all."""


@contextmanager
def _bars() -> Iterator[Told]:
    """One bar a step, with MB/s; nothing where there is no terminal."""
    columns = (
        TextColumn("{task.description:<7}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}% {task.fields[rate]:>6.0f} MB/s"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[doing]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks: dict[str, tuple[object, float]] = {}

        def tell(step: str, doing: str, done: float, total: float) -> None:
            if step not in tasks:
                tasks[step] = progress.add_task(step, total=total, rate=0.0, doing=""), time.perf_counter()
            task, began = tasks[step]
            rate = done / _MB / max(time.perf_counter() - began, 1e-9)
            progress.update(task, completed=done, total=total, rate=rate, doing=escape(doing))  # type: ignore[arg-type]

        yield tell


@app.command()
def criteo(
    inputs: Annotated[list[Path], typer.Argument(help="Criteo's files, plain or .gz, one a day.")],
    out: Annotated[Path, typer.Option(help="The folder to fill.")],
    threshold: Annotated[
        int | None, typer.Option(help="How often an id must appear to have a number of its own; 3.", min=1)
    ] = None,
    hash_size: Annotated[int, typer.Option(help="Ids modulo this; nothing is counted.", min=0)] = 0,
    max_ind_range: Annotated[int, typer.Option(help="Ids modulo this before they are counted.", min=0)] = 0,
    format: Annotated[str, typer.Option(help="npy, to be mapped into memory, or parquet.")] = "npy",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave malformed lines out and count them.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    memory_gb: Annotated[float, typer.Option(help="Memory that it may take in all, in GB.")] = 2.0,
    threads: Annotated[int, typer.Option(help="How many work side by side.", min=1)] = 2,
) -> None:
    """Turn Criteo's click logs (Kaggle's or the Terabyte's) into files that `CriteoClicks` opens."""
    from recshard_lab.data.criteo.preprocess import preprocess_criteo

    began = time.perf_counter()
    with _bars() as tell:
        made = preprocess_criteo(
            inputs,
            out,
            threshold=threshold,
            hash_size=hash_size,
            max_ind_range=max_ind_range,
            format=format,
            skip_bad=skip_bad,
            resume=resume,
            memory_gb=memory_gb,
            threads=threads,
            on_progress=lambda at: tell(at.step, at.doing, at.done, at.total),
        )
    took, text = time.perf_counter() - began, sum(day.text_bytes for day in made.days) / _MB
    table = Table("day", "samples", "clicks", "malformed lines", box=None, pad_edge=False)
    for day in made.days:
        table.add_row(day.name, f"{day.rows:,}", f"{100 * day.clicks / day.rows:.1f}%", f"{day.bad_lines:,}")
    console.print(table)
    for day in made.days:
        for told in day.bad:
            console.print(escape(f"left out: {day.source}, {told}"))
    sizes = ", ".join(f"{column.num_embeddings:,}" for column in made.columns)
    console.print(f"num_embeddings: {sizes}")
    console.print(f"{text:,.0f} MB of text in {took:,.1f} s ({text / took:,.0f} MB/s): {escape(str(out))}")


@app.command("synthetic-criteo")
def synthetic_criteo(
    out: Annotated[Path, typer.Option(help="The folder for day_0, day_1 ...")],
    samples: Annotated[int, typer.Option(help="Lines in all, some 255 bytes each.", min=1)] = 1_000_000,
    days: Annotated[int, typer.Option(help="Files.", min=1)] = 1,
    memory_gb: Annotated[
        float, typer.Option(help="MLPerf's tables, capped until they fit into so many GB, say which ids there are.")
    ] = 8.0,
    zipf: Annotated[float, typer.Option(help="Id k is drawn with a probability like (k + 1) ** -zipf.")] = 1.05,
    signal: Annotated[float, typer.Option(help="Deviation of the planted logit.")] = 1.5,
    seed: Annotated[int, typer.Option(help="The same seed writes the same lines.", min=0)] = 0,
    gz: Annotated[bool, typer.Option("--gz", help="Write day_0.gz ...")] = False,
) -> None:
    """Write planted clicks as text of Criteo's form: missing fields, hex ids, heavy tails, a known best AUC."""
    from recshard_lab.data.clicks import SyntheticClicks
    from recshard_lab.data.criteo.write_tsv import write_criteo

    clicks = SyntheticClicks(samples, memory_bytes=int(memory_gb * 1e9), zipf=zipf, signal=signal, seed=seed)
    with _bars() as tell:
        paths = write_criteo(
            clicks,
            out,
            days,
            compress=gz,
            on_progress=lambda done, size: tell("write", f"{done:,} lines", size, size * samples / done),
        )
    best = clicks.best(range(min(samples, 100_000)))
    size = sum(path.stat().st_size for path in paths) / _MB
    console.print(f"{size:,.0f} MB in {len(paths)} files: {escape(str(out))}")
    console.print(f"best AUC {best.auc:.4f}, best log loss {best.log_loss:.4f} (of the first 100,000 samples at most)")


@app.command()
def check(folder: Annotated[Path, typer.Argument(help="A folder that `recshard data criteo` filled.")]) -> None:
    """Read every file of preprocessed clicks: checksums, ids within their tables, labels 0 or 1."""
    from recshard_lab.data.click_files import CriteoClicks

    data = CriteoClicks.open(folder, check="sums")
    console.print(f"whole and right: {escape(data.source)}")
