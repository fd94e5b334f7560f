"""Optimizer rules against formulas written out, and specs against what they must refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recshard_lab.embedding import EmbOptimType, OptimizerSpec, RowWiseAdagrad, apply_optimizer_in_backward
from recshard_lab.embedding.kernels import available
from recshard_lab.embedding.optimizers import optim_type, spec_of_parameter, step

ROWWISE = EmbOptimType.EXACT_ROWWISE_ADAGRAD


def test_rowwise_adagrad_follows_its_formula() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    expected, total = weight.detach().clone(), torch.zeros(5, dtype=torch.float64)
    optimizer = RowWiseAdagrad([weight], lr=0.1, eps=1e-3)
    for _ in range(4):
        weight.grad = torch.randn_like(weight)
        weight.grad[1] = 0
        for row in range(5):
            total[row] += sum(g * g for g in weight.grad[row].tolist()) / 3
            expected[row] -= 0.1 * weight.grad[row] / (total[row].sqrt() + 1e-3)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected)
    assert torch.equal(optimizer.state[weight]["sum"], total)


@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
@pytest.mark.parametrize("optimizer", list(EmbOptimType))
def test_a_step_on_touched_rows_is_the_dense_step_on_these_rows(optimizer: EmbOptimType, weight_decay: float) -> None:
    torch.manual_seed(1)
    spec = OptimizerSpec(optimizer, 0.1, 1e-3, weight_decay)
    weight, rows = torch.randn(9, 4), torch.tensor([0, 3, 8])
    state = {name: torch.rand(shape) for name, shape in spec.state_shapes(9, 4).items()}
    before, old_state = weight.clone(), {name: value.clone() for name, value in state.items()}
    grad = torch.randn(3, 4)
    decayed = grad + weight_decay * weight[rows]
    step(spec, weight, state, rows, grad, None, 4)
    if optimizer is EmbOptimType.EXACT_SGD:
        update = 0.1 * decayed
    else:
        square = decayed**2 if optimizer is EmbOptimType.EXACT_ADAGRAD else (decayed**2).mean(1, keepdim=True)
        total = old_state["momentum1"].view(9, -1)[rows] + square
        update = 0.1 * decayed / (total.sqrt() + 1e-3)
        torch.testing.assert_close(state["momentum1"].view(9, -1)[rows], total)
    before[rows] -= update
    torch.testing.assert_close(weight, before)


def test_state_has_fbgemms_names_and_one_number_a_row_where_row_wise() -> None:
    assert OptimizerSpec().state_shapes(10, 4) == {}
    assert OptimizerSpec(EmbOptimType.EXACT_ADAGRAD).state_shapes(10, 4) == {"momentum1": (10, 4)}
    assert OptimizerSpec(ROWWISE).state_shapes(10, 4) == {"momentum1": (10,)}
    assert [OptimizerSpec(kind).row_wise for kind in EmbOptimType] == [False, False, True]


def test_fused_params_are_read_or_refused_by_name() -> None:
    given = {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.5, "eps": 0.1}
    assert OptimizerSpec.from_fused_params(given) == OptimizerSpec(ROWWISE, 0.5, 0.1)
    assert OptimizerSpec.from_fused_params(None) == OptimizerSpec(EmbOptimType.EXACT_SGD, 0.01)
    with pytest.raises(ValueError, match=r"fused_params has \['momentum'\], which no kernel honours"):
        OptimizerSpec.from_fused_params({"momentum": 0.9})
    with pytest.raises(ValueError, match="optimizer 'lamb' is not supported: choose one of exact_sgd"):
        OptimizerSpec.from_fused_params({"optimizer": "lamb"})
    with pytest.raises(ValueError, match="learning_rate must be a finite number >= 0, got nan"):
        OptimizerSpec(learning_rate=float("nan"))


@pytest.mark.skipif("fbgemm" not in available(), reason="needs fbgemm_gpu")
def test_fbgemms_own_enum_is_understood() -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType as TheirOptimType

    assert all(optim_type(TheirOptimType(kind.value)) is kind for kind in EmbOptimType)


def test_a_torch_optimizer_becomes_its_fused_twin_with_its_own_defaults() -> None:
    assert OptimizerSpec.from_optimizer(torch.optim.SGD).learning_rate == 1e-3
    assert OptimizerSpec.from_optimizer(torch.optim.Adagrad) == OptimizerSpec(EmbOptimType.EXACT_ADAGRAD, 0.01, 1e-10)
    spec = OptimizerSpec.from_optimizer(RowWiseAdagrad, {"lr": 0.2, "weight_decay": 0.1})
    assert spec == OptimizerSpec(ROWWISE, 0.2, 1e-8, 0.1)


@pytest.mark.parametrize(
    ("optimizer", "kwargs", "message"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, r"SGD\(momentum=0.9\) cannot run inside backward"),
        (torch.optim.SGD, {"weight_decay": 0.1}, r"SGD\(weight_decay=0.1\) cannot"),
        (torch.optim.Adagrad, {"initial_accumulator_value": 1.0}, "initial_accumulator_value"),
        (torch.optim.SGD, {"learning_rate": 1.0}, r"SGD has no argument \['learning_rate'\]"),
        (torch.optim.Adam, {}, "Adam has no fused twin: choose one of SGD, Adagrad, RowWiseAdagrad"),
    ],
)
def test_an_argument_that_would_be_lost_is_refused(
    optimizer: type[torch.optim.Optimizer], kwargs: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerSpec.from_optimizer(optimizer, kwargs)


def test_an_optimizer_in_backward_steps_without_being_called() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1})
    dense = RowWiseAdagrad(twin.parameters(), lr=0.1)
    for _ in range(3):
        inputs = torch.randn(4, 3)
        model(inputs).square().sum().backward()
        dense.zero_grad()
        twin(inputs).square().sum().backward()
        dense.step()
    for own, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert own.grad is None
        torch.testing.assert_close(own, expected)


def test_the_choice_can_be_read_back_even_on_meta() -> None:
    weight, other = (nn.Parameter(torch.empty(4, 4, device="meta")) for _ in range(2))
    apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.5})
    assert spec_of_parameter(weight) == OptimizerSpec(EmbOptimType.EXACT_SGD, 0.5)
    assert spec_of_parameter(other) is None


def test_a_second_optimizer_in_backward_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2))
    apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.5})
    with pytest.raises(ValueError, match="has SGD in backward already"):
        apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.5})
