"""Optimizers: clipping, keyed and combined ones, warm-up, row-wise Adagrad, semi-synchronous steps, in backward."""

import copy
import math
from typing import Any

import torch
from torch import nn
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad, adagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from tests.compat.parity.case import case, raised

OPTIM = "torchrec.optim"


def keyed(name: str = "w", momentum: float = 0.0, lr: float = 0.1) -> tuple[nn.Parameter, KeyedOptimizerWrapper]:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    return weight, KeyedOptimizerWrapper({name: weight}, lambda ps: torch.optim.SGD(ps, lr=lr, momentum=momentum))


def clipped(kind: GradientClipping, **options: Any) -> Any:
    weight, inner = keyed()
    optimizer = GradientClippingOptimizer(inner, kind, **options)
    weight.grad = torch.tensor([3.0, -4.0])
    optimizer.step()
    return {"weight": weight, "grad": weight.grad, "norm": optimizer.last_total_grad_norm}


@case(f"{OPTIM}.clipping.GradientClippingOptimizer", f"{OPTIM}.clipping.GradientClipping")
def clipping_by_norm() -> Any:
    return [clipped(GradientClipping.NORM, max_gradient=limit) for limit in (0.0, 0.1, 1.0, 10.0)]


@case(f"{OPTIM}.clipping.GradientClippingOptimizer")
def clipping_by_value() -> Any:
    return [clipped(GradientClipping.VALUE, max_gradient=limit) for limit in (0.0, 1.0, 10.0)]


@case(f"{OPTIM}.clipping.GradientClippingOptimizer")
def clipping_by_other_norms() -> Any:
    norms = (1.0, 3.0, "inf", math.inf)
    return [clipped(GradientClipping.NORM, max_gradient=1.0, norm_type=norm) for norm in norms]


@case(f"{OPTIM}.clipping.GradientClippingOptimizer")
def norms_are_tracked() -> Any:
    kinds = (GradientClipping.NONE, GradientClipping.VALUE, GradientClipping.NORM)
    return [clipped(kind, max_gradient=1.0, track_grad_norm=track) for kind in kinds for track in (False, True)]


@case(f"{OPTIM}.clipping.GradientClippingOptimizer")
def clip_grad_norm() -> Any:
    weight, inner = keyed()
    optimizer = GradientClippingOptimizer(inner, GradientClipping.NORM, max_gradient=1.0)
    weight.grad = torch.tensor([3.0, 4.0])
    total = optimizer.clip_grad_norm_()
    return {"total": total, "grad": weight.grad, "weight": weight, "last": optimizer.last_total_grad_norm}


@case(f"{OPTIM}.clipping.GradientClippingOptimizer")
def clip_grad_norm_under_value() -> Any:
    weight, inner = keyed()
    optimizer = GradientClippingOptimizer(inner, GradientClipping.VALUE, max_gradient=1.0)
    weight.grad = torch.tensor([3.0, 4.0])
    return {"total": optimizer.clip_grad_norm_(), "grad": weight.grad}


@case(f"{OPTIM}.clipping.GradientClippingOptimizer")
def total_grad_norm() -> Any:
    weight, inner = keyed()
    optimizer = GradientClippingOptimizer(inner, GradientClipping.NORM, max_gradient=1.0)
    weight.grad = torch.tensor([3.0, 4.0])
    total, grads = optimizer.compute_total_grad_norm()
    return {"total": total, "grads": grads, "grad": weight.grad}


@case(f"{OPTIM}.clipping.GradientClippingOptimizer")
def clipping_a_combination() -> Any:
    (one, first), (two, second) = keyed(), keyed("v")
    optimizer = GradientClippingOptimizer(
        CombinedOptimizer([("a", first), ("b", second)]), GradientClipping.NORM, max_gradient=1.0
    )
    one.grad, two.grad = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0])
    optimizer.step()
    return {"one": one, "two": two, "norm": optimizer.last_total_grad_norm, "params": list(optimizer.params)}


@case(f"{OPTIM}.keyed.KeyedOptimizerWrapper")
def keyed_state() -> Any:
    weight, optimizer = keyed(momentum=0.9)
    before = optimizer.state_dict()
    weight.grad = torch.ones(2)
    optimizer.step()
    return {"before": before, "after": optimizer.state_dict(), "weight": weight, "params": list(optimizer.params)}


