"""The checks of ``recshard selftest --full``, which find any change of the core's numbers.

Each takes some seconds, and a run that was stopped continues with the next one. On each kind of ranks:

=================================================  =================================================================
``SCHEME, pooled`` and ``SCHEME, sequences``       each fused optimizer, then each codec, beside unsharded tables
``a model under SCHEME``                           a DLRM with `DistributedModelParallel` beside a plain one
``resharding``, ``checkpoints``                    a step under each scheme in turn, beside unsharded tables
``pipelines``, ``interrupt``, ``killed rank``      as without ``--full``
=================================================  =================================================================

Each reports the *bits* of what it computed: equal bits in the reports of two builds are equal numbers.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from recshard_lab.comm import CommType
from recshard_lab.embedding import EmbOptimType
from recshard_lab.selftest import full_on_ranks
from recshard_lab.selftest.checks import (
    Check,
    Launched,
    Seen,
    Way,
    check_interrupt,
    check_kill,
    check_launch,
    check_machine,
    check_pipelines,
    nccl,
    plan_under,
    shared,
)
from recshard_lab.sharding.schemes import scheme_names

__all__ = ["full_checks"]

APART: Mapping[CommType, float] = {  # of the largest value, after three steps of each format
    CommType.FP32: 2e-5,
    CommType.FP16: 2e-3,
    CommType.BF16: 2e-2,
    CommType.INT8: 3e-2,
}


def full_checks(launched: Launched) -> list[Check]:
    """Every check, on CPU ranks and on the GPUs that torch finds."""
    ways = [
        Way("2 CPU ranks, Gloo", 2, {"backend": "gloo"}, "cpu"),
        Way("4 CPU ranks on 2 nodes, Gloo", 4, {"backend": "gloo", "nodes": 2}, "cpu"),
    ]
    if torch.cuda.device_count():
        ways += [nccl(), shared(2), shared(4)]
    machine = Check("checkup", partial(check_machine, launched))
    return [machine, *(check for way in ways for check in _checks_of(launched, way))]


def _checks_of(launched: Launched, way: Way) -> Iterator[Check]:
    def named(name: str, run: Callable[..., Seen], *more: Any) -> Check:
        return Check(f"{name}: {way.name}", partial(run, launched, way, *more))

    yield named("launch", check_launch)
    for scheme in scheme_names():
        yield named(f"{scheme}, pooled", check_scheme, scheme, True)
        yield named(f"{scheme}, sequences", check_scheme, scheme, False)
        yield named(f"a model under {scheme}", check_model, scheme)
    for form, pooled in (("pooled", True), ("sequences", False)):
        yield named(f"resharding, {form}", check_resharding, pooled)
        yield named(f"checkpoints, {form}", check_checkpoints, pooled)
    yield named("pipelines", check_pipelines)
    yield named("interrupt", check_interrupt)
    yield named("killed rank", check_kill)


def check_scheme(launched: Launched, way: Way, scheme: str, pooled: bool) -> Seen:
    """Every optimizer without a codec, and every codec with row-wise Adagrad."""
    ranks = launched.ranks(way)
    plan = plan_under(scheme, full_on_ranks.tables_of(pooled), ranks).to_json()
    runs = [(str(optimizer), CommType.FP32) for optimizer in full_on_ranks.OPTIMIZERS]
    runs += [(str(EmbOptimType.EXACT_ROWWISE_ADAGRAD), codec) for codec in CommType if codec is not CommType.FP32]
    found = {}
    for optimizer, codec in runs:
        by_rank = ranks.run(full_on_ranks.train_beside_truth, plan, pooled, optimizer, str(codec))
        found[f"{optimizer}, {codec}"] = (by_rank, APART[codec])
    return _judged(found)


def check_model(launched: Launched, way: Way, scheme: str) -> Seen:
    """Losses, tables and dense weights of a model."""
    ranks = launched.ranks(way)
    plan = plan_under(scheme, full_on_ranks.model_tables(), ranks)
    (entries,) = plan.plan.values()
    placed = type(plan)({full_on_ranks.PATH: entries}).to_json()
    return _judged({"Adagrad": (ranks.run(full_on_ranks.dlrm_beside_truth, placed), APART[CommType.FP32])})


def check_resharding(launched: Launched, way: Way, pooled: bool, folder: str | None = None) -> Seen:
    """A step under each scheme, from one to the next."""
    ranks, found = launched.ranks(way), {}
    tables = full_on_ranks.tables_of(pooled)
    plans = [plan_under(scheme, tables, ranks).to_json() for scheme in scheme_names()]
    for optimizer in map(str, (EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.ADAM)):
        at = f"{folder}/{optimizer}" if folder else None
        by_rank = ranks.run(full_on_ranks.across_plans, [*plans, plans[0]], pooled, optimizer, at)
        found[optimizer] = (by_rank, APART[CommType.FP32])
    return _judged(found)


def check_checkpoints(launched: Launched, way: Way, pooled: bool) -> Seen:
    """The same, with a checkpoint between two schemes."""
    with tempfile.TemporaryDirectory() as folder:
        return check_resharding(launched, way, pooled, folder)


def _judged(found: Mapping[str, tuple[Sequence[full_on_ranks.Found], float]]) -> Seen:
    """What all runs of a check have in common. Raises if one is further from the truth than its limit."""
    wrong, bits, kernels, most = [], hashlib.sha256(), set(), 0.0
    for name, (by_rank, limit) in found.items():
        for rank, one in enumerate(by_rank):
            for what in ("outputs", "weights"):
                if not one[what] <= limit:
                    wrong.append(f"{name}: {what} of rank {rank} differ by {one[what]:.1e}, above {limit:g}")
                if limit == APART[CommType.FP32]:
                    most = max(most, one[what])
            bits.update(one["bits"].encode())
            kernels |= set(one["kernels"])
    if wrong:
        raise RuntimeError("; ".join(wrong))
    words = f"{len(found)} runs, in FP32 at most {most:.0e} apart; kernel {', '.join(sorted(kernels))}"
    return Seen(words, {"bits": bits.hexdigest()[:16]})
