"""Times operators and collectives alone, and computes the figures of a `Topology` that follow from them.

With d columns, N ids, B samples, P dense parameters, g ranks of a group, and bw for the memory's bandwidth::

    copy            2 bytes / bw
    gather          N (8 d + gather_row_bytes) / bw
    reread          N 8 d / cache_bw
    lookup          N (lookup_ns_per_id + (4 d + gather_row_bytes) / bw + 4 d / (bag cache_bw))
    train - lookup  N (update_id_ns + (4 d + 4 d / bag) / cache_bw + 2 update_cost (4 d + gather_row_bytes) / bw)
    index           N index_ns_per_id + index_ms
    dense           6 P (B + matrix_half_batch) / flops_per_ms
    copy_to_device  latency + bytes / ddr_mem_bw
    all_to_all      intra_host_latency_ms + (g - 1) peer_ms + (g - 1) bytes / intra_host_bw
    issue           host_ms

The right sides are those of `planner.model`; those of the index, dense layers and collectives are multiplied by
`Topology.slowdown`. Figures come from non-negative least squares of relative errors. One group alone cannot separate a
collective's latency from its peers: all of it then counts as `peer_ms`.

On a CPU only the figures of the index, dense layers and collectives are computed: caches and threads make whole steps
the better source of the others there (`fit.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recshard_lab.calibration import operators
from recshard_lab.calibration.clock import TimedOperator, by_op, line_through
from recshard_lab.calibration.collectives import time_collectives
from recshard_lab.sharding import Topology

LARGE = 1 << 16  # bytes from which a reduce-scatter is compared with an all-to-all


def time_alone(ranks: Any, *, short: bool = False) -> list[TimedOperator]:
    """Times operators and collectives on launched ranks; `short` as for `time_collectives`."""
    return [*operators.slowest(ranks.run(operators.on_rank)), *time_collectives(ranks, short=short)]


def figures_alone(timed: Sequence[TimedOperator], before: Topology) -> dict[str, Any]:
    """The figures, by field of `Topology`.

    Args:
        timed: from `time_alone`.
        before: these ranks with default figures.
    """
    ops = by_op(timed)
    slow = before.slowdown
    found = {**_of_dense(ops, slow), **_of_index(ops, slow), **_of_collectives(ops, slow)}
    if before.compute_device == "cpu":
        return found
    updates, costs = dict(before.update_id_ns), dict(before.update_cost)
    found |= {"hbm_cap": before.hbm_cap, "update_id_ns": updates, "update_cost": costs}
    found["launch_ms"], found["kernel_ms"], found["sync_ms"] = (ops[op][0].ms for op in ("launch", "kernel", "read"))
    moved = [[2.0 * nbytes, 0.0] for (nbytes,) in _sizes(ops["copy"])]
    moved += [[8.0 * d * n, n] for n, d in _sizes(ops["gather"])]
    per_byte, per_row = line_through(moved, [*_ms(ops["copy"]), *_ms(ops["gather"])])
    (cached,) = line_through([[8 * d * n] for n, d in _sizes(ops["reread"])], _ms(ops["reread"]))
    found |= {"hbm_mem_bw": 1 / per_byte, "gather_row_bytes": per_row / per_byte, "cache_bw": 1 / cached}

    def row_ms(d: int) -> float:
        return float(4 * d * per_byte + per_row)

    lookups = {one.sizes: one.ms for one in ops["lookup"]}
    left = [ms / n - row_ms(d) - 4 * d / bag * cached for (n, d, bag, _), ms in lookups.items()]
    found["lookup_ns_per_id"] = max(0.0, 1e6 * float(np.mean(left)))
    for op, own in ops.items():
        if not op.startswith("train/"):
            continue
        optimizer = op.removeprefix("train/")
        copied = [(4 * d + 4 * d / bag) * cached for _, d, bag, _ in _sizes(own)]
        ms = [(one.ms - lookups[one.sizes]) / one.sizes[0] - less for one, less in zip(own, copied, strict=True)]
        if min(ms) <= 0:
            raise ValueError(
                f"backward with {optimizer} took {min(ms) * 1e6:.3g} ns per id less than copies in the cache: the "
                f"times vary too much. Fix: end other programs on this device and calibrate again"
            )
        per_id, costs[optimizer] = line_through([[1.0, 2 * row_ms(d)] for _, d, _, _ in _sizes(own)], ms)
        updates[optimizer] = 1e6 * per_id
    if copies := ops.get("copy_to_device"):
        found["ddr_mem_bw"] = 1 / line_through([[1.0, one.sizes[0]] for one in copies], _ms(copies))[1]
    return found


def _of_dense(ops: dict[str, list[TimedOperator]], slow: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for op, field in (("dense", "flops_per_ms"), ("dense_tf32", "tf32_flops_per_ms")):
        if own := ops.get(op):
            flops = [6.0 * operators.PARAMETERS * width**2 for _, width in _sizes(own)]
            sizes = [[each, each * one.sizes[0]] for each, one in zip(flops, own, strict=True)]
            fixed, per_flop = line_through(sizes, _ms(own))
            found[field] = slow / per_flop
            found.setdefault("matrix_half_batch", fixed / per_flop)  # of fp32, torch's default precision
    return found


def _of_index(ops: dict[str, list[TimedOperator]], slow: float) -> dict[str, Any]:
    if not (own := ops.get("index")):
        return {}
    per_id, fixed = line_through([[n, 1.0] for n, _ in _sizes(own)], [ms / slow for ms in _ms(own)])
    return {"index_ns_per_id": 1e6 * per_id, "index_ms": fixed}


def _of_collectives(ops: dict[str, list[TimedOperator]], slow: float) -> dict[str, float]:
    if "all_to_all" not in ops:
        return {}
    direct = ops["all_to_all"]
    several = len({g for _, g in _sizes(direct)}) > 1
    terms = [[float(several), g - 1, (g - 1) * nbytes] for nbytes, g in _sizes(direct)]
    latency, peer, per_byte = line_through(terms, [ms / slow for ms in _ms(direct)])
    found = {"intra_host_latency_ms": latency, "peer_ms": peer, "intra_host_bw": 1 / per_byte if per_byte else 0.0}
    pairs = zip(ops["reduce_scatter"], direct, strict=True)
    if large := [np.log(summed.ms / sent.ms) for summed, sent in pairs if sent.sizes[0] >= LARGE]:
        found["reduce_scatter_cost"] = float(np.exp(np.mean(large)))
    if issued := ops.get("issue"):
        found["host_ms"] = issued[0].ms
    return {name: float(value) for name, value in found.items() if value > 0}


def _sizes(timed: Sequence[TimedOperator]) -> list[tuple[int, ...]]:
    return [one.sizes for one in timed]


def _ms(timed: Sequence[TimedOperator]) -> list[float]:
    return [one.ms for one in timed]
