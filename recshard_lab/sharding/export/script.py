"""A training script for ``torchrun`` that runs a plan: one readable file to run and then edit."""

import dataclasses
import inspect
import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from recshard_lab.embedding.configs import BaseEmbeddingConfig, EmbeddingBagConfig
from recshard_lab.sharding.plan.types import PlanError, nearest

if TYPE_CHECKING:
    from recshard_lab.sharding.plan.sharding_plan import ShardingPlan

BAGS, ROWS = "bags", "rows"  # attributes of the stand-in model for its collections


@dataclasses.dataclass(frozen=True)
class Step:
    """The script's batches and optimizer.

    Attributes:
        batch_size: samples per rank.
        ids_per_bag: feature -> mean ids per bag. Default: 1.
        optimizer: optimizer of the tables, in fbgemm's spelling.
        weighted: whether ids have per-sample weights.
        local_world_size: ranks per node.
    """

    batch_size: int
    ids_per_bag: Mapping[str, float]
    optimizer: str
    weighted: bool
    local_world_size: int


@dataclasses.dataclass(frozen=True)
class Live:
    """Your model.

    Attributes:
        source: ``package.module:factory`` or ``path/file.py:factory``, as in `read_source`.
        module: the model.
        called: whether the script must call the name; False if the name is the model itself.
    """

    source: str
    module: Any
    called: bool = True


def script_of(
    plan: "ShardingPlan",
    tables: Mapping[str, Sequence[BaseEmbeddingConfig]],
    world_size: int,
    step: Step,
    live: Live | None = None,
) -> str:
    """The script's text.

    Raises:
        PlanError: a table with an ``init_fn``, which a script cannot express, or a model whose ``forward`` has
            unsupported arguments.
    """
    if live is None or "" in tables:  # a bare collection is wrapped, as a list of tables is
        plan, live = _at_stand_in_paths(plan, tables), None
        model, arguments = _stand_in_model(tables, step.weighted), "ids"
    else:
        model, arguments = _live_model(live), _call_of(live)
    configs = [table for entries in tables.values() for table in entries]
    nodes, local = world_size // step.local_world_size, step.local_world_size
    how = f"--nproc-per-node {local}" if nodes == 1 else f"--nnodes {nodes} --nproc-per-node {local}"
    rows: dict[str, int] = {}
    for table in configs:  # a feature may be read by several tables
        for feature in table.feature_names:
            rows[feature] = min(rows.get(feature, table.num_embeddings), table.num_embeddings)
    features = {feature: (rows[feature], float(step.ids_per_bag.get(feature, 1.0))) for feature in rows}
    return Template(_SCRIPT).substitute(
        count=f"{len(configs):,} table{'s' * (len(configs) != 1)}",
        ranks=f"{world_size} rank{'s' * (world_size != 1)}",
        how=f"{how} " if nodes == 1 else f"{how} --rdzv-backend c10d --rdzv-endpoint HOST:PORT ",
        world_size=world_size,
        batch_size=step.batch_size,
        optimizer=step.optimizer,
        features=_listed(features),
        plan=_one_line_a_table(plan),
        model=model,
        dense=_dense_width(live) if live is not None and arguments != "ids" else 0,
        weights=", weights=torch.rand(sum(map(len, values)), generator=draw)" if step.weighted else "",
        loss=_LOSS[arguments],
        sharders=_sharders(tables),
    )


def _listed(features: Mapping[str, tuple[int, float]]) -> str:
    return "{\n" + "".join(f"    {_quoted(name)}: ({e:_}, {k:g}),\n" for name, (e, k) in features.items()) + "}"


def _one_line_a_table(plan: "ShardingPlan") -> str:
    document = json.loads(plan.to_json())
    modules = document.pop("modules")
    listed = [
        f"  {_quoted(path)}: {{\n"
        + ",\n".join(f"   {_quoted(name)}: {json.dumps(entry)}" for name, entry in tables.items())
        + "}"
        for path, tables in modules.items()
    ]
    return json.dumps(document)[:-1] + ', "modules": {\n' + ",\n".join(listed) + "}}"


