"""Adapters refuse what they cannot do, by name and with the reason."""

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
from recshard_lab.embedding.managed_collision.config import ManagedEmbeddingConfig
from recshard_lab.optim import (
    CombinedOptimizer,
    EmptyFusedOptimizer,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
)
from recshard_lab.sparse import KeyedJaggedTensor


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("use_virtual_table", True, "use_virtual_table=True is not supported: virtual tables need CUDA kernels"),
        ("virtual_table_eviction_policy", "lru", "it belongs to virtual tables"),
        ("enable_embedding_update", True, "a forward that writes rows"),
        ("stash_weights", True, "moves weights between GPU and host memory"),
        (
            "num_embeddings_post_pruning",
            2,
            "num_embeddings_post_pruning=2 is not supported: a table is served with all",
        ),
    ],
)
@pytest.mark.parametrize("kind", [EmbeddingBagConfig, EmbeddingConfig])
def test_fields_of_other_kernels_are_refused(kind: Any, field: str, value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"table 't': .*{reason}.*Fix: "):
        kind(3, 2, "t", **{field: value})


def test_tables_with_torchrecs_fields_can_have_managed_ids() -> None:
    policy = LFU_EvictionPolicy()
    module = MCHManagedCollisionModule(3, torch.device("cpu"), policy, eviction_interval=1, input_hash_size=100)
    managed = ManagedEmbeddingConfig.of(EmbeddingBagConfig(3, 2, "t", feature_names=["f"], need_pos=True), module)
    assert (managed.name, managed.num_embeddings, managed.pooling) == ("t", 3, PoolingType.SUM)
    assert ManagedEmbeddingConfig.of(EmbeddingConfig(3, 2, "t"), module).pooling is PoolingType.NONE


def tables() -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(3, 4, "t", feature_names=["f"])])


def test_layers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layer_sizes of OverArch must have at least 2 widths, got \[1\]"):
        OverArch(3, [1])
    with pytest.raises(ValueError, match=r"interaction_branch2_layer_sizes \[6\] must end with a multiple of .* 4"):
        DLRM_Projection(tables(), 3, [4], [2, 1], [8], [6])
    with pytest.raises(ValueError, match=r"dense_arch_layer_sizes must be \[..., 4\]"):
        DLRM(tables(), 3, [5], [2, 1])


def test_a_place_of_fused_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="location=MANAGED is not supported: an unsharded fused collection on cpu"):
        fuse_embedding_optimizer(tables(), torch.optim.SGD, {"lr": 0.1}, None, "MANAGED")


def test_lists_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got 1 modules for sizes \(2,\)"):
        convert_list_of_modules_to_modulelist([nn.ReLU()], (2,))
    with pytest.raises(ValueError, match=r"sizes must be numbers from 1, got \(0,\)"):
        construct_modulelist_from_single_module(nn.ReLU(), (0,))
    ids = KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"seq_vbe_ctx=.* is not supported"):
        construct_jagged_tensors(torch.ones(1, 2), ids, ["f"], seq_vbe_ctx=object())


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
