"""Adapters refuse what they cannot do, by name and with the reason."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from recshard_lab.compat.models.dlrm import DLRM, DLRM_Projection, OverArch
from recshard_lab.compat.modules.configs import EmbeddingBagConfig, EmbeddingConfig
from recshard_lab.compat.modules.fused import fuse_embedding_optimizer
from recshard_lab.compat.modules.utils import (
    construct_jagged_tensors,
    construct_modulelist_from_single_module,
    convert_list_of_modules_to_modulelist,
)
from recshard_lab.embedding import EmbeddingBagCollection, LFU_EvictionPolicy, MCHManagedCollisionModule, PoolingType
from recshard_lab.embedding.managed_collision.modules import ManagedEmbeddingConfig
from recshard_lab.optim import (
    CombinedOptimizer,
    EmptyFusedOptimizer,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
)
from recshard_lab.sparse import KeyedJaggedTensor
from tests.refusals import not_refused

FIELDS = {
    "use_virtual_table": (True, "virtual tables need CUDA kernels"),
    "virtual_table_eviction_policy": ("lru", "it belongs to virtual tables"),
    "enable_embedding_update": (True, "a forward that writes rows"),
    "stash_weights": (True, "moves weights between GPU and host memory"),
    "num_embeddings_post_pruning": (2, "a table is served with all"),
}


@pytest.mark.parametrize("kind", [EmbeddingBagConfig, EmbeddingConfig])
def test_fields_of_other_kernels_are_refused(kind: Any) -> None:
    refusals = [
        (partial(kind, 3, 2, "t", **{field: value}), rf"table 't': .*{field}.*{reason}.*Fix: ")
        for field, (value, reason) in FIELDS.items()
    ]
    assert not_refused(refusals) == []


def test_tables_with_torchrecs_fields_can_have_managed_ids() -> None:
    policy = LFU_EvictionPolicy()
    module = MCHManagedCollisionModule(3, torch.device("cpu"), policy, eviction_interval=1, input_hash_size=100)
    managed = ManagedEmbeddingConfig.of(EmbeddingBagConfig(3, 2, "t", feature_names=["f"], need_pos=True), module)
    assert (managed.name, managed.num_embeddings, managed.pooling) == ("t", 3, PoolingType.SUM)
    assert ManagedEmbeddingConfig.of(EmbeddingConfig(3, 2, "t"), module).pooling is PoolingType.NONE


def tables() -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(3, 4, "t", feature_names=["f"])])


def test_what_does_not_fit_is_refused() -> None:
    ids = KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
    refusals: list[tuple[Any, str]] = [
        (lambda: OverArch(3, [1]), r"layer_sizes of OverArch must have at least 2 widths, got \[1\]"),
        (
            lambda: DLRM_Projection(tables(), 3, [4], [2, 1], [8], [6]),
            r"interaction_branch2_layer_sizes \[6\] must end with a multiple of .* 4",
        ),
        (lambda: DLRM(tables(), 3, [5], [2, 1]), r"dense_arch_layer_sizes must be \[..., 4\]"),
        (
            lambda: fuse_embedding_optimizer(tables(), torch.optim.SGD, {"lr": 0.1}, None, "MANAGED"),
            "location=MANAGED is not supported: an unsharded fused collection on cpu",
        ),
        (lambda: convert_list_of_modules_to_modulelist([nn.ReLU()], (2,)), r"got 1 modules for sizes \(2,\)"),
        (lambda: construct_modulelist_from_single_module(nn.ReLU(), (0,)), r"sizes must be numbers from 1, got \(0,\)"),
        (
            lambda: construct_jagged_tensors(torch.ones(1, 2), ids, ["f"], seq_vbe_ctx=object()),
            r"seq_vbe_ctx=.* is not supported",
        ),
    ]
    assert not_refused(refusals) == []


def sgd(weight: nn.Parameter) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper({"w": weight}, lambda params: torch.optim.SGD(params, lr=0.1))


def test_gradients_that_backward_has_used_cannot_be_clipped() -> None:
    class Tables(EmptyFusedOptimizer):
        stepped_in_backward = ["movies.weight"]  # noqa: RUF012

    optimizer = GradientClippingOptimizer(CombinedOptimizer([Tables(), sgd(nn.Parameter(torch.ones(1)))]))
    with pytest.raises(
        ValueError, match=r"clip_grad_norm_ cannot clip \['movies.weight'\], which backward has stepped"
    ):
        optimizer.clip_grad_norm_()