def _quoted(text: str) -> str:
    return json.dumps(text)


def _sharders(tables: Mapping[str, Sequence[BaseEmbeddingConfig]]) -> str:
    configs = [table for entries in tables.values() for table in entries]
    bags = {isinstance(table, EmbeddingBagConfig) for table in configs if not table.dynamic}
    names = ["EmbeddingBagCollectionSharder"] * (True in bags) + ["EmbeddingCollectionSharder"] * (False in bags)
    others = ["*rs.distributed.get_default_sharders()"] * any(table.dynamic for table in configs)
    return "[" + ", ".join([*(f"rs.distributed.{name}(fused)" for name in names), *others]) + "]"


# ---- the stand-in model ----


def _at_stand_in_paths(plan: "ShardingPlan", tables: Mapping[str, Sequence[BaseEmbeddingConfig]]) -> "ShardingPlan":
    from recshard_lab.sharding.plan.sharding_plan import EmbeddingModuleShardingPlan, ShardingPlan

    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    for path, entries in tables.items():
        for table in entries:
            attribute = BAGS if isinstance(table, EmbeddingBagConfig) else ROWS
            modules.setdefault(attribute, EmbeddingModuleShardingPlan())[table.name] = plan.plan[path][table.name]
    return ShardingPlan(modules)


def _stand_in_model(tables: Mapping[str, Sequence[BaseEmbeddingConfig]], weighted: bool) -> str:
    configs = [table for entries in tables.values() for table in entries]
    bags = [table for table in configs if isinstance(table, EmbeddingBagConfig)]
    rows = [table for table in configs if not isinstance(table, EmbeddingBagConfig)]
    create, read = [], []
    if bags:
        more = ", is_weighted=True" if weighted else ""
        create.append(f'self.{BAGS} = rs.EmbeddingBagCollection(BAG_TABLES, device="meta"{more})')
        read.append(f"self.{BAGS}(ids).values()")
    if rows:
        create.append(f'self.{ROWS} = rs.EmbeddingCollection(ROW_TABLES, device="meta")')
        read.append(f"*[summed(bags) for bags in self.{ROWS}(ids).values()]")
    width = sum(table.embedding_dim * table.num_features() for table in configs)
    return Template(_STAND_IN_MODEL).substitute(
        tables=_tables_text("BAG_TABLES", bags) + _tables_text("ROW_TABLES", rows),
        create="\n        ".join(create),
        read=", ".join(read),
        width=width,
        summed=_SUMMED if rows else "",
    )


def _tables_text(name: str, tables: Sequence[BaseEmbeddingConfig]) -> str:
    if not tables:
        return ""
    return f"{name} = [\n" + "".join(f"    {_config_text(table)},\n" for table in tables) + "]\n"


def _config_text(table: BaseEmbeddingConfig) -> str:
    if table.dynamic:
        raise PlanError(
            f"table {table.name!r} is dynamic, and the script's stand-in model has static tables. Fix: pass model=, "
            f"the package.module:factory that creates it"
        )
    if table.init_fn is not None:
        raise PlanError(
            f"table {table.name!r} has an init_fn, which a script cannot express. Fix: pass model=, the "
            f"package.module:factory that creates it"
        )
    arguments = [f"{table.num_embeddings:_}, {table.embedding_dim}, name={_quoted(table.name)}"]
    arguments.append(f"feature_names={json.dumps(list(table.feature_names))}")
    for spec in dataclasses.fields(table):
        value = getattr(table, spec.name)
        if spec.name in ("data_type", "pooling") and value != spec.default:
            arguments.append(f"{spec.name}=rs.{type(value).__name__}.{value.name}")
        elif spec.name.startswith("weight_init") and value is not None:
            arguments.append(f"{spec.name}={value!r}")
    return f"rs.{type(table).__name__}({', '.join(arguments)})"


