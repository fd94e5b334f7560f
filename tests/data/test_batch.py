"""A batch is a pytree node: torch.export takes it as an argument, and tree_map sees its tensors."""

import pytest
import torch
from torch.utils import _pytree as pytree

from recshard_lab.data import Batch
from recshard_lab.sparse import KeyedJaggedTensor


def batch(size: int, global_size: int = -1) -> Batch:
    torch.manual_seed(size)
    lengths = torch.randint(0, 4, (2 * size,))
    ids = KeyedJaggedTensor(["a", "b"], torch.randint(0, 10, (int(lengths.sum()),)), lengths=lengths)
    return Batch(torch.rand(size, 3), ids, torch.rand(size).round(), global_size, world_size=2)


@pytest.mark.parametrize("global_size", [-1, 12])
def test_a_tree_of_a_batch_keeps_its_tensors_and_sizes(global_size: int) -> None:
    one = batch(6, global_size)
    leaves, spec = pytree.tree_flatten(one)
    assert [tuple(leaf.shape) for leaf in leaves] == [(6, 3), (len(one.sparse_features.values()),), (12,), (6,)]
    same = pytree.tree_unflatten(leaves, spec)
    assert isinstance(same, Batch)
    assert (same.global_size, same.world_size) == (one.global_size, 2)
    assert same.sparse_features.keys() == ["a", "b"]
    assert pytree.tree_map(lambda leaf: leaf.dtype, one).labels is torch.float32
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
