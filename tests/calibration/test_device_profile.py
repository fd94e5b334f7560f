"""Device profiles: saving and loading keep every field, and invalid files are refused with a reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from recshard_lab.embedding.configs import EmbeddingBagConfig
from recshard_lab.sharding import Topology
from recshard_lab.sharding.hardware.device_profile import VERSION, DeviceProfile

FIGURES = {"ddr_mem_bw": 9e6, "contention": 0.4, "update_cost": {"exact_sgd": 2.0}}
TABLE = EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=8, feature_names=["f"])


def profile(**changes: Any) -> DeviceProfile:
    given: dict[str, Any] = {
        "world_size": 2,
        "local_world_size": 2,
        "compute_device": "cpu",
        "cores_per_host": 2,
        "figures": FIGURES,
        "machine": {"processor": "x"},
        "date": "2026-01-01T00:00:00+00:00",
        "spread": {"ddr_mem_bw": 1.1},
        "operators": ({"op": "all_to_all", "sizes": [256, 2], "ms": 0.1},),
    }
    return DeviceProfile(**{**given, **changes})


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    profile().save(tmp_path / "p.json")
    assert DeviceProfile.load(tmp_path / "p.json") == profile()
    top = Topology.from_profile(tmp_path / "p.json", reserve_fraction=0.3)
    assert (top.world_size, top.cores_per_host, top.ddr_mem_bw, top.contention) == (2, 2, 9e6, 0.4)
    assert top.reserve_fraction == 0.3
    assert top.cache_bw == Topology(2).cache_bw  # what was not measured stays


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    text = profile().to_json()
    for end in range(0, len(text) - 1, 37):
        (tmp_path / "p.json").write_text(text[:end])
        with pytest.raises(ValueError, match=r"p\.json: .*(device profile|lacks)"):
            Topology.from_profile(tmp_path / "p.json")


def test_what_a_reader_cannot_know_is_refused() -> None:
    told = json.loads(profile().to_json())
    for change, words in (
        ({"version": VERSION + 1}, f"has format version {VERSION + 1}, but this recshard_lab reads version {VERSION}"),
        ({"version": "1"}, "recshard calibrate --out"),
        ({"format": "tables"}, "not a device profile"),
        ({"figures": {"speed": 1.0}}, "unknown figure 'speed'"),
        ({"figures": {"ddr_mem_bw": -1.0}}, "ddr_mem_bw must be a number"),
        ({"figures": {"ddr_mem_bw": "fast"}}, "ddr_mem_bw must be a number"),
        ({"figures": {"update_cost": 3.0}}, "must map optimizers"),
        ({"figures": {"update_cost": {"adam": None}}}, r"update_cost\[adam\]"),
        ({"figures": [1]}, "figures must "),
        ({"world_size": 0}, "world_size must be a positive integer"),
        ({"compute_device": "tpu"}, "'cpu' or 'cuda'"),
        ({"operators": 3}, "operators must be a list"),
        ({"colour": "red"}, "field 'colour', unknown"),
    ):
        with pytest.raises(ValueError, match=words):
            DeviceProfile.from_json(json.dumps(told | change))


def test_a_missing_part_is_named() -> None:
    told = json.loads(profile().to_json())
    for part in told.keys() - {"format", "version"}:
        with pytest.raises(ValueError, match=f"lacks {part}"):
            DeviceProfile.from_json(json.dumps({name: own for name, own in told.items() if name != part}))
