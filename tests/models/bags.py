"""Batches out of bags that are written as lists."""

import torch

from recshard_lab.sparse import KeyedJaggedTensor


def batch_of(bags: dict[str, list[list[int]]]) -> KeyedJaggedTensor:
    """Feature -> the ids of each sample."""
    flat = [bag for own in bags.values() for bag in own]
    ids, lengths = torch.tensor([row for bag in flat for row in bag]), torch.tensor([len(bag) for bag in flat])
    return KeyedJaggedTensor(list(bags), ids, lengths=lengths)