# ---- your model ----


def _live_model(live: Live) -> str:
    """The script's ``make_model``."""
    place, _, name = live.source.rpartition(":")
    path = Path(place)
    lines = []
    if place.endswith(".py"):
        lines += ["import sys", "", f"sys.path.insert(0, {str(path.resolve().parent)!r})"]
        place = path.stem
    first, *rest = name.split(".")
    lines.append(f"from {place} import {first} as factory  # noqa: E402")
    body = ".".join(["factory", *rest]) + ("()" if live.called else "")
    built_there = any(parameter.is_meta for parameter in live.module.parameters())
    on_meta = live.called and built_there and _resets(live.module)
    lines += ["", "", "def make_model() -> nn.Module:"]
    if on_meta:
        lines += ['    """On meta: each rank allocates only its shards."""', '    with torch.device("meta"):']
        lines += [f"        return {body}"]
    else:
        lines += [
            '    """Whole on every rank: some of its modules have no reset_parameters()."""',
            f"    return {body}",
        ]
    return "\n".join(lines) + "\n"


def _resets(module: Any) -> bool:
    """Whether every module with weights can initialize them, as a model on meta must."""
    from recshard_lab.sharding.schemes.module_plan import configs_of

    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    resets = not tensors or callable(getattr(module, "reset_parameters", None))
    return configs_of(module) is not None or (resets and all(_resets(child) for child in module.children()))


def _call_of(live: Live) -> str:
    """The key in `_LOSS` for the model's ``forward``."""
    forward = type(live.module).forward
    name = type(live.module).__name__
    try:
        hints = typing.get_type_hints(forward)
    except NameError:
        hints = {}
    parameters = {
        parameter: str(getattr(hints.get(parameter), "__name__", hints.get(parameter, "?")))
        for parameter in list(inspect.signature(forward).parameters)[1:]
    }
    types = list(parameters.values())
    if list(parameters) == ["batch"]:
        return "batch"
    if types == ["KeyedJaggedTensor"]:
        return "ids"
    if types == ["Tensor", "KeyedJaggedTensor"]:
        return "dense_ids"
    signature = ", ".join(f"{parameter}: {kind}" for parameter, kind in parameters.items())
    raise PlanError(
        f"{name}.forward({signature}) has arguments for which a script cannot create batches. Fix: annotate "
        f"it as forward(ids: KeyedJaggedTensor), forward(dense: Tensor, ids: KeyedJaggedTensor) or forward(batch)"
    )


def _dense_width(live: Live) -> int:
    """Number of dense features of the model: ``in_features`` of its first ``dense_arch``."""
    for module in live.module.modules():
        arch = getattr(module, "dense_arch", None)
        width = getattr(arch, "in_features", None)
        if isinstance(width, int):
            return width
    known = [name for name, _ in live.module.named_modules()]
    raise PlanError(
        f"{type(live.module).__name__} takes dense features, but their number is unknown"
        f"{nearest('dense_arch', known)}. Fix: name the layer that reads them dense_arch, with .in_features"
    )


_FROM_LOGITS = """        logits = model(%s)
        loss = binary_cross_entropy_with_logits(logits.flatten(), batch.labels)"""
_LOSS = {
    "ids": _FROM_LOGITS % "batch.sparse_features",
    "dense_ids": _FROM_LOGITS % "batch.dense_features, batch.sparse_features",
    "batch": "        loss, _ = model(batch)",
}

_SUMMED = '''

def summed(bags: rs.JaggedTensor) -> Tensor:
    """The sum of the rows of each bag: [B, D]."""
    return torch.segment_reduce(bags.values(), "sum", lengths=bags.lengths().long(), unsafe=True)
'''

_STAND_IN_MODEL = '''$tables$summed

class Model(nn.Module):
    """A stand-in: the concatenated rows of all features, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        $create
        self.top = nn.Sequential(nn.Linear($width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: rs.KeyedJaggedTensor) -> Tensor:
        return self.top(torch.cat([$read], dim=1))


def make_model() -> nn.Module:
    """Tables on meta: each rank allocates only its shards."""
    return Model()
'''

