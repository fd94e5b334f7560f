"""What cannot be exported says why."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recshard_lab import (
    DistributedModelParallel,
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingConfig,
    EmbeddingBagCollection,
    quantize_embeddings,
)
from recshard_lab.comm import ShardingEnv
from recshard_lab.embedding import (
    HashZchManagedCollisionModule,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
)
from recshard_lab.serving import ExportError, Inputs, SparseInput, load_bundle, save_bundle
from tests.serving.bundles import COLUMNS, batch_of, dlrm, eager, tables

INPUTS = Inputs(("a", "b"), (SparseInput("x", None),))


class Decides(nn.Module):
    def forward(self, dense: Tensor, _: object) -> Tensor:
        return dense * 2 if dense.sum() > 0 else dense


class OneSize(nn.Module):
    def forward(self, dense: Tensor, _: object) -> Tensor:
        return dense + torch.zeros(len(dense), 1)


class Counts(nn.Module):
    calls = 0

    def forward(self, dense: Tensor, _: object) -> Tensor:
        self.calls += 1
        return dense + self.calls


class Fails(nn.Module):
    def forward(self, dense: Tensor, _: object) -> Tensor:
        raise KeyError("nothing")


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 1)).eval()
    model[0].register_forward_hook(lambda *_: None)
    return model


def dynamic() -> nn.Module:
    config = DynamicEmbeddingConfig("user", 4, capacity=64)
    return nn.Sequential(DynamicEmbeddingBagCollection([config], torch.optim.SGD, {"lr": 0.5})).eval()


def sharded() -> DistributedModelParallel:
    return DistributedModelParallel(dlrm(), ShardingEnv.from_local(1, 0), torch.device("cpu")).eval()


def managed() -> nn.Module:
    collection = EmbeddingBagCollection(tables(features=1))
    modules: dict[str, Any] = {"t0": HashZchManagedCollisionModule(50, torch.device("cpu"), total_num_buckets=1)}
    collisions = ManagedCollisionCollection(modules, collection.embedding_bag_configs())
    return nn.Sequential(ManagedCollisionEmbeddingBagCollection(collection, collisions)).eval()


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "training": (lambda: nn.Sequential(nn.Linear(1, 1)), r"Sequential is in training mode.*Fix: model.eval\(\)"),
    "hooks": (hooked, "'0', a Linear, has forward hooks.*Fix: call remove"),
    "dynamic": (
        dynamic,
        r"'0', a DynamicEmbeddingBagCollection, has dynamic tables.*Fix: .*export_static\(collection\)",
    ),
    "sharded": (
        sharded,
        r"DistributedModelParallel is sharded over ranks.* Fix: quantize_embeddings\(model, 'fp32'\) on all ranks",
    ),
    "part sharded": (
        lambda: nn.Sequential(sharded().module).eval(),
        r"'0.embedding_bag_collection', a \w+, is sharded over ranks.* save_checkpoint\(model, path\) on all ranks",
    ),
    "managed collision": (
        managed,
        "'0', a ManagedCollisionEmbeddingBagCollection, remaps ids, and its table of ids cannot be exported. Fix: ",
    ),
    "meta": (lambda: EmbeddingBagCollection(tables(), device="meta").eval(), "is on the meta device.*Fix: load"),
    "decides": (
        lambda: Decides().eval(),
        r"Decides cannot be exported: its forward decides by the numbers of a batch "
        r"at test_refusals.py:\d+ in forward.*Fix: use torch.where",
    ),
    "one size": (lambda: OneSize().eval(), "only for one batch size, 3. Fix: use tensor.shape"),
    "state": (lambda: Counts().eval(), "differs from the model's by up to 1, because a number became a constant. Fix:"),
    "error": (
        lambda: Fails().eval(),
        r"raises KeyError while it is traced at test_refusals.py:\d+ in forward: 'nothing'",
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_model_that_cannot_be_exported_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    make, message = CASES[name]
    with pytest.raises(ExportError, match=message) as refused:
        save_bundle(make(), tmp_path / "1", inputs=INPUTS)
    assert len(str(refused.value).splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_a_sharded_model_is_exported_as_its_refusal_says(dtype: str, tmp_path: Path) -> None:
    whole = quantize_embeddings(sharded(), dtype)
    inputs = Inputs.of(whole, COLUMNS)
    save_bundle(whole, tmp_path / "1", inputs=inputs)
    batch = batch_of(inputs, 4)
    expected = eager(quantize_embeddings(dlrm(), dtype), inputs, batch)
    assert torch.equal(load_bundle(tmp_path / "1").predict(batch)["score"], expected)
