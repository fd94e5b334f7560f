"""FP8 and MX4 in messages: bits, values, rows on two ranks."""

from typing import Any

import torch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.sharding_plan import table_wise
from torchrec.distributed.types import CommOp
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.compat.parity.case import case, raised
from tests.compat.parity.cases.dmp import DMP, Model
from tests.compat.parity.sharded_tables import CPU, batch, fill, plan_of

CODEC = "torchrec.distributed.fbgemm_qcomm_codec"


@case(f"{CODEC}.CommType")
def names_of_formats() -> Any:
    return {one.name: one.value for one in CommType}


@case(f"{CODEC}.QCommsConfig")
def fields_of_a_config() -> Any:
    config = QCommsConfig(CommType.FP8, CommType.BF16, None, 2.0)
    names = ("fp8_quantize_dim", "fp8_quantize_dim_bwd", "fp8_bwd_uses_143", "mx4_quantize_dim", "output_dtype")
    config.forward_precision = CommType.FP16
    return [config.forward_precision.value, config.backward_loss_scale, [getattr(config, name) for name in names]]


@case(f"{CODEC}.get_qcomm_codecs_registry")
def reduce_scatters_are_not_in_fp8() -> Any:
    registry = get_qcomm_codecs_registry(QCommsConfig(CommType.FP8, CommType.FP8), device=torch.device("cuda"))
    assert registry is not None
    return {
        op.name: [str(getattr(registry[op.name], way).quantized_dtype) for way in ("forward", "backward")]
        for op in (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
    }


def step_in_fp8(rank: int) -> None:
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.1})
    registry = get_qcomm_codecs_registry(QCommsConfig(CommType.FP8, CommType.FP8), device=CPU)
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
    generators = {name: table_wise(rank=number % 2) for number, name in enumerate("abcd")}
    dmp = DistributedModelParallel(model, device=CPU, plan=plan_of(model.bags, generators), sharders=[sharder])
    fill(dmp)
    assert torch.isfinite(dmp(batch(rank))).all()
    dmp(batch(rank)).sum().backward()


@case(
    f"{CODEC}.get_qcomm_codecs_registry",
    DMP,
    differs="TorchRec's FP8 messages need CUDA: its CPU kernel takes no flat message; here they run on CPUs too",
    ranks=2,
)
def rows_in_fp8_on_two_ranks(rank: int) -> Any:
    return raised(lambda: step_in_fp8(rank))


@case(f"{CODEC}.QCommsConfig")
def a_scale_for_each_row_of_fp8() -> Any:
    def job() -> Any:
        codec = get_qcomm_codecs(QCommsConfig(CommType.FP8, fp8_quantize_dim=4)).forward
        return codec.encode(torch.ones(2, 4), codec.create_context())

    return raised(job) != "nothing"


@case(f"{CODEC}.QCommsConfig", differs="MX4 is refused: messages do not pad rows to groups of 32 columns")
def rows_in_mx4() -> Any:
    return raised(lambda: get_qcomm_codecs(QCommsConfig(CommType.MX4)))


@case(f"{CODEC}.QCommsConfig")
def settings_of_mx4_without_mx4() -> Any:
    config = QCommsConfig(CommType.FP16, CommType.FP16, mx4_quantize_dim=32)
    return get_qcomm_codecs(config).forward.quantized_dtype