_SCRIPT = '''"""Trains $count under a plan for $ranks. Written by recshard_lab, to be edited.

    torchrun ${how}THIS_FILE --steps 100

The batches are random: replace `batches` with your data.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import recshard_lab as rs
from recshard_lab.data import Batch
from recshard_lab.launcher import Place, join

WORLD_SIZE = $world_size
BATCH_SIZE = $batch_size  # samples per rank
FEATURES = $features  # rows of its table, mean ids per bag
DENSE_FEATURES = $dense

PLAN = r"""
$plan
"""

$model

def batches(rank: int, steps: int) -> Iterator[Batch]:
    """Random ids, seeded by rank."""
    draw = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        values, lengths = [], []
        for rows, ids in FEATURES.values():
            more = torch.rand(BATCH_SIZE, generator=draw) < ids - int(ids)
            lengths.append(int(ids) + more.int())
            values.append(torch.randint(rows, (int(lengths[-1].sum()),), generator=draw))
        sparse = rs.KeyedJaggedTensor(list(FEATURES), torch.cat(values), lengths=torch.cat(lengths)$weights)
        dense = torch.rand(BATCH_SIZE, DENSE_FEATURES, generator=draw)
        yield Batch(dense, sparse, torch.randint(2, (BATCH_SIZE,), generator=draw).float())


def train(place: Place, steps: int, checkpoint: str | None) -> None:
    if place.world_size != WORLD_SIZE:
        raise SystemExit(f"the plan is for {WORLD_SIZE} ranks, but {place.world_size} run. Fix: make a new plan")
    torch.manual_seed(0)
    fused = {"optimizer": "$optimizer", "learning_rate": 0.05}
    model = rs.DistributedModelParallel(
        make_model(),
        device=place.device,
        plan=rs.ShardingPlan.from_json(PLAN),
        sharders=$sharders,
    )
    dense = torch.optim.Adam(model.dense_parameters(), lr=1e-3)
    for step, batch in enumerate(batches(place.rank, steps), start=1):
        batch = batch.to(place.device)
$loss
        dense.zero_grad()
        loss.backward()
        dense.step()
        if place.rank == 0 and (step == steps or step % 10 == 0):
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if checkpoint is not None:
        rs.save_checkpoint(checkpoint, model, dense, extra={"steps": steps})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", help="a folder to save to at the end")
    options = parser.parse_args()
    with join() as place:
        train(place, options.steps, options.checkpoint)


if __name__ == "__main__":
    main()
'''


_SHELL = """#!/usr/bin/env bash
# Trains under a sharding plan with torchrun: bash THIS_FILE --steps 100. Written by recshard_lab.
{about}set -euo pipefail
script=$(mktemp -d)/train.py
trap 'rm -rf "$(dirname "$script")"' EXIT
cat >"$script" <<'END_OF_RECSHARD_SCRIPT'
{script}
END_OF_RECSHARD_SCRIPT
{command} "$script" "$@"
"""
_NODES = "# Run on every node, with the first node's name and a free port: RENDEZVOUS=host:29400 bash THIS_FILE\n"


def shell_of(script: str, world_size: int, local_world_size: int) -> str:
    """A shell file that contains a script, as `ShardingPlan.to_script` writes it, and starts it on `world_size` ranks.

    Args:
        script: the text of the Python file.
        world_size: ranks W.
        local_world_size: ranks per node. With several nodes, start the file on each node.

    >>> "torchrun --nproc-per-node 2" in shell_of("pass", 2, 2)
    True
    """
    nodes = world_size // local_world_size
    command, about = f"torchrun --nproc-per-node {local_world_size}", ""
    if nodes > 1:
        about = _NODES
        command += f' --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint "${{RENDEZVOUS:?host:port of one node}}"'
    return _SHELL.format(about=about, script=script.rstrip("\n"), command=command)