@case(f"{OPTIM}.keyed.KeyedOptimizer")
def keyed_state_is_loaded() -> Any:
    weight, optimizer = keyed(momentum=0.9)
    other_weight, other = keyed(momentum=0.9)
    for param, own in ((weight, optimizer), (other_weight, other)):
        param.grad = torch.ones(2)
        own.step()
    weight.grad = torch.ones(2)
    optimizer.step()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other.state_dict()


@case(f"{OPTIM}.keyed.KeyedOptimizer")
def keyed_state_that_does_not_fit() -> Any:
    (weight, optimizer), (_, fresh) = keyed(momentum=0.9), keyed(momentum=0.9)
    weight.grad = torch.ones(2)
    optimizer.step()
    saved = optimizer.state_dict()
    return [
        raised(lambda: fresh.load_state_dict(saved)),
        raised(lambda: optimizer.load_state_dict({"state": {"other": saved["state"]["w"]}})),
    ]


@case(f"{OPTIM}.keyed.KeyedOptimizer")
def keyed_param_groups() -> Any:
    _, optimizer = keyed(lr=0.25)
    plain = list(optimizer.state_dict())
    optimizer.save_param_groups(True)
    saved = optimizer.state_dict()
    (group,) = saved["param_groups"]
    return {"plain": plain, "saved": list(saved), "params": group["params"], "lr": group["lr"]}


@case(f"{OPTIM}.keyed.KeyedOptimizer")
def keyed_states_are_initialized() -> Any:
    weight, optimizer = keyed(momentum=0.9)
    optimizer.init_state()
    return {"state": optimizer.state_dict()["state"], "grad": weight.grad}


@case(f"{OPTIM}.keyed.KeyedOptimizer")
def groups_cannot_be_added() -> Any:
    weight, optimizer = keyed()
    return raised(lambda: optimizer.add_param_group({"params": [weight]}))


@case(f"{OPTIM}.keyed.KeyedOptimizer")
def a_state_of_another_parameter() -> Any:
    weight, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    return raised(lambda: KeyedOptimizer({"w": weight}, {other: {}}, [{"params": [weight]}]))


@case(f"{OPTIM}.keyed.KeyedOptimizerWrapper")
def a_factory_of_names() -> Any:
    weight = nn.Parameter(torch.ones(2))
    seen: list[Any] = []

    def factory(params: Any) -> Any:
        seen.append(list(params))
        return torch.optim.SGD(list(params.values()), lr=1.0)

    KeyedOptimizerWrapper({"w": weight}, factory, True)
    return seen


@case(f"{OPTIM}.keyed.CombinedOptimizer")
def combined() -> Any:
    (one, first), (two, second) = keyed(momentum=0.9), keyed("v", momentum=0.9)
    optimizer = CombinedOptimizer([first, ("over", second)])
    one.grad = two.grad = torch.ones(2)
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.zero_grad()
    return {
        "state": state,
        "weights": [one, two],
        "prefixes": [prefix for prefix, _ in optimizer.optimizers],
        "key": [CombinedOptimizer.prepend_opt_key("w", prefix) for prefix in ("a", "")],
        "groups": len(optimizer.param_groups),
        "grads": [one.grad, two.grad],
    }


@case(f"{OPTIM}.keyed.CombinedOptimizer")
def combined_names_twice() -> Any:
    return raised(lambda: CombinedOptimizer([keyed()[1], keyed()[1]]))


@case(f"{OPTIM}.keyed.CombinedOptimizer")
def a_learning_rate_of_all() -> Any:
    (one, first), (two, second) = keyed(), keyed("v")
    optimizer = CombinedOptimizer([first, second])
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    one.grad = two.grad = torch.ones(2)
    optimizer.step()
    return [one, two]


@case(f"{OPTIM}.keyed.OptimizerWrapper")
def wrapped() -> Any:
    weight, inner = keyed(momentum=0.9)
    optimizer = OptimizerWrapper(inner)
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.set_optimizer_step(3)
    optimizer.update_hyper_parameters({})
    return {"weight": weight, "state": optimizer.state_dict(), "params": list(optimizer.params)}


@case(f"{OPTIM}.fused.EmptyFusedOptimizer", f"{OPTIM}.fused.FusedOptimizer")
def empty_fused_optimizer() -> Any:
    optimizer = EmptyFusedOptimizer()
    optimizer.step()
    optimizer.zero_grad()
    kinds = [isinstance(optimizer, kind) for kind in (FusedOptimizer, KeyedOptimizer, torch.optim.Optimizer)]
    return {"state": optimizer.state_dict(), "params": dict(optimizer.params), "kinds": kinds}


