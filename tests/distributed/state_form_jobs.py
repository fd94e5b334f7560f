"""What ranks run in the tests of the forms of a state dict: whole on chosen ranks, and as DTensors."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import Tensor

from recshard_lab import ShardingPlan
from recshard_lab.distributed import ShardingEnv
from recshard_lab.optim import CombinedOptimizer
from recshard_lab.optim.keyed import local_shards
from recshard_lab.sharding import EmbeddingModuleShardingPlan
from tests.distributed import state_jobs, two_dimensional_jobs
from tests.distributed.cases import PATH
from tests.distributed.jobs import Case, Model, attempted


def gathered(case: Case) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The whole state dict in all four forms, and the unsharded model's."""
    dmp = state_jobs.build(case)
    forms = [
        dmp.full_state_dict(rank0_only=only, cpu_offload=offload) for only in (False, True) for offload in (False, True)
    ]
    return forms, dict(Model(case).state_dict())


def gathered_from_replicas(case: Case) -> list[str]:
    """Names that this rank receives from two replicas on one rank each."""
    return list(two_dimensional_jobs.build(case, 1).full_state_dict(rank0_only=True))


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what differs in any bit."""
    return state_jobs.same(
        {k: v.detach().cpu() for k, v in one.items()}, {k: v.detach().cpu() for k, v in other.items()}
    )


# ---- DTensors ----


def joined(value: Any) -> Tensor:
    """A DTensor over local shards, whole on every rank; other tensors as they are."""
    if not hasattr(value, "to_local"):
        return value.detach().cpu().clone()
    with torch.no_grad():
        local = value.to_local()
    pieces = [(tuple(o), t.detach().cpu()) for o, t in zip(local.local_offsets(), local.local_shards(), strict=True)]
    by_rank: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(by_rank, pieces)
    every = [piece for pieces in by_rank for piece in pieces]
    whole = torch.zeros(tuple(value.shape), dtype=every[0][1].dtype)
    assert sum(tensor.numel() for _, tensor in every) == whole.numel()
    for offsets, tensor in every:
        whole[tuple(slice(start, start + n) for start, n in zip(offsets, tensor.shape, strict=True))] = tensor
    return whole


def tensors_of(value: Any) -> list[Tensor]:
    """This rank's tensors of a value in any form."""
    shards = local_shards(value)
    return [value] if shards is None else [tensor for _, tensor in shards]


def content(dmp: Any, form: str) -> dict[str, Any]:
    """Weights and fused states, for torch's checkpoints."""
    return {"model": dmp.state_dict(form=form), "optim": dmp.fused_optimizer.state_dict(form=form)}


def as_dtensors(case: Case) -> tuple[list[str], dict[str, list[str]], bool]:
    """What differs from the unsharded weights and from the other form, placements by name, whether memory is shared."""
    dmp = state_jobs.build(case)
    weights = dmp.state_dict(form="dtensor")
    wrong = differing({name: joined(value) for name, value in weights.items()}, dict(Model(case).state_dict()))
    assert list(weights) == list(dmp.state_dict())
    state_jobs.scramble(dmp)
    state = content(dmp, "dtensor")
    placements = {
        name: [str(p) for p in v.placements] for name, v in state["model"].items() if hasattr(v, "placements")
    }
    found = {name: joined(value) for name, value in state["model"].items()}
    for key, entry in state["optim"]["state"].items():
        found |= {f"{key}/{name}": joined(value) for name, value in entry.items()}
    wrong += state_jobs.same(found, state_jobs.everything(dmp))
    shared = all(
        any(tensor.data_ptr() == own.data_ptr() for own in shards.local_weights.values())
        for name, shards in dmp.table_shards().items()
        for tensor in tensors_of(state["model"][name])
    )
    return wrong, placements, shared


def through_torch(saved: Case, loaded: Case, path: str, forms: tuple[str, str], ranks: int) -> list[str]:
    """What differs after torch saved one model and loaded it into another plan on the first ``ranks`` ranks."""
    dmp = state_jobs.build(saved)
    state_jobs.scramble(dmp)
    truth = state_jobs.everything(dmp)
    dcp.save(content(dmp, forms[0]), checkpoint_id=path)
    group = torch.distributed.new_group(list(range(ranks)))
    if torch.distributed.get_rank() >= ranks:
        return []
    other = state_jobs.build(loaded, env=ShardingEnv.from_process_group(group))
    state = content(other, forms[1])
    dcp.load(state, checkpoint_id=path, process_group=group)
    other.load_state_dict(state["model"])
    other.fused_optimizer.load_state_dict(state["optim"])
    return state_jobs.same(truth, state_jobs.everything(other))


