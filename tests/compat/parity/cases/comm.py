"""Ranks, nodes and number formats on the wire: `torchrec.distributed.comm`, `fbgemm_qcomm_codec`."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed import comm as C
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.types import CommOp

from tests.compat.parity.case import case

COMM, CODEC = "torchrec.distributed.comm", "torchrec.distributed.fbgemm_qcomm_codec"


def node_of(size: int) -> None:
    """Makes this process one of a node of so many ranks."""
    os.environ |= {"LOCAL_WORLD_SIZE": str(size), "LOCAL_RANK": str(int(os.environ["RANK"]) % size)}


@case(f"{COMM}.get_local_size", f"{COMM}.get_num_groups", f"{COMM}.get_group_rank", f"{COMM}.get_local_rank", ranks=1)
def numbers_that_are_passed(rank: int) -> Any:
    node_of(2)
    return {
        "sizes": [C.get_local_size(world) for world in (2, 4, 8)],
        "groups": [C.get_num_groups(world) for world in (2, 4, 8)],
        "group ranks": [C.get_group_rank(8, other) for other in (0, 3, 7)],
    }


@case(f"{COMM}.intra_and_cross_node_pg", ranks=4)
def groups_of_nodes(rank: int) -> Any:
    node_of(2)
    inside, across = C.intra_and_cross_node_pg(torch.device("cpu"), backend="gloo")
    again = C.intra_and_cross_node_pg(torch.device("cpu"), backend="gloo")
    return {
        "inside": dist.get_process_group_ranks(inside),
        "across": dist.get_process_group_ranks(across),
        "again": [again[0] is inside, again[1] is across],
    }


@case(f"{COMM}.intra_and_cross_node_pg", ranks=2)
def groups_of_one_node(rank: int) -> Any:
    inside, across = C.intra_and_cross_node_pg(torch.device("cpu"), backend="gloo")
    return [None if own is None else dist.get_process_group_ranks(own) for own in (inside, across)]


@case(f"{CODEC}.CommType", f"{CODEC}.QCommsConfig")
def settings_of_formats() -> Any:
    config = QCommsConfig()
    return {
        "formats": {name: CommType[name].value for name in ("FP32", "FP16", "BF16", "INT8")},
        "default": [config.forward_precision.value, config.backward_precision.value, config.forward_loss_scale],
        "set": QCommsConfig(CommType.FP16, CommType.BF16, 2.0).forward_precision.value,
    }


@case(f"{CODEC}.get_qcomm_codecs_registry")
def codecs_of_operations() -> Any:
    config = QCommsConfig(CommType.FP16, CommType.FP16)
    every = get_qcomm_codecs_registry(config)
    one = get_qcomm_codecs_registry(config, [CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL])
    return {
        "every": None if every is None else sorted(str(key) for key in every),
        "one": None if one is None else sorted(str(key) for key in one),
    }


@case(f"{CODEC}.get_qcomm_codecs_registry")
def codecs_of_full_precision() -> Any:
    return get_qcomm_codecs_registry(QCommsConfig(CommType.FP32, CommType.FP32))


@case(f"{CODEC}.get_qcomm_codecs_registry")
def codecs_on_the_cpu() -> Any:
    found = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16), device=torch.device("cpu"))
    return None if found is None else len(found)