def rates(stages: list[WarmupStage], steps: int = 8, lr: float = 0.5) -> Any:
    weight, inner = keyed(lr=lr)
    optimizer = WarmupOptimizer(inner, stages, lr=lr)
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        weight.grad = torch.zeros(2)
        optimizer.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@case(f"{OPTIM}.warmup.WarmupOptimizer", f"{OPTIM}.warmup.WarmupStage")
def warmup_linear_then_constant() -> Any:
    return rates(
        [
            WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1),
            WarmupStage(WarmupPolicy.CONSTANT, max_iters=6, value=0.5),
        ]
    )


@case(f"{OPTIM}.warmup.WarmupPolicy")
def warmup_policies() -> Any:
    return {
        policy.value: rates([WarmupStage(policy, max_iters=6, value=0.5, decay_iters=8, lr_scale=2.0)])
        for policy in (WarmupPolicy.POLY, WarmupPolicy.STEP, WarmupPolicy.NONE)
    }


@case(f"{OPTIM}.rowwise_adagrad.RowWiseAdagrad")
def rowwise_adagrad_steps() -> Any:
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = RowWiseAdagrad([weight], lr=0.5, initial_accumulator_value=0.1, eps=1e-3)
    for _ in range(2):
        weight.grad = torch.tensor([[2.0, 2.0], [0.0, 0.0], [-1.0, 1.0]])
        optimizer.step()
    return {"weight": weight, "state": optimizer.state[weight]}


@case(f"{OPTIM}.rowwise_adagrad.RowWiseAdagrad")
def rowwise_adagrad_decays_and_climbs() -> Any:
    found = []
    for options in ({"lr_decay": 0.5}, {"maximize": True}, {"weight_decay": 0.1}):
        weight = nn.Parameter(torch.ones(2, 2))
        optimizer = RowWiseAdagrad([weight], lr=0.5, **options)  # type: ignore[arg-type]
        for _ in range(2):
            weight.grad = torch.tensor([[2.0, 2.0], [-1.0, 1.0]])
            optimizer.step()
        found.append(weight)
    return found


@case(f"{OPTIM}.rowwise_adagrad.adagrad")
def rowwise_adagrad_as_a_function() -> Any:
    found = []
    for change in ({}, {"weight_decay": 0.1}, {"maximize": True}, {"lr_decay": 0.5}, {"eps": 1.0}):
        options = {"lr": 0.1, "weight_decay": 0.0, "lr_decay": 0.0, "eps": 1e-10, "maximize": False, **change}
        weight, total, step = torch.ones(2, 3), torch.zeros(2, 1), torch.tensor(0.0)
        for _ in range(2):
            adagrad([weight], [torch.arange(6.0).reshape(2, 3)], [total], [step], **options)
        found.append([weight, total, step])
    return found


@case(f"{OPTIM}.rowwise_adagrad.adagrad")
def rowwise_adagrad_of_sparse_gradients() -> Any:
    grad = torch.ones(3, 2).to_sparse(1)
    options = {"lr": 0.1, "weight_decay": 0.0, "lr_decay": 0.0, "eps": 1e-10, "maximize": False}
    return raised(
        lambda: adagrad([torch.ones(3, 2)], [grad], [torch.zeros(3, 1)], [torch.tensor(0.0)], **options)  # type: ignore[arg-type]
    )


@case(f"{OPTIM}.apply_optimizer_in_backward.apply_optimizer_in_backward")
def steps_in_backward() -> Any:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
    apply_optimizer_in_backward(torch.optim.SGD, [model.weight], {"lr": 0.1})
    model(torch.ones(1, 2)).sum().backward()
    return {"weight": model.weight, "grad": model.weight.grad, "bias": model.bias.grad}


@case(f"{OPTIM}.optimizers.in_backward_optimizer_filter")
def parameters_with_an_optimizer_in_backward() -> Any:
    model = nn.Linear(2, 1)
    apply_optimizer_in_backward(torch.optim.SGD, [model.bias], {"lr": 0.1})
    found = [in_backward_optimizer_filter(model.named_parameters(), include) for include in (False, True)]
    return [[name for name, _ in own] for own in found]
