"""Optimizer rules against formulas written out, what specs refuse, and gradients that are not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from recshard_lab.embedding import (
    DataType,
    EmbeddingBagConfig,
    EmbOptimType,
    FusedEmbeddingBagCollection,
    OptimizerSpec,
    RowWiseAdagrad,
    WeightDecayMode,
    apply_optimizer_in_backward,
    optimizers,
)
from recshard_lab.embedding.kernels import KernelSpec, ShardSpec, available, choose_kernel
from recshard_lab.embedding.kernels.native import NativeKernel
from recshard_lab.embedding.optimizers import spec_from_optimizer
from recshard_lab.planner.workload import OPTIMIZER_STATE_BYTES, ROW_SUMS
from recshard_lab.sharding import Topology
from recshard_lab.sparse import KeyedJaggedTensor
from tests.embedding.lookups import look_up

ROWWISE = EmbOptimType.EXACT_ROWWISE_ADAGRAD


def by_hand(
    kind: str, weight: list[float], grads: list[list[float]], lr: float, eps: float, decay: float
) -> list[float]:
    """One row stepped with several gradients, number by number."""
    beta1, beta2, momentum, eta = 0.8, 0.95, 0.7, 0.3
    w, m, v = list(weight), [0.0] * len(weight), [0.0] * len(weight)
    for t, g in enumerate(grads, 1):
        size = len(w)
        w_norm = math.sqrt(sum(x * x for x in w))
        if kind == "row adagrad":
            g = [x + decay * y for x, y in zip(g, w, strict=True)]
            v = [v[0] + sum(x * x for x in g) / size] * size
            w = [y - lr * x / (math.sqrt(v[0]) + eps) for y, x in zip(w, g, strict=True)]
            continue
        if kind == "lars":
            g_norm = math.sqrt(sum(x * x for x in g))
            local = lr * eta * w_norm / (g_norm + decay * w_norm)
            m = [momentum * a + local * (x + decay * y) for a, x, y in zip(m, g, w, strict=True)]
            w = [x - a for x, a in zip(w, m, strict=True)]
            continue
        square = [x * x for x in g] if kind in ("adam", "lamb") else [sum(x * x for x in g) / size] * size
        m = [beta1 * a + (1 - beta1) * x for a, x in zip(m, g, strict=True)]
        v = [beta2 * a + (1 - beta2) * x for a, x in zip(v, square, strict=True)]
        unbiased = [a / (1 - beta1**t) / (math.sqrt(b / (1 - beta2**t)) + eps) for a, b in zip(m, v, strict=True)]
        r = [x + decay * y for x, y in zip(unbiased, w, strict=True)]
        ratio = w_norm / math.sqrt(sum(x * x for x in r)) if "lamb" in kind else 1.0
        w = [y - lr * ratio * x for y, x in zip(w, r, strict=True)]
    return w


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("row adagrad", lambda ps, **kw: RowWiseAdagrad(ps, eps=1e-3, **kw)),
        ("adam", lambda ps, **kw: torch.optim.AdamW(ps, betas=(0.8, 0.95), eps=1e-3, **kw)),
        ("row adam", lambda ps, **kw: optimizers.PartialRowWiseAdam(ps, betas=(0.8, 0.95), eps=1e-3, **kw)),
        ("lamb", lambda ps, **kw: optimizers.LAMB(ps, betas=(0.8, 0.95), eps=1e-3, **kw)),
        ("row lamb", lambda ps, **kw: optimizers.PartialRowWiseLAMB(ps, betas=(0.8, 0.95), eps=1e-3, **kw)),
        ("lars", lambda ps, **kw: optimizers.LarsSGD(ps, momentum=0.7, eta=0.3, **kw)),
    ],
)
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_the_dense_optimizers_follow_their_formulas(kind: str, make: Any, decay: float) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    start, grads = weight.detach().clone(), torch.randn(4, 3, 4, dtype=torch.float64)
    optimizer = make([weight], lr=0.1, weight_decay=decay)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    for row in range(3):
        expected = by_hand(kind, start[row].tolist(), grads[:, row].tolist(), 0.1, 1e-3, decay)
        assert weight[row].tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "make",
    [RowWiseAdagrad, optimizers.PartialRowWiseAdam, optimizers.LAMB, optimizers.PartialRowWiseLAMB, optimizers.LarsSGD],
)
def test_a_dense_optimizer_leaves_rows_without_gradient_alone(make: Any) -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    optimizer = make([weight], lr=0.1, weight_decay=0.1)
    for touched in ([0, 1, 2], [1]):
        before = weight.detach().clone()
        state = {name: value.clone() for name, value in optimizer.state[weight].items()}
        weight.grad = torch.zeros(3, 4)
        weight.grad[touched] = torch.rand(len(touched), 4) + 0.1
        optimizer.step()
        for row in range(3):
            assert torch.equal(weight[row], before[row]) == (row not in touched)
    for name, value in optimizer.state[weight].items():
        if value.dim():
            assert torch.equal(value[0], state[name][0])
            assert not torch.equal(value[1], state[name][1])


@pytest.mark.parametrize("make", [RowWiseAdagrad, optimizers.PartialRowWiseAdam, optimizers.LAMB, optimizers.LarsSGD])
def test_a_dense_optimizer_refuses_numbers_that_make_no_step(make: Any) -> None:
    with pytest.raises(ValueError, match="lr must be a finite number >= 0, got -1"):
        make([nn.Parameter(torch.ones(1))], lr=-1)


def state_of(spec: OptimizerSpec, rows: int) -> dict[str, torch.Tensor]:
    """The state of a piece of four columns at the start."""
    return {name: torch.zeros(shape) for name, shape in spec.state_shapes(rows, 4).items() if name != "iter"}


@pytest.mark.parametrize("optimizer", list(EmbOptimType))
def test_rows_are_no_longer_than_max_norm_after_a_step(optimizer: EmbOptimType) -> None:
    torch.manual_seed(0)
    plain, bounded = OptimizerSpec(optimizer, 0.3, 1e-3), OptimizerSpec(optimizer, 0.3, 1e-3, max_norm=1.5)
    weights = [torch.randn(5, 4)] * 2
    weights = [weight.clone() for weight in weights]
    states = [state_of(plain, 5) for _ in range(2)]
    rows, grad = torch.tensor([0, 1, 3]), torch.randn(3, 4)
    for spec, weight, state in zip((plain, bounded), weights, states, strict=True):
        optimizers.step(spec, weight, state, rows, grad.clone(), None, 4)
    expected = weights[0].clone()
    expected[rows] = torch.renorm(weights[0][rows], 2, 0, 1.5)
    torch.testing.assert_close(weights[1], expected)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_state_has_fbgemms_names_and_one_number_a_row_where_row_wise() -> None:
    shapes = {kind: OptimizerSpec(kind).state_shapes(10, 4) for kind in EmbOptimType}
    assert shapes == {
        EmbOptimType.EXACT_SGD: {},
        EmbOptimType.EXACT_ADAGRAD: {"momentum1": (10, 4)},
        EmbOptimType.EXACT_ROWWISE_ADAGRAD: {"momentum1": (10,)},
        EmbOptimType.ADAM: {"momentum1": (10, 4), "momentum2": (10, 4), "iter": (1,)},
        EmbOptimType.PARTIAL_ROWWISE_ADAM: {"momentum1": (10, 4), "momentum2": (10,), "iter": (1,)},
        EmbOptimType.LAMB: {"momentum1": (10, 4), "momentum2": (10, 4), "iter": (1,)},
        EmbOptimType.PARTIAL_ROWWISE_LAMB: {"momentum1": (10, 4), "momentum2": (10,), "iter": (1,)},
        EmbOptimType.LARS_SGD: {"momentum1": (10, 4)},
    }
    rounds = {kind.value: OptimizerSpec(kind).row_norm_rounds for kind in EmbOptimType}
    assert {name for name, number in rounds.items() if number == 0} == {"exact_sgd", "exact_adagrad", "adam"}
    assert {name for name, number in rounds.items() if number == 2} == {"partial_row_wise_lamb"}
    assert OptimizerSpec(max_norm=1.0).row_norm_rounds == 1


def test_the_planner_knows_the_state_of_every_optimizer() -> None:
    assert {kind.value for kind in EmbOptimType if OptimizerSpec(kind).row_wise} == set(ROW_SUMS)
    assert all(
        {kind.value for kind in EmbOptimType} <= set(Topology(2, device).update_cost) for device in ("cpu", "cuda")
    )
    for kind in EmbOptimType:
        per_row, per_element = OPTIMIZER_STATE_BYTES[kind.value]
        shapes = OptimizerSpec(kind).state_shapes(10, 4)
        assert sum(4 * math.prod(shape) for name, shape in shapes.items() if name != "iter") == 10 * (
            per_row + 4 * per_element
        )


def test_fused_params_are_read() -> None:
    given = {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.5, "eps": 0.1}
    assert OptimizerSpec.from_fused_params(given) == OptimizerSpec(ROWWISE, 0.5, 0.1)
    assert OptimizerSpec.from_fused_params(None) == OptimizerSpec(EmbOptimType.EXACT_SGD, 0.01)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": "lamb", "weight_decay": 0.1, "weight_decay_mode": "L2"}, "has weight decay inside its formula"),
        ({"nesterov": True}, r"fused_params has unknown keys \['nesterov'\]"),
        ({"optimizer": "shampoo"}, r"optimizer 'shampoo' is not supported\. Fix: choose one of exact_sgd"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number >= 0, got nan"),
        ({"momentum": 0.5}, r"momentum=0.5 is not read by exact_sgd. Fix: leave it out, or use \['lars_sgd'\]"),
        ({"optimizer": "exact_adagrad", "beta1": 0.5}, r"beta1=0.5 is not read by exact_adagrad.*'adam'"),
        ({"optimizer": "adam", "beta2": 1.0}, "beta2 must be a number from 0 to below 1, got 1.0"),
        ({"max_gradient": 0.5}, "max_gradient=0.5 has no effect. Fix: add gradient_clipping=True"),
        ({"gradient_clipping": 1}, "gradient_clipping must be True or False, got 1"),
        ({"weight_decay": 0.1, "weight_decay_mode": 0}, "with weight_decay_mode NONE has no effect"),
        ({"weight_decay": 0.1, "weight_decay_mode": 3}, "weight_decay_mode 3 is not supported. Fix: choose one of"),
    ],
)
def test_what_a_formula_does_not_read_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerSpec.from_fused_params(given)


@pytest.mark.skipif("fbgemm" not in available(), reason="needs fbgemm_gpu")
def test_fbgemms_own_enum_is_understood() -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType as TheirOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode as TheirMode

    assert all(optimizers.optim_type(TheirOptimType(kind.value)) is kind for kind in EmbOptimType)
    assert all(TheirOptimType(kind.value).name == kind.name for kind in EmbOptimType)
    spec = OptimizerSpec(weight_decay=0.1, weight_decay_mode=TheirMode.DECOUPLE)
    assert spec.weight_decay_mode is WeightDecayMode.DECOUPLE


def test_a_torch_optimizer_becomes_its_fused_twin_with_its_own_defaults() -> None:
    assert spec_from_optimizer(torch.optim.SGD).learning_rate == 1e-3
    assert spec_from_optimizer(torch.optim.Adagrad) == OptimizerSpec(EmbOptimType.EXACT_ADAGRAD, 0.01, 1e-10)
    spec = spec_from_optimizer(RowWiseAdagrad, {"lr": 0.2, "weight_decay": 0.1})
    assert spec == OptimizerSpec(ROWWISE, 0.2, 1e-10, 0.1)
    spec = spec_from_optimizer(torch.optim.AdamW, {"lr": torch.tensor(0.5), "betas": (0.7, 0.8)})
    decoupled = WeightDecayMode.DECOUPLE
    assert spec == OptimizerSpec(EmbOptimType.ADAM, 0.5, 1e-8, 0.01, decoupled, beta1=0.7, beta2=0.8)
    assert spec_from_optimizer(torch.optim.Adam, {"weight_decay": 0.1}).weight_decay_mode is WeightDecayMode.L2
    spec = spec_from_optimizer(optimizers.LarsSGD, {"momentum": 0.5, "eta": 0.1})
    assert spec == OptimizerSpec(EmbOptimType.LARS_SGD, momentum=0.5, eta=0.1)
    for kind, optimizer in [("lamb", optimizers.LAMB), ("partial_row_wise_lamb", optimizers.PartialRowWiseLAMB)]:
        assert spec_from_optimizer(optimizer, {"weight_decay": 0.1}) == OptimizerSpec(kind, weight_decay=0.1)
    kind = EmbOptimType.PARTIAL_ROWWISE_ADAM
    assert spec_from_optimizer(optimizers.PartialRowWiseAdam, {"lr": 0.1}) == OptimizerSpec(kind, 0.1)


@pytest.mark.parametrize(
    ("optimizer", "kwargs", "message"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, r"SGD\(momentum=0.9\) cannot run inside backward"),
        (torch.optim.Adam, {"amsgrad": True}, r"Adam\(amsgrad=True\) cannot run inside backward"),
        (RowWiseAdagrad, {"lr_decay": 0.1}, r"RowWiseAdagrad\(lr_decay=0.1\) cannot run inside backward"),
        (torch.optim.Adagrad, {"initial_accumulator_value": 1.0}, "initial_accumulator_value"),
        (torch.optim.SGD, {"learning_rate": 1.0}, r"SGD has no argument \['learning_rate'\]"),
        (torch.optim.RMSprop, {}, "RMSprop has no fused equal. Fix: choose one of SGD, Adagrad, Adam, AdamW"),
    ],
)
def test_an_argument_that_would_be_lost_is_refused(optimizer: Any, kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_from_optimizer(optimizer, kwargs)


def test_a_second_optimizer_in_backward_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2))
    apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.5})
    with pytest.raises(ValueError, match="has SGD in backward already"):
        apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.5})


CHECKED = OptimizerSpec(EmbOptimType.ADAM, check_gradients=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_is_named_before_a_weight_moves(bad: float) -> None:
    shards = [ShardSpec("users", 5, 4, DataType.FP32, 4), ShardSpec("movies", 9, 4, DataType.FP32, 4, first_row=100)]
    kernel = NativeKernel(KernelSpec(shards, [0, 1], CHECKED))
    _, saved = look_up(kernel, torch.tensor([1, 2, 6, 6]), torch.tensor([0, 1, 2, 3, 4]))
    grad = torch.ones(2, 8)
    grad[1, 5] = bad
    message = r"table 'movies', row 106, is not finite \(1 of 4 numbers; 1 such rows at hand\): no weight"
    with pytest.raises(ValueError, match=message):
        kernel.backward(saved, grad)
    assert not any(weight.any() for weight in kernel.weights())
    assert not any(state.any() for states in kernel.optimizer_states() for state in states.values())
    grad[1, 5] = 1.0
    kernel.backward(saved, grad)
    assert all(weight.any() for weight in kernel.weights())


def test_checking_is_refused_by_kernels_that_do_not_check_and_native_is_taken() -> None:
    spec = KernelSpec([ShardSpec("t", 4, 4, DataType.FP32, 4)], [0], OptimizerSpec(check_gradients=True))
    assert choose_kernel(spec) is NativeKernel


def test_tables_that_have_taken_different_numbers_of_steps_are_each_corrected_by_their_own() -> None:
    """As after loading one of them from a checkpoint."""
    spec, lengths = OptimizerSpec(EmbOptimType.ADAM, 0.1), torch.tensor([0, 1, 2])
    shards = [ShardSpec(name, 3, 4, DataType.FP32, 4) for name in "ab"]
    together = NativeKernel(KernelSpec(shards, [0, 1], spec))
    apart = [NativeKernel(KernelSpec([shard], [0], spec)) for shard in shards]
    together.optimizer_states()[1]["iter"].fill_(5)
    apart[1].optimizer_states()[0]["iter"].fill_(5)
    for _ in range(2):
        _, saved = look_up(together, torch.tensor([1, 2]), lengths)
        together.backward(saved, torch.ones(1, 8))
        for number, kernel in enumerate(apart):
            _, saved = look_up(kernel, torch.tensor([number + 1]), lengths[:2])
            kernel.backward(saved, torch.ones(1, 4))
    for number, kernel in enumerate(apart):
        torch.testing.assert_close(together.weights()[number], kernel.weights()[0])
    assert not torch.equal(*together.weights())


@pytest.mark.parametrize(
    ("optimizer", "kwargs"),
    [
        (RowWiseAdagrad, {"lr": 0.1}),
        (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.2}),
        (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.2, "betas": (0.7, 0.9)}),
        (optimizers.PartialRowWiseAdam, {"lr": 0.1}),
        (optimizers.LAMB, {"lr": 0.1, "weight_decay": 0.1}),
        (optimizers.LarsSGD, {"lr": 0.1, "eta": 0.5}),
    ],
)
def test_an_optimizer_in_backward_and_its_fused_twin_step_alike(optimizer: Any, kwargs: dict[str, Any]) -> None:
    """Every row is touched in every step: then the dense optimizer is the truth as it stands."""
    torch.manual_seed(0)
    table = EmbeddingBagConfig(3, 4, "t", feature_names=["f"])
    fused = FusedEmbeddingBagCollection([table], optimizer, kwargs, backend="native")
    weight = nn.Parameter(fused.embedding_bags["t"].weight.detach().clone())
    apply_optimizer_in_backward(optimizer, [weight], kwargs)
    for _ in range(4):
        ids = torch.tensor([0, 1, 2, 2, 1, 0, 0])
        features = KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([3, 4]))
        mixing = torch.randn(2, 4)
        (fused(features).values() * mixing).sum().backward()
        (torch.stack([weight[ids[:3]].sum(0), weight[ids[3:]].sum(0)]) * mixing).sum().backward()
        torch.testing.assert_close(fused.embedding_bags["t"].weight.detach(), weight.detach(), atol=1e-6, rtol=1e-5)
        assert weight.grad is None
