"""Models by name: built from plain settings, refused by name."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from recshard_lab.data import Batch
from recshard_lab.embedding import EmbeddingBagConfig
from recshard_lab.models import (
    DLRM,
    ModelKind,
    build_model,
    model_names,
    register_model,
    settings_as_dict,
    settings_of,
    train_task,
)
from recshard_lab.models import registry as room
from recshard_lab.sparse import KeyedJaggedTensor
from tests.refusals import not_refused

TABLES = [EmbeddingBagConfig(10, 4, name, feature_names=[f"f_{name}"]) for name in ("a", "b")]
OWN: dict[str, dict[str, Any]] = {
    "dlrm": {"dense_in_features": 3, "over_arch_layer_sizes": [5, 1]},
    "dlrm_dcn": {"dense_in_features": 3, "dcn_num_layers": 2, "dcn_low_rank_dim": 2},
    "deepfm": {"dense_in_features": 3, "deep_layer_sizes": [5]},
    "two_tower": {"layer_sizes": [5, 3], "in_batch_negatives": True, "candidate_id": "f_b", "frequency_buckets": 8},
}
BATCH = Batch(
    torch.rand(2, 3),
    KeyedJaggedTensor(["f_a", "f_b"], torch.tensor([1, 2, 3, 4]), lengths=torch.ones(4, dtype=torch.int64)),
    torch.tensor([1.0, 0.0]),
)


@pytest.mark.parametrize("name", sorted({*OWN, *model_names()}))
def test_every_model_is_built_by_name_and_trains(name: str) -> None:
    model = build_model(name, TABLES, OWN[name])
    task = train_task(name, model, OWN[name])
    loss, (told, logits, labels) = task(BATCH)
    loss.backward()
    assert logits.shape == labels.shape == (2,)
    assert float(told) == pytest.approx(float(loss.detach()))
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", model_names())
def test_every_model_is_built_on_meta_and_with_its_defaults(name: str) -> None:
    model = build_model(name, TABLES, device="meta", dense_device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize("name", model_names())
def test_settings_survive_the_way_through_plain_values(name: str) -> None:
    settings = settings_of(name, OWN[name])
    assert settings_of(name, settings_as_dict(settings)) == settings
    assert settings_of(name, settings) is settings


def test_what_is_not_known_is_refused_by_name() -> None:
    refusals: list[tuple[Any, str]] = [
        (lambda: build_model("dlmr", TABLES), r"named 'dlmr' \(did you mean 'dlrm'\?\)\. Fix: use one of deepfm"),
        (lambda: settings_of("dlrm_dcn", {"dcn_layers": 2}), r"'dcn_layers' \(did you mean 'dcn_num_layers'\?\)"),
        (lambda: settings_of("dlrm", {"over_arch_layer_sizes": "64"}), "over_arch_layer_sizes must be .* got '64'"),
        (lambda: settings_of("dlrm", 3), r"must be a mapping or DLRMSettings, got 3"),
    ]
    assert not_refused(refusals) == []


def test_a_notebook_registers_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_KINDS", dict(room._KINDS))

    @dataclass(frozen=True)
    class Settings:
        width: int = 5

    register_model(ModelKind("mine", Settings, lambda ebc, own, device: DLRM(ebc, 0, [], [own.width, 1], device)))
    assert "mine" in model_names()
    assert build_model("mine", TABLES, {"width": 7}).over_arch.out.in_features == 7
