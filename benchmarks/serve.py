"""Requests per second of ``recshard serve``, latencies at 50% and 90% of that, and what the server adds to the model.

The model is a DLRM of 26 tables. One request is one sample in a binary body. The load generator is h2load, with 64
connections on the same machine (Debian's package ``nghttp2-client``): first as fast as the server answers, then at
fixed rates. At a fixed rate the connections open one after another, so their requests are spread evenly over time. The
generator's CPU time is taken from the same cores.

The server's overhead is measured in pairs of short windows, in turn first: calls of the bare model in this process, and
requests to the server. Both get the same sample at the same even pace of 10% load, so that caches are equally cold. The
figure is the median of the pairs' differences at p50. The same pairs give the CPU time that a request costs more than a
call, which other load on the machine changes less. ``recshard bench serve --only overhead`` measures only this.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks import Figure, note

FEATURES, DENSE, ROWS, WIDTH, CONNECTIONS = 26, 13, 10_000, 64, 64
SECONDS, QUICK_SECONDS, WARM_S = 15, 4, 2
PAIRS, QUICK_PAIRS, WINDOW_S, WINDOW_WARM_S = 9, 3, 2, 0.5
PARTS = ("load", "overhead")
_MOST = f"requests a second, {CONNECTIONS} connections"
_OVER = "the server adds to the model at p50, 10% load, no delay"
_CPU = "CPU time that a request adds to a call of the model, 10% load"
_OUTSIDE = "of a request, outside the model, 10% load, no delay"
TARGETS = {_MOST: 2000.0, _OVER: 1.0}


def figures(*, quick: bool = False, only: Sequence[str] = ()) -> list[Figure]:
    """One server process, started for this run.

    Args:
        quick: shorter runs.
        only: parts of "load", "overhead"; all when left out.

    Raises:
        FileNotFoundError: h2load is not installed.
        ValueError: an `only` that no part has in its name.
    """
    chosen = [part for part in PARTS if not only or any(asked.lower() in part for asked in only)]
    if not chosen:
        raise ValueError(f"no part has {list(only)} in its name; there are: {', '.join(PARTS)}")
    generator = shutil.which("h2load")
    if generator is None:
        raise FileNotFoundError("the load generator h2load is not installed. Fix: apt-get install nghttp2-client")
    with tempfile.TemporaryDirectory(prefix="recshard-serve-") as folder:
        return _measured(generator, Path(folder), quick, chosen)


def _measured(generator: str, folder: Path, quick: bool, chosen: Sequence[str]) -> list[Figure]:
    from safetensors.torch import save

    from recshard_lab.serving import load_bundle
    from recshard_lab.serving.server import serve
    from recshard_lab.serving.server.bodies import example

    note("exporting the model ...")
    write_model(folder / "v1")
    model = load_bundle(folder / "v1")
    batch = example(model.inputs, 1)
    body = folder / "body"
    body.write_bytes(save({"dense": batch.dense, "values": batch.values, "lengths": batch.lengths}))
    seconds = QUICK_SECONDS if quick or "load" not in chosen else SECONDS
    found = []
    with serve(folder, log_level="warning") as server, server.client() as client:
        command = [generator, "--h1", f"-c{CONNECTIONS}", "-t1", "-d", str(body)]
        command += ["-H", "content-type: application/x-safetensors"]
        target, log = f"{server.address}/v1/predict", folder / "log"
        note("as many requests as are answered ...")
        fastest = durations(command, log, target, seconds, None)
        most = len(fastest) / seconds
        if "load" in chosen:
            found.append(_figure(_MOST, most, "1/s", fastest))
            before = client.metrics()
            for share in (0.5, 0.9):
                note(f"load of {share:.0%} ...")
                times = durations(command, log, target, seconds, share * most)
                beside = {**_beside(times), "1/s": len(times) / seconds}
                found.append(Figure(f"p99 at {share:.0%} of that", 1e3 * quantile(times, 0.99), "ms", beside=beside))
            samples = _mean("recshard_batch_samples", before, client.metrics())
            found.append(Figure("samples of a call at 50% and 90%", samples, ""))
        if "overhead" in chosen:
            rate = 0.1 * most

            def window() -> list[float]:
                return durations(command, log, target, WINDOW_S, rate, WINDOW_WARM_S)

            note("pairs of calls and requests at 10% load ...")
            found += overhead(model, batch, client.metrics, window, rate, QUICK_PAIRS if quick else PAIRS)
    return found


def overhead(
    model: Any,
    batch: Any,
    metrics: Callable[[], Mapping[str, float]],
    window: Callable[[], list[float]],
    rate: float,
    pairs: int,
) -> list[Figure]:
    """What a request takes longer than a call of the model, in pairs of windows.

    Args:
        model, batch: the call.
        metrics: reads those of the server.
        window: sends requests of that batch for `WINDOW_S` seconds, and returns the seconds of each.
        rate: requests or calls a second.
        pairs: of windows; in every other one the server is first.
    """
    _paced(model, batch, rate, WINDOW_WARM_S)
    added, cpu, bare, served, outside = [], [], [], [], []
    for number in range(pairs):
        calls: list[tuple[float, float]] = []
        if number % 2 == 0:
            calls = _paced(model, batch, rate, WINDOW_S)
        before = metrics()
        times = window()
        after = metrics()
        if number % 2:
            calls = _paced(model, batch, rate, WINDOW_S)
        bare.append(1e3 * median(wall for wall, _ in calls))
        served.append(1e3 * quantile(times, 0.5))
        added.append(served[-1] - bare[-1])
        asked = after["recshard_request_seconds_count"] - before["recshard_request_seconds_count"]
        spent = after["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]
        cpu.append(1e3 * (spent / asked - fmean(own for _, own in calls)))
        outside.append(1e3 * (fmean(times) - _mean("recshard_model_seconds", before, after)))
    spread = {"lowest": min(added), "highest": max(added)}
    return [
        Figure(
            _OVER, median(added), "ms", target=TARGETS[_OVER],
            beside={"call ms": median(bare), "request ms": median(served), **spread},
            note=f"median of {pairs} pairs of windows of {WINDOW_S} s at {rate:,.0f} requests a second",
        ),
        Figure(_CPU, median(cpu), "ms", beside={"lowest": min(cpu), "highest": max(cpu)}),
        Figure(_OUTSIDE, median(outside), "ms", beside={"lowest": min(outside), "highest": max(outside)}),
    ]  # fmt: skip


def _paced(model: Any, batch: Any, rate: float, seconds: float) -> list[tuple[float, float]]:
    """Seconds and CPU seconds of calls of the model in this process, one thread, evenly spread over time."""
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    taken = []
    try:
        with torch.inference_mode():
            start = time.perf_counter()
            for number in range(max(1, round(rate * seconds))):
                time.sleep(max(0.0, start + number / rate - time.perf_counter()))
                begun, used = time.perf_counter(), time.process_time()
                model.predict(batch)
                taken.append((time.perf_counter() - begun, time.process_time() - used))
    finally:
        torch.set_num_threads(torch_threads)
    return taken


def _mean(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """The mean of a histogram between two reads of the metrics.

    >>> _mean("x", {"x_sum": 1.0, "x_count": 1}, {"x_sum": 7.0, "x_count": 3})
    3.0
    """
    return (after[f"{name}_sum"] - before[f"{name}_sum"]) / (after[f"{name}_count"] - before[f"{name}_count"])


def _figure(name: str, value: float, unit: str, times: list[float]) -> Figure:
    return Figure(name, value, unit, at_most=False, target=TARGETS[name], beside=_beside(times))


def _beside(times: list[float]) -> dict[str, float]:
    return {"p50 ms": 1e3 * quantile(times, 0.5), "p99 ms": 1e3 * quantile(times, 0.99)}


def write_model(path: Path, features: int = FEATURES, rows: int = ROWS, width: int = WIDTH) -> None:
    """A bundle with an untrained DLRM."""
    from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
    from recshard_lab.models import DLRM
    from recshard_lab.serving import Inputs, save_bundle

    tables = [EmbeddingBagConfig(rows, width, f"t{one}", feature_names=[f"f{one}"]) for one in range(features)]
    model = DLRM(EmbeddingBagCollection(tables), DENSE, [64, width], [64, 1]).eval()
    inputs = Inputs.of(model, dense=[f"i{one}" for one in range(DENSE)])
    save_bundle(model, path, inputs=inputs, outputs={"probability": torch.sigmoid})


def durations(
    command: list[str], log: Path, target: str, seconds: int, rate: float | None, warm_s: float = WARM_S
) -> list[float]:
    """Seconds of each answered request of one run of h2load, without those of the first `warm_s` seconds.

    Args:
        rate: requests a second in all; None as many as are answered.

    Raises:
        RuntimeError: h2load fails, or a request was not answered with 200.
    """
    log.unlink(missing_ok=True)  # h2load appends
    if rate is None:
        more = [f"-D{seconds}", f"--warm-up-time={warm_s:g}"]
    else:
        period_ms = max(1, round(1000 / rate))
        more = [f"-n{round(rate * (warm_s + seconds))}", f"--rps={rate / CONNECTIONS:.3f}"]
        more += [f"-r{max(1, round(rate * period_ms / 1000))}", f"--rate-period={period_ms}ms"]
    done = subprocess.run([*command, *more, f"--log-file={log}", target], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"h2load ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    return parsed(log.read_text(), 0 if rate is None else warm_s, in_flight=0 if rate else CONNECTIONS)


def parsed(log: str, warm_s: float = 0, in_flight: int = 0) -> list[float]:
    """Seconds of each request in h2load's log: lines of start, status and duration, in microseconds.

    Args:
        warm_s: requests that started in the first so many seconds are left out.
        in_flight: at most so many requests may have no status. h2load ends them when its time is over.

    Raises:
        RuntimeError: no request, or one that was not answered with 200.

    >>> parsed("1700000000000000\\t200\\t1500\\n1700000000000100\\t200\\t2500\\n")
    [0.0015, 0.0025]
    """
    rows = [line.split("\t") for line in log.splitlines()]
    unfinished = [row for row in rows if row[1] == "0"]
    others = sorted({row[1] for row in rows} - ({"200"} if len(unfinished) > in_flight else {"200", "0"}))
    if others or not rows:
        raise RuntimeError(f"{len(rows)} requests, some with the status {', '.join(others) or 'of none'}, not 200")
    first = min(int(row[0]) for row in rows) + 1e6 * warm_s
    return [int(row[2]) / 1e6 for row in rows if row[1] == "200" and int(row[0]) >= first]


def quantile(times: list[float], share: float) -> float:
    """The smallest of the times that at least this share do not exceed.

    >>> quantile([4.0, 1.0, 3.0, 2.0], 0.5)
    2.0
    """
    return sorted(times)[max(0, math.ceil(share * len(times)) - 1)]
