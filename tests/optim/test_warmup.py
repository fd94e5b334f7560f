"""Schedules against their formulas written out, and clipping against torch's own."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from recshard_lab.optim import (
    CombinedOptimizer,
    EmptyFusedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)

COSINE, INTERPOLATE = WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS, WarmupPolicy.INTERPOLATE


def one(name: str = "w", lr: float = 1.0) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper({name: nn.Parameter(torch.ones(3))}, lambda params: torch.optim.SGD(params, lr=lr))


def rates(optimizer: WarmupOptimizer, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    return found


@pytest.mark.parametrize(
    ("stage", "formula"),
    [
        (WarmupStage(WarmupPolicy.NONE, 6), lambda i: 1.0),
        (WarmupStage(WarmupPolicy.LINEAR, 6, 0.1), lambda i: 0.1 + 0.9 * i / 6),
        (WarmupStage(WarmupPolicy.CONSTANT, 6, 0.3), lambda i: 0.3),
        (WarmupStage(WarmupPolicy.POLY, 6, 2.0), lambda i: (1 - i / 6) ** 2),
        (WarmupStage(WarmupPolicy.POLY, 6, 0.5, decay_iters=12), lambda i: math.sqrt(1 - i / 12)),
        (WarmupStage(WarmupPolicy.STEP, 6, 0.5), lambda i: 0.5**i),
        (WarmupStage(WarmupPolicy.STEP, 6, 0.5, decay_iters=3), lambda i: [1, 1, 1, 0.5, 0.5, 0.5, 0.25][i]),
        (WarmupStage(WarmupPolicy.INVSQRT, 6), lambda i: 1 / math.sqrt(i) if i else 1.0),
        (WarmupStage(COSINE, 6, 0.2, sgdr_period=4), lambda i: 0.2 + 0.4 * (1 + math.cos(math.pi * (i % 4) / 4))),
        (WarmupStage(INTERPOLATE, 6, 2.0, start_interpolating_iters=0, end_value=0.5), lambda i: 2.0 - 1.5 * i / 6),
    ],
    ids=lambda value: value.policy.value if isinstance(value, WarmupStage) else "",
)
def test_each_policy_follows_its_formula(stage: WarmupStage, formula: Any) -> None:
    stage.lr_scale = 0.5
    found = rates(WarmupOptimizer(one(), [stage], lr=0.4), 9)
    assert found[:7] == pytest.approx([0.4 * 0.5 * formula(i) for i in range(7)])
    assert found[7:] == [0.4, 0.4]  # after the last stage: the plain rate


def test_stages_follow_each_other_on_one_count() -> None:
    stages = [WarmupStage(WarmupPolicy.LINEAR, 3, 0.0), WarmupStage(WarmupPolicy.STEP, 6, 0.5, decay_iters=2)]
    assert rates(WarmupOptimizer(one(), stages, lr=1.0), 8) == pytest.approx([0, 1 / 3, 2 / 3, 1, 0.25, 0.25, 0.125, 1])


@pytest.mark.parametrize("combined", [False, True])
def test_a_schedule_goes_on_where_it_was_saved(combined: bool) -> None:
    def make() -> WarmupOptimizer:
        inner = CombinedOptimizer([one("a"), one("b")]) if combined else one()
        return WarmupOptimizer(inner, [WarmupStage(WarmupPolicy.LINEAR, 10, 0.0)], lr=1.0)

    first, second = make(), make()
    rates(first, 4)
    saved = copy.deepcopy(first.state_dict())
    assert saved["state"]["__warmup"]["warmup"].tolist() == [4, 0]
    second.load_state_dict(saved)
    assert [group["lr"] for group in second.param_groups] == pytest.approx([0.4] * (1 + combined))
    assert rates(second, 3) == rates(first, 3)
    with pytest.raises(ValueError, match=r"entries: it lacks \['__warmup'\]"):
        second.load_state_dict({"state": {}})


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([WarmupStage(max_iters=5)] * 2, r"stage 1 \(LINEAR\) ends at step 5, the one before at 5"),
        ([WarmupStage(WarmupPolicy.POLY, 5, decay_iters=3)], "reaches zero at step 3 but lasts until 5"),
        ([WarmupStage(INTERPOLATE, 5)], "needs end_value"),
        ([WarmupStage(COSINE, 5, sgdr_period=0)], "sgdr_period"),
    ],
)
def test_stages_that_make_no_schedule_are_refused(stages: list[WarmupStage], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WarmupOptimizer(one(), stages)


# ---- clipping ----


@pytest.mark.parametrize("norm_type", [2.0, 1.0, "inf"])
@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_clipping_by_norm_is_torchs_own(norm_type: Any, scale: float) -> None:
    torch.manual_seed(0)
    inner = CombinedOptimizer([one("a"), one("b")])
    clipped = GradientClippingOptimizer(inner, GradientClipping.NORM, 0.5, norm_type)
    grads = [torch.randn(3) * scale for _ in range(2)]
    twins = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for param, twin, grad in zip(inner.params.values(), twins, grads, strict=True):
        param.grad, twin.grad = grad.clone(), grad.clone()
    total = torch.nn.utils.clip_grad_norm_(twins, 0.5, norm_type)
    torch.optim.SGD(twins, lr=1.0).step()
    clipped.step()
    torch.testing.assert_close(clipped.last_total_grad_norm, total)
    for param, twin in zip(inner.params.values(), twins, strict=True):
        torch.testing.assert_close(param, twin)


def test_without_clipping_the_norm_can_be_watched() -> None:
    inner = one()
    watched = GradientClippingOptimizer(inner, track_grad_norm=True)
    assert watched.last_total_grad_norm is None
    inner.params["w"].grad = torch.tensor([3.0, 0.0, 4.0])
    watched.step()
    assert float(watched.last_total_grad_norm) == pytest.approx(5.0)
    assert inner.params["w"].tolist() == [-2.0, 1.0, -3.0]


def test_clipping_what_backward_steps_is_refused_by_name() -> None:
    class Tables(EmptyFusedOptimizer):
        stepped_in_backward = ["movies.weight"]  # noqa: RUF012

    both = CombinedOptimizer([Tables(), one()])
    with pytest.raises(ValueError, match=r"\['movies.weight'\] are stepped in backward, which Tables cannot defer"):
        GradientClippingOptimizer(both, GradientClipping.NORM)
    with pytest.raises(ValueError, match=r"clipping=VALUE does not support \['movies.weight'\].*gradient_clipping"):
        GradientClippingOptimizer(both, GradientClipping.VALUE)
    with pytest.raises(ValueError, match="max_gradient must be a number from 0, got -1"):
        GradientClippingOptimizer(one(), GradientClipping.NORM, -1.0)
