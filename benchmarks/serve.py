"""Requests per second of ``recshard serve``, latencies at 50% and 90% of that, and what the server adds to the model.

The model is a DLRM of 26 tables. One request is one sample in a binary body. The load generator is h2load, with 64
connections on the same machine (Debian's package ``nghttp2-client``): first as fast as the server answers, then at
fixed rates. At a fixed rate the connections open one after another, so their requests are spread evenly over time. The
generator's CPU time is taken from the same cores.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks import Figure, note

FEATURES, DENSE, ROWS, WIDTH, CONNECTIONS = 26, 13, 10_000, 64, 64
SECONDS, QUICK_SECONDS, WARM_S = 15, 4, 2
_MOST = f"requests a second, {CONNECTIONS} connections"
_OVER = "the server adds to the model at p50, 10% load, no delay"
_OUTSIDE = "of a request, outside the model, 10% load, no delay"
TARGETS = {_MOST: 2000.0, _OVER: 1.0}


def figures(*, quick: bool = False) -> list[Figure]:
    """One server process, started for this run.

    Raises:
        FileNotFoundError: h2load is not installed.
    """
    generator = shutil.which("h2load")
    if generator is None:
        raise FileNotFoundError("the load generator h2load is not installed. Fix: apt-get install nghttp2-client")
    with tempfile.TemporaryDirectory(prefix="recshard-serve-") as folder:
        return _measured(generator, Path(folder), QUICK_SECONDS if quick else SECONDS)


def _measured(generator: str, folder: Path, seconds: int) -> list[Figure]:
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
    with serve(folder, log_level="warning") as server:
        command = [generator, "--h1", f"-c{CONNECTIONS}", "-t1", "-d", str(body)]
        command += ["-H", "content-type: application/x-safetensors"]
        target = f"{server.address}/v1/predict"

        def load(share: float, rate: float | None) -> list[float]:
            note(f"load of {share:.0%} ...")
            return durations(command, folder / f"log{share}", target, seconds, rate)

        fastest = load(1.0, None)
        most = len(fastest) / seconds
        with server.client() as client:
            before = client.metrics()
            at = {0.1: load(0.1, 0.1 * most)}
            between = client.metrics()
            at |= {share: load(share, share * most) for share in (0.5, 0.9)}
            after = client.metrics()
    bare, paced = _bare_ms(model, batch), _bare_ms(model, batch, period_s=10 / most)
    found = [_figure(_MOST, most, "1/s", fastest)]
    found += [
        Figure(f"p99 at {share:.0%} of that", 1e3 * quantile(times, 0.99), "ms", beside=_beside(times, seconds))
        for share, times in at.items()
    ]
    p50 = 1e3 * quantile(at[0.1], 0.5)
    about = (
        "bare: one call of the model after the other in this process, one thread. At the pace of 10% load, calls are "
        "as far apart as the server's, and caches are colder. Bodies are decoded and answers encoded by the server."
    )
    beside = {"bare ms": bare, "bare at that pace ms": paced, "added to that ms": p50 - paced}
    found.append(Figure(_OVER, p50 - bare, "ms", beside=beside, note=about))
    inside = 1e3 * _mean("recshard_model_seconds", before, between)
    outside = 1e3 * fmean(at[0.1]) - inside
    beside = {"model in the server ms": inside, "queue ms": 1e3 * _mean("recshard_queue_seconds", before, between)}
    beside["samples a call at 50% and 90%"] = _mean("recshard_batch_samples", between, after)
    found.append(Figure(_OUTSIDE, outside, "ms", beside=beside, note="means of all requests of that load"))
    return found


def _mean(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """The mean of a histogram between two reads of the metrics.

    >>> _mean("x", {"x_sum": 1.0, "x_count": 1}, {"x_sum": 7.0, "x_count": 3})
    3.0
    """
    return (after[f"{name}_sum"] - before[f"{name}_sum"]) / (after[f"{name}_count"] - before[f"{name}_count"])


def _figure(name: str, value: float, unit: str, times: list[float]) -> Figure:
    beside = {"p50 ms": 1e3 * quantile(times, 0.5), "p99 ms": 1e3 * quantile(times, 0.99)}
    return Figure(name, value, unit, at_most=False, target=TARGETS[name], beside=beside)


def _beside(times: list[float], seconds: int) -> dict[str, float]:
    return {"p50 ms": 1e3 * quantile(times, 0.5), "p99 ms": 1e3 * quantile(times, 0.99), "1/s": len(times) / seconds}


def _bare_ms(model: Any, batch: Any, calls: int = 300, period_s: float = 0.0) -> float:
    """Median of a call of the model in this process; calls start `period_s` apart."""
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    taken = []
    try:
        with torch.inference_mode():
            for _ in range(calls):
                begun = time.perf_counter()
                model.predict(batch)
                taken.append(time.perf_counter() - begun)
                time.sleep(max(0.0, period_s - taken[-1]))
    finally:
        torch.set_num_threads(torch_threads)
    return 1e3 * median(taken[calls // 10 :])


def write_model(path: Path, features: int = FEATURES, rows: int = ROWS, width: int = WIDTH) -> None:
    """A bundle with an untrained DLRM."""
    from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
    from recshard_lab.models import DLRM
    from recshard_lab.serving import Inputs, save_bundle

    tables = [EmbeddingBagConfig(rows, width, f"t{one}", feature_names=[f"f{one}"]) for one in range(features)]
    model = DLRM(EmbeddingBagCollection(tables), DENSE, [64, width], [64, 1]).eval()
    inputs = Inputs.of(model, dense=[f"i{one}" for one in range(DENSE)])
    save_bundle(model, path, inputs=inputs, outputs={"probability": torch.sigmoid})


def durations(command: list[str], log: Path, target: str, seconds: int, rate: float | None) -> list[float]:
    """Seconds of each answered request of one run of h2load, without those of the first `WARM_S` seconds.

    Args:
        rate: requests a second in all; None as many as are answered.

    Raises:
        RuntimeError: h2load fails, or a request was not answered with 200.
    """
    if rate is None:
        more = [f"-D{seconds}", f"--warm-up-time={WARM_S}"]
    else:
        period_ms = max(1, round(1000 / rate))
        more = [f"-n{round(rate * (WARM_S + seconds))}", f"--rps={rate / CONNECTIONS:.3f}"]
        more += [f"-r{max(1, round(rate * period_ms / 1000))}", f"--rate-period={period_ms}ms"]
    done = subprocess.run([*command, *more, f"--log-file={log}", target], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"h2load ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    return parsed(log.read_text(), 0 if rate is None else WARM_S, in_flight=0 if rate else CONNECTIONS)


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