def between_forms(case: Case) -> list[str]:
    """What differs after each form was loaded into a model of the same plan, replicas included."""
    wrong = []
    for form in ("dtensor", "sharded_tensor"):
        dmp, other = state_jobs.build(case), state_jobs.build(case)
        state_jobs.scramble(dmp)
        other.load_state_dict(dmp.state_dict(form=form))
        other.fused_optimizer.load_state_dict(dmp.fused_optimizer.state_dict(form=form))
        wrong += state_jobs.same(state_jobs.everything(dmp), state_jobs.everything(other))
        for shards, twin in zip(dmp.table_shards().values(), other.table_shards().values(), strict=True):
            for part in shards.parts():
                copies = twin.matrices(part)
                wrong += [part.name for n, matrix in shards.matrices(part).items() if not matrix.equal(copies[n])]
    return wrong


def refusals(case: Case, grid: str, other: str) -> list[str]:
    """Errors of a grid table, of an unknown form, and of weights and states of another plan."""
    dmp, moved = state_jobs.build(case), state_jobs.build(case, other)
    tiled = state_jobs.build(case, grid)
    attempts: list[Any] = [
        lambda: tiled.state_dict(form="dtensor"),
        lambda: tiled.fused_optimizer.state_dict(form="dtensor"),
        lambda: dmp.state_dict(form="tensor"),
        lambda: dmp.load_state_dict(moved.state_dict(form="dtensor")),
        lambda: dmp.fused_optimizer.load_state_dict(moved.fused_optimizer.state_dict(form="dtensor")),
    ]
    return [attempted(attempt) for attempt in attempts]


# ---- torch.distributed.checkpoint.state_dict ----


def through_torchs_functions(saved: Case, loaded: Case, path: str, is_dtensor: bool) -> tuple[list[str], list[str]]:
    """What differs after torch's functions read one model and filled others, and the types of sharded tensors."""
    dmp, other, third = (state_jobs.build(case, output_dtensor=is_dtensor) for case in (saved, loaded, loaded))
    state_jobs.scramble(dmp)
    truth = dmp.full_state_dict()
    dcp.save(state := dcp_state.get_model_state_dict(dmp), checkpoint_id=path)
    types = sorted({type(value).__name__ for value in state.values()} - {"Tensor"})
    wrong = differing(dict.fromkeys(dmp.state_dict(), torch.empty(0)), dict.fromkeys(state, torch.empty(0)))
    dcp.load(target := dcp_state.get_model_state_dict(other), checkpoint_id=path)
    dcp_state.set_model_state_dict(other, target)
    wrong += differing(truth, other.full_state_dict())
    is_full = dcp_state.StateDictOptions(full_state_dict=True)
    wrong += differing(truth, whole := dcp_state.get_model_state_dict(dmp, options=is_full))
    dcp_state.set_model_state_dict(third, whole, options=is_full)
    wrong += differing(truth, third.full_state_dict())
    on_rank_0 = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = dcp_state.get_model_state_dict(dmp, options=on_rank_0)
    wrong += differing(truth if torch.distributed.get_rank() == 0 else {}, whole)
    return wrong + _dense_optimizer(dmp, third), types


def _dense_optimizer(dmp: Any, other: Any) -> list[str]:
    """What differs after torch's functions read the states of a dense optimizer and filled another one."""
    states = []
    for model in (dmp, other):
        adam = torch.optim.Adam(model.dense_parameters())
        if model is dmp:
            for parameter in model.dense_parameters():
                parameter.grad = torch.ones_like(parameter)
            adam.step()
            read = dcp_state.get_optimizer_state_dict(model, adam)
        else:
            dcp_state.set_optimizer_state_dict(model, adam, read)
        entries = adam.state_dict()["state"]
        states.append({f"{n}/{key}": value for n, entry in entries.items() for key, value in entry.items()})
    names = sorted(read["state"])
    return differing(*states) + [name for name in ("dense.bias", "dense.weight") if name not in names]


def refused_by_torchs_functions(case: Case) -> list[str]:
    """Errors of torch's functions with fused optimizers, a sharded table on the dense kernel, and a broadcast."""
    dmp = state_jobs.build(case)
    plan = ShardingPlan.from_json(case.plan).plan[PATH]
    by_torch = {name: replace(sharding, compute_kernel="dense") for name, sharding in plan.items()}
    dense = state_jobs.build(case, ShardingPlan({PATH: EmbeddingModuleShardingPlan(by_torch)}).to_json())
    combined = CombinedOptimizer([("fused", dmp.fused_optimizer)])
    adam = torch.optim.Adam(dense.dense_parameters())
    broadcast = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    return [
        attempted(attempt)
        for attempt in (
            lambda: dcp_state.get_optimizer_state_dict(dmp, dmp.fused_optimizer),
            lambda: dcp_state.get_state_dict(dmp, combined),
            lambda: dcp_state.set_optimizer_state_dict(dmp, dmp.fused_optimizer, {"state": {}, "param_groups": []}),
            lambda: dcp_state.get_optimizer_state_dict(dense, adam),
            lambda: dcp_state.set_model_state_dict(dmp, dmp.full_state_dict(), options=broadcast),
        )
    ]
