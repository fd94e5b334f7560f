"""``output_dtype``: outputs, gradients and their messages in half precision; sums and tables stay FP32. 2 ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recshard_lab import (
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ShardingPlan,
)
from recshard_lab.comm import CommType, QCommsConfig, get_qcomm_codecs_registry, trace
from recshard_lab.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from recshard_lab.sharding import column_wise, construct_module_sharding_plan, data_parallel, row_wise, table_wise

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
STEP = {"fp16": 2.0**-11, "bf16": 2.0**-8}  # relative error of one rounding
SAMPLES, IDS = 4, 3
PLAN = {"a": row_wise(), "b": column_wise([0, 1]), "c": table_wise(1)}
STEPS = 3


class Model(nn.Module):
    """Pooled tables and a sequence of one of their features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        names = [*PLAN, "d"]
        self.ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(30, 8, name=name, feature_names=[name]) for name in names]
        )
        self.sequences = EmbeddingCollection([EmbeddingConfig(20, 8, name="s", feature_names=["a"])])

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        return self.ebc(batch).values(), self.sequences(batch)["a"].values()


def batch_of(step: int, rank: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    keys = [*PLAN, "d"]
    ids = torch.randint(20, (SAMPLES * IDS * len(keys),), generator=generator)
    return KeyedJaggedTensor(keys, ids, lengths=torch.full((SAMPLES * len(keys),), IDS))


def build(output_dtype: Any, replicated: bool) -> DistributedModelParallel:
    model = Model()
    last = data_parallel() if replicated else table_wise(0)
    plan = ShardingPlan(
        {
            "ebc": construct_module_sharding_plan(model.ebc, {**PLAN, "d": last}, world_size=2),
            "sequences": construct_module_sharding_plan(model.sequences, {"s": row_wise()}, world_size=2),
        }
    )
    fused = {"learning_rate": 0.1} | ({} if output_dtype is None else {"output_dtype": output_dtype})
    sharders = [EmbeddingBagCollectionSharder(fused_params=fused), EmbeddingCollectionSharder(fused_params=fused)]
    return DistributedModelParallel(model, plan=plan, sharders=sharders)


def trained(output_dtype: Any, replicated: bool = True) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor], Any]:
    """The first outputs, the weights after some steps, and bytes to each rank by label in the first step."""
    rank = torch.distributed.get_rank()
    dmp = build(output_dtype, replicated)
    first, sent = None, None
    for step in range(STEPS):
        with trace() as traced:
            pooled, rows = dmp(batch_of(step, rank))
            weight = torch.linspace(-1, 1, pooled.numel()).view(pooled.shape).to(pooled.dtype)
            ((pooled * weight).float().sum() + rows.float().square().sum()).backward()
        if first is None:
            first, sent = (pooled.detach(), rows.detach()), traced.bytes_by_label(2)
    assert first is not None
    return first, dmp.full_state_dict(), sent


@pytest.mark.parametrize("name", DTYPES)
def test_outputs_are_the_fp32_ones_rounded_and_training_follows(two: Any, name: str) -> None:
    step = STEP[name]
    for exact, half in zip(two.run(trained, None), two.run(trained, name), strict=True):
        for one, other in zip(exact[0], half[0], strict=True):
            assert other.dtype is DTYPES[name]
            torch.testing.assert_close(other.float(), one, rtol=2 * step, atol=4 * step * float(one.abs().max()))
            assert not torch.equal(other.float(), one)
        for table, weight in exact[1].items():
            assert half[1][table].dtype is torch.float32
            torch.testing.assert_close(half[1][table], weight, rtol=0, atol=0.1 * STEPS * 8 * step)
    replicas = [found[1]["ebc.embedding_bags.d.weight"] for found in two.run(trained, name)]
    assert torch.equal(*replicas)


def test_rows_and_gradients_take_half_the_bytes(two: Any) -> None:
    plain, half = two.run(trained, None, False), two.run(trained, torch.bfloat16, False)
    for one, other in zip(plain, half, strict=True):
        for label, sent in one[2].items():
            ratio = 2 if label.startswith("output_dist") else 1
            assert [ratio * count for count in other[2][label]] == list(sent), label


def test_formats_have_the_names_of_torch_and_this_library() -> None:
    names: list[tuple[Any, torch.dtype]] = [
        ("bf16", torch.bfloat16),
        ("torch.float16", torch.float16),
        (torch.float32, torch.float32),
        (DataType.FP16, torch.float16),
    ]
    for given, dtype in names:
        assert build_alone(given)(batch_of(0, 0)).values().dtype is dtype
    for wrong in ("int8", torch.float64, 16, DataType.INT4):
        with pytest.raises(ValueError, match=r"output_dtype=.* is not supported. Supported: torch.float16.*Fix"):
            build_alone(wrong)


@pytest.mark.parametrize(
    ("settings", "formats"),
    [
        ({}, ("fp32", "fp32")),
        ({"fused_params": {"output_dtype": "bf16"}}, ("bf16", "bf16")),
        (
            {
                "fused_params": {"output_dtype": "bf16"},
                "qcomm_codecs_registry": get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.INT8)),
            },
            ("fp16", "int8"),
        ),
    ],
)
def test_default_plans_predict_the_formats_on_the_wire(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], formats: tuple[str, str]
) -> None:
    planned, plan = [], EmbeddingShardingPlanner.plan

    def noted(self: EmbeddingShardingPlanner, *arguments: Any) -> ShardingPlan:
        planned.append(self.workload.codecs)
        return plan(self, *arguments)

    monkeypatch.setattr(EmbeddingShardingPlanner, "plan", noted)
    DistributedModelParallel(Model().ebc, sharders=[EmbeddingBagCollectionSharder(**settings)])
    assert planned == [formats]


def build_alone(output_dtype: Any) -> DistributedModelParallel:
    """One rank, which exchanges nothing."""
    sharder = EmbeddingBagCollectionSharder(fused_params={"output_dtype": output_dtype})
    return DistributedModelParallel(Model().ebc, sharders=[sharder])
