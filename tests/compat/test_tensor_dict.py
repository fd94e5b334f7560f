"""A TensorDict is a batch: with the real package, which the environment of ``RECSHARD_PEERS`` has."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from recshard_lab.sparse import KeyedJaggedTensor
from recshard_lab.sparse.interop import maybe_td_to_kjt

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
from tensordict import TensorDict
from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from recshard_lab.sparse import KeyedJaggedTensor
from recshard_lab.sparse.interop import maybe_td_to_kjt

def nested(bags):
    return torch.nested.nested_tensor([torch.tensor(bag) for bag in bags], layout=torch.jagged)

batch = TensorDict({"b": nested([[4], [5, 6]]), "a": nested([[1, 2], [3]]), "dense": torch.ones(2, 3)}, batch_size=[2])
ids = KeyedJaggedTensor(["a", "b"], torch.arange(1, 7), lengths=torch.tensor([2, 1, 1, 2]))
found = maybe_td_to_kjt(batch, ["a", "b"])
assert found.keys() == ["a", "b"] and found.values().tolist() == ids.values().tolist()
assert found.lengths().tolist() == ids.lengths().tolist()
pooled = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t", feature_names=["a", "b"])])
assert torch.equal(pooled(batch).values(), pooled(ids).values())
rows = EmbeddingCollection([EmbeddingConfig(9, 4, "t", feature_names=["b"])])
assert torch.equal(rows(batch)["b"].values(), rows(ids)["b"].values())
wrong = {"entry 'c' of the TensorDict is missing": ["c"], "entry 'dense' of the TensorDict is a Tensor": None}
for why, names in wrong.items():
    try:
        maybe_td_to_kjt(batch, names)
    except ValueError as error:
        assert why in str(error), error
    else:
        raise AssertionError(why)
print("right")
"""


@pytest.mark.skipif("RECSHARD_PEERS" not in os.environ, reason="RECSHARD_PEERS names no interpreter with tensordict")
def test_collections_look_up_a_tensordict() -> None:
    done = subprocess.run(
        [os.environ["RECSHARD_PEERS"], "-W", "ignore", "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.split() == ["right"], done.stderr


def test_other_batches_stay_as_they_are() -> None:
    kjt = KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1]))
    assert maybe_td_to_kjt(kjt, ["a"]) is kjt
    assert maybe_td_to_kjt(3) == 3
