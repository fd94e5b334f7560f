"""Criteo's text to memory-mapped files and on to batches: MB/s of text on 2 threads, memory, batches/s.

The text is planted (`recshard data synthetic-criteo`): lines of Criteo's form, with the ids of MLPerf's tables.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import Figure, torch_threads

SAMPLES, QUICK_SAMPLES, DAYS = 6_000_000, 800_000, 2
BATCH, BATCHES = 4096, 200
_HASH_SIZE = 1_000_000
_GIB = 1 << 30

# a separate process for each run, to measure its peak memory
_RUN = """
import json, resource, sys, time
from recshard_lab.data import preprocess_criteo
given = json.loads(sys.argv[1])
ends, began = {}, time.perf_counter()
made = preprocess_criteo(given.pop("inputs"), given.pop("out"), threads=2, **given,
                         on_progress=lambda at: ends.__setitem__(at.step, time.perf_counter()))
total = time.perf_counter() - began
print(json.dumps({
    "total": total,
    "steps": dict(zip(ends, (b - a for a, b in zip([began, *ends.values()], ends.values())))),
    "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "text": sum(day.text_bytes for day in made.days), "distinct": sum(column.distinct for column in made.columns),
}))
"""


def figures(quick: bool = False) -> list[Figure]:
    """Runs each step in a separate process, on files in the temporary folder."""
    with tempfile.TemporaryDirectory(prefix="recshard-criteo-") as name:
        folder = Path(name)
        inputs, written = _planted(folder, QUICK_SAMPLES if quick else SAMPLES)
        small = inputs[:1]
        _run(folder / "first", small, {})  # compiles what is not compiled yet
        numbered = _run(folder / "numbered", inputs, {})
        half = _run(folder / "half", small, {})
        hashed = _run(folder / "hashed", inputs, {"hash_size": _HASH_SIZE})
        parquet = _run(folder / "parquet", small, {"format": "parquet"})
        zipped = _run(folder / "zipped", [_zipped(small[0])], {})
        with torch_threads(1):
            loaded = _batches(folder / "numbered")
        parsers = _parsers(small[0])
    text = numbered["text"] / 1e6
    size = f"{text / 1e3:.2g} GB, {(QUICK_SAMPLES if quick else SAMPLES) / 1e6:g} M lines in {DAYS} files"
    note = (
        f"text: {size}, {numbered['distinct']:,} distinct ids. In all: text read once, ids read twice more (counted, "
        "numbered); bytes of text over the seconds of the whole call."
    )
    rates = {step: text / seconds for step, seconds in numbered["steps"].items()}
    return [
        Figure("planted text written", written, "MB/s"),
        Figure("preprocessed in all, ids numbered", text / numbered["total"], "MB/s", 150, at_most=False, note=note),
        *(Figure(f"step alone: {step}", rate, "MB/s") for step, rate in rates.items()),
        Figure("preprocessed in all, ids hashed", text / hashed["total"], "MB/s", 150, at_most=False),
        Figure("preprocessed in all, to Parquet", parquet["text"] / 1e6 / parquet["total"], "MB/s"),
        Figure("preprocessed in all, from .gz", zipped["text"] / 1e6 / zipped["total"], "MB/s of text"),
        Figure("peak memory of the process, all of the text", numbered["peak"] / _GIB, "GiB", 2.0),
        Figure("peak memory of the process, half of the text", half["peak"] / _GIB, "GiB", 2.0),
        *(Figure(f"lines to numbers alone: {name}", rate, "MB/s") for name, rate in parsers.items()),
        *(Figure(f"batches of {BATCH:,}, one thread: {name}", rate, "batches/s") for name, rate in loaded.items()),
    ]


def _planted(folder: Path, samples: int) -> tuple[list[Path], float]:
    from recshard_lab.data import SyntheticClicks
    from recshard_lab.data.criteo.write_tsv import write_criteo

    clicks = SyntheticClicks(samples, memory_bytes=1 << 40)
    write_criteo(SyntheticClicks(100, memory_bytes=1 << 40), folder / "compiled")
    began = time.perf_counter()
    paths = write_criteo(clicks, folder / "text", DAYS)
    return paths, sum(path.stat().st_size for path in paths) / 1e6 / (time.perf_counter() - began)


def _zipped(path: Path) -> Path:
    import gzip
    import shutil

    target = path.with_suffix(".gz")
    with path.open("rb") as text, gzip.open(target, "wb", compresslevel=1) as file:
        shutil.copyfileobj(text, file, 1 << 22)
    return target


def _run(out: Path, inputs: Sequence[Path], settings: dict[str, Any]) -> dict[str, Any]:
    given = json.dumps({"inputs": [str(path) for path in inputs], "out": str(out), **settings})
    done = subprocess.run([sys.executable, "-c", _RUN, given], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"preprocessing ended with {done.returncode}: {done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _batches(folder: Path) -> dict[str, float]:
    """Batches per second of the loader, after a few that warm up."""
    from recshard_lab.data import BatchLoader, CriteoClicks

    data = CriteoClicks.open(folder)
    ways = {
        "in the files' order": BatchLoader(data, BATCH),
        "shuffled": BatchLoader(data, BATCH, shuffle=True),
        "shuffled, in memory": BatchLoader(CriteoClicks.open(folder, in_memory=True), BATCH, shuffle=True),
    }
    rates = {}
    for name, loader in ways.items():
        batches = iter(loader)
        for _ in range(10):
            next(batches)
        began, count = time.perf_counter(), 0
        for _ in zip(range(BATCHES), batches, strict=False):
            count += 1
        rates[name] = count / (time.perf_counter() - began)
    return rates


def _parsers(path: Path) -> dict[str, float]:
    """This library's reader beside one it could have been, on the same text, in turn; hex included, nothing kept."""
    import io

    from recshard_lab.data.criteo.parse_days import parse
    from recshard_lab.data.criteo.text import chunks
    from recshard_lab.data.criteo.work import Settings

    pieces = [chunk for chunk, _ in zip(chunks(path), range(12), strict=False)]
    text = b"".join(chunk.text[: chunk.size].tobytes() for chunk in pieces)

    def own() -> None:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda chunk: parse(chunk, Settings()), pieces))

    ways: dict[str, Callable[[], object]] = {"this library": own}
    try:
        from pyarrow import csv
    except ImportError:
        pass
    else:
        ways["pyarrow"] = lambda: _by_pyarrow(csv, io.BytesIO(text))
    rates: dict[str, float] = {}
    for _ in range(3):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            rates[name] = max(rates.get(name, 0.0), len(text) / 1e6 / (time.perf_counter() - began))
    return rates


def _by_pyarrow(csv: Any, text: Any) -> None:
    import pyarrow as arrow
    import pyarrow.compute as compute

    from recshard_lab.data.criteo import DEFAULT_CAT_NAMES, DEFAULT_COLUMN_NAMES, DEFAULT_INT_NAMES

    arrow.set_cpu_count(min(2, os.cpu_count() or 1))
    kinds = {"label": arrow.int8()} | dict.fromkeys(DEFAULT_INT_NAMES, arrow.int32())
    kinds |= dict.fromkeys(DEFAULT_CAT_NAMES, arrow.string())
    table = csv.read_csv(
        text,
        csv.ReadOptions(column_names=DEFAULT_COLUMN_NAMES, block_size=8 << 20),
        csv.ParseOptions(delimiter="\t", quote_char=False),
        csv.ConvertOptions(column_types=kinds, null_values=[""], strings_can_be_null=True),
    )
    for name in DEFAULT_CAT_NAMES:
        digits = compute.fill_null(table[name], "0")
        compute.cast(compute.binary_join_element_wise("0x", digits, ""), arrow.uint32())
