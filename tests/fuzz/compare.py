"""A case on ranks against the reference, each number within what rounding allows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.cases import Case
from tests.fuzz.jobs import live
from tests.fuzz.reference import Numbers, run

FACTOR = 4.0  # errors of one sign add up to more than random ones do
RUNS = 6  # with errors
MORE_RUNS = 64  # where a number is beyond its bound: in 6, two errors of opposite signs may have cancelled every time


class Bounds:
    """The reference, and how far from it each number may be."""

    def __init__(self, case: Case) -> None:
        self.case, self.truth = case, run(case)
        self.noisy = [run(case, seed) for seed in range(RUNS)]

    def sharpen(self) -> None:
        """Makes the bounds those of `MORE_RUNS` runs."""
        self.noisy += [run(self.case, seed) for seed in range(len(self.noisy), MORE_RUNS)]

    def gap(self, found: Tensor, read: Callable[[Numbers], Tensor]) -> float:
        """The largest error as a part of its bound; of a row, the farthest of the row's numbers counts for all."""
        exact = read(self.truth)
        assert found.shape == exact.shape, f"shape {list(found.shape)}, not {list(exact.shape)}"
        if not exact.numel():
            return 0.0
        spread = torch.stack([(read(own) - exact).abs() for own in self.noisy]).amax(0)
        if exact.dim() == 2:
            spread = spread.amax(1, keepdim=True)
        tiny = 1e-37  # below it fp32 numbers have fewer digits
        rounded = 2 * 2.0**-24 * exact.abs()  # to fp32 in the kernel, and once more where the mean over ranks is undone
        allowed = FACTOR * spread + rounded * (found.dtype is not torch.float64) + tiny
        return float(((found.double() - exact).abs() / allowed).nan_to_num(nan=torch.inf).max())

    def largest(self) -> float:
        """The largest bound of a weight, as a part of its table's largest weight."""
        found = []
        for name, exact in self.truth.weights.items():
            spread = max(float((own.weights[name] - exact).abs().max()) for own in self.noisy)
            found.append(FACTOR * spread / float(exact.abs().max()))
        return max(found)


def check(case: Case, ranks: Any) -> Bounds:
    """Raises AssertionError where a number is outside its bound."""
    bounds, told = Bounds(case), ranks.call(live, (case,), timeout_s=120)
    compare(case, bounds, [own for own, _ in told])
    return bounds


def compare(case: Case, bounds: Bounds, told: list[Numbers]) -> None:
    """The same with the ranks' numbers at hand."""
    beyond = farthest(case, bounds, told)
    if beyond:
        bounds.sharpen()
        beyond = farthest(case, bounds, told)
    assert not beyond, f"{beyond}; repeat: {case.command()}"


def farthest(case: Case, bounds: Bounds, told: list[Numbers]) -> dict[str, str]:
    """What is outside its bound, and how far."""
    worst: dict[str, float] = {}
    for step in range(len(case.sizes)):
        for name in bounds.truth.outputs[step]:
            found = torch.cat([own.outputs[step][name] for own in told])
            worst[f"rows of {name} in step {step}"] = bounds.gap(found, lambda own, s=step, n=name: own.outputs[s][n])  # type: ignore[misc]
    for own in told:
        for key, grad in own.gradients.items():
            what = "weights' gradient in step {}, rank {}, {}".format(*key)
            worst[what] = bounds.gap(grad, lambda numbers, k=key: numbers.gradients[k])  # type: ignore[misc]
        for name, weight in own.weights.items():
            worst[f"table {name}"] = bounds.gap(weight, lambda numbers, n=name: numbers.weights[n])  # type: ignore[misc]
            assert torch.equal(weight, told[0].weights[name]), f"ranks disagree on table {name}"
    return {what: f"{times:.3g} times its bound" for what, times in worst.items() if not times <= 1}
