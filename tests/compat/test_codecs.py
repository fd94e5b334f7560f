"""FP8 in messages: the error of each number is within its bound, alone and on two ranks."""

from typing import Any

import pytest
import torch

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    ShardingPlan,
)
from recshard_lab.comm import codec_error
from recshard_lab.compat.distributed.codecs import CommType, Fp8Codec, QCommsConfig, get_qcomm_codecs_registry
from recshard_lab.distributed import EmbeddingBagCollectionSharder
from recshard_lab.sharding import construct_module_sharding_plan, row_wise, table_wise
from tests.launched import launched


def test_numbers_are_within_the_bound_and_saturation_is_counted() -> None:
    codec, special = Fp8Codec(), torch.tensor([[0.0, -0.0, 0.9375, 2.0, 1e9, torch.inf, torch.nan, 2.0**-18]])
    rows = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    for own in (rows * 0.1, rows * 1e-5, special):
        error = codec_error(codec, own)
        assert error.within, str(error)
        assert error.encoded_bytes == own.numel()
    assert codec.saturated == 2


def test_the_bound_is_tight() -> None:
    rows = torch.rand(500, 8, generator=torch.Generator().manual_seed(0)) * 0.9
    codec = Fp8Codec()
    gap = (codec.decode(codec.encode(rows), 8).double() - rows.double()).abs()
    assert bool((gap > 0.9 * codec.error_bound(rows)).any())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"forward_precision": CommType.MX4}, "forward_precision=CommType.MX4 is not supported: .* Fix:"),
        ({"forward_precision": CommType.FP8, "fp8_quantize_dim": 8}, "fp8_quantize_dim=8 is not supported: .* Fix:"),
        ({"backward_precision": CommType.FP8, "backward_loss_scale": 2.0}, "does not apply to fp8: .* Fix:"),
        ({"forward_precision": CommType.INT8, "forward_loss_scale": 2.0}, "does not apply to int8: .* Fix:"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_reason(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        QCommsConfig(**fields)


def collection() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=8, embedding_dim=4, feature_names=[name]) for name in ("a", "b")
    ]
    return EmbeddingBagCollection(tables)


def forward(coded: bool) -> Any:
    own = collection()
    registry = get_qcomm_codecs_registry(QCommsConfig(CommType.FP8, CommType.FP8)) if coded else None
    sharder = EmbeddingBagCollectionSharder({"learning_rate": 1.0}, registry)
    world = torch.distributed.get_world_size()
    plan = construct_module_sharding_plan(own, {"a": row_wise(), "b": table_wise(rank=1)}, sharder, world_size=world)
    dmp = DistributedModelParallel(own, plan=ShardingPlan({"": plan}), sharders=[sharder])
    batch = KeyedJaggedTensor(["a", "b"], torch.tensor([0, 7, 3, 2]), lengths=torch.tensor([2, 0, 1, 1]))
    output = dmp(batch).values()
    output.sum().backward()
    return output.detach(), dmp.full_state_dict()["embedding_bags.b.weight"]


two = launched(2)


@pytest.mark.gate
def test_rows_and_gradients_in_fp8_on_two_ranks(two: Any) -> None:
    for (coded, table), (plain, expected) in zip(two.run(forward, True), two.run(forward, False), strict=True):
        assert 0 < (coded - plain).abs().max() < 2.0**-3
        torch.testing.assert_close(table, expected, rtol=0, atol=2.0**-3)


def test_a_model_whose_formats_the_cost_model_does_not_know_is_planned_in_fp32(two: Any) -> None:
    assert two.run(planned) == [["a", "b"]] * 2


def planned() -> list[str]:
    registry = get_qcomm_codecs_registry(QCommsConfig(CommType.FP8))
    dmp = DistributedModelParallel(collection(), sharders=[EmbeddingBagCollectionSharder(None, registry)])
    return sorted(dmp.plan.plan[""])
