"""``recshard data``: converts datasets from text to files, generates them, checks them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recshard_lab.cli.options import OUTPUT, examples, note_written, size_option

app = typer.Typer(
    help="Convert datasets from text to files, generate them, check them.",
    no_args_is_help=True,
    epilog=examples(
        "recshard data synthetic-criteo --out text --days 2",
        "recshard data criteo text/day_0 text/day_1 --out clicks",
        "recshard data check clicks",
    ),
)
console = Console(highlight=False)
_MB = 1e6
OnProgress = Callable[[str, str, float, float], None]
"""Takes a step's name, its current action, bytes done and total bytes."""


@contextmanager
def _bars() -> Iterator[OnProgress]:
    """One progress bar per step, with MB/s. No bars without a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<7}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}% {task.fields[rate]:>6.0f} MB/s"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[action]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks: dict[str, tuple[object, float]] = {}

        def update(step: str, action: str, done: float, total: float) -> None:
            if step not in tasks:
                tasks[step] = progress.add_task(step, total=total, rate=0.0, action=""), time.perf_counter()
            task, began = tasks[step]
            rate = done / _MB / max(time.perf_counter() - began, 1e-9)
            progress.update(task, completed=done, total=total, rate=rate, action=escape(action))  # type: ignore[arg-type]

        yield update


@app.command(
    epilog=examples(
        "recshard data criteo day_0.gz day_1.gz --out clicks",
        "recshard data criteo train.txt --out clicks --format parquet --memory-gb 4GiB",
    )
)
def criteo(
    inputs: Annotated[list[Path], typer.Argument(help="Criteo's files, plain or .gz, one per day.")],
    out: Annotated[Path, typer.Option(help="Folder of the files.", rich_help_panel=OUTPUT)],
    threshold: Annotated[
        int | None, typer.Option(help="Ids that appear fewer times share one number. Default: 3.", min=1)
    ] = None,
    hash_size: Annotated[int, typer.Option(help="Take ids modulo this number, without counting them.", min=0)] = 0,
    max_ind_range: Annotated[int, typer.Option(help="Take ids modulo this number before counting them.", min=0)] = 0,
    format: Annotated[str, typer.Option(help="npy (memory-mapped) or parquet.", rich_help_panel=OUTPUT)] = "npy",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip malformed lines and count them.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")] = False,
    memory_gb: Annotated[float, size_option("GB", "Memory limit.")] = 2.0,
    threads: Annotated[int, typer.Option(help="Number of threads.", min=1)] = 2,
) -> None:
    """Convert Criteo's click logs (Kaggle or Terabyte) to files that `CriteoClicks` opens."""
    from recshard_lab.data.criteo.preprocess import preprocess_criteo

    began = time.perf_counter()
    with _bars() as update:
        result = preprocess_criteo(
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
            on_progress=lambda at: update(at.step, at.doing, at.done, at.total),
        )
    took, text = time.perf_counter() - began, sum(day.text_bytes for day in result.days) / _MB
    table = Table("day", "samples", "clicks", "malformed lines", box=None, pad_edge=False)
    for day in result.days:
        table.add_row(day.name, f"{day.rows:,}", f"{100 * day.clicks / day.rows:.1f}%", f"{day.bad_lines:,}")
    console.print(table)
    for day in result.days:
        for error in day.bad:
            console.print(escape(f"skipped: {day.source}, {error}"))
    sizes = ", ".join(f"{column.num_embeddings:,}" for column in result.columns)
    console.print(f"num_embeddings: {sizes}")
    console.print(f"{text:,.0f} MB of text in {took:,.1f} s ({text / took:,.0f} MB/s)")
    note_written(out)


@app.command(
    "synthetic-criteo",
    epilog=examples(
        "recshard data synthetic-criteo --out text",
        "recshard data synthetic-criteo --out text --samples 4000000 --days 4 --gz",
    ),
)
def synthetic_criteo(
    out: Annotated[Path, typer.Option(help="Folder for the files day_0, day_1 ...", rich_help_panel=OUTPUT)],
    samples: Annotated[int, typer.Option(help="Total number of lines, about 255 bytes each.", min=1)] = 1_000_000,
    days: Annotated[int, typer.Option(help="Number of files.", min=1)] = 1,
    memory_gb: Annotated[float, size_option("GB", "Ids come from MLPerf's tables, capped to this size.")] = 8.0,
    zipf: Annotated[
        float, typer.Option(help="Exponent: id k has a probability proportional to (k + 1) ** -zipf.")
    ] = 1.05,
    signal: Annotated[float, typer.Option(help="Standard deviation of the planted logit.")] = 1.5,
    seed: Annotated[int, typer.Option(help="The same seed writes the same lines.", min=0)] = 0,
    gz: Annotated[bool, typer.Option("--gz", help="Compress the files: day_0.gz ...", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Write synthetic clicks in Criteo's text format, with missing fields, heavy tails and a known best AUC."""
    from recshard_lab.data.clicks import SyntheticClicks
    from recshard_lab.data.criteo.write_tsv import write_criteo

    clicks = SyntheticClicks(samples, memory_bytes=int(memory_gb * 1e9), zipf=zipf, signal=signal, seed=seed)
    with _bars() as update:
        paths = write_criteo(
            clicks,
            out,
            days,
            compress=gz,
            on_progress=lambda done, size: update("write", f"{done:,} lines", size, size * samples / done),
        )
    best = clicks.best(range(min(samples, 100_000)))
    note_written(*paths)
    console.print(f"best AUC {best.auc:.4f}, best log loss {best.log_loss:.4f} (on the first 100,000 samples at most)")


@app.command(epilog=examples("recshard data check clicks"))
def check(folder: Annotated[Path, typer.Argument(help="A folder that `recshard data criteo` filled.")]) -> None:
    """Check every preprocessed file: checksums, ids within their tables, labels 0 or 1."""
    from recshard_lab.data.click_files import CriteoClicks

    data = CriteoClicks.open(folder, check="sums")
    console.print(f"complete and correct: {escape(data.source)}")
