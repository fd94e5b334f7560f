"""Tables from YAML, JSON and CSV: the same tables, and errors that name file, place and field."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from recshard_lab import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recshard_lab.planner import AccessProfile, read_tables

TABLES: list[dict[str, Any]] = [
    {
        "name": "movies", "num_embeddings": 40_000, "embedding_dim": 64, "feature_names": ["seen", "liked"],
        "pooling": "MEAN", "data_type": "FP16", "pooling_factor": [20, 2.5], "zipf_alpha": 1.05,
    },
    {
        "name": "history", "num_embeddings": 100, "embedding_dim": 8, "feature_names": ["past"], "pooling": "NONE",
        "pooling_factor": 7, "access": "meta_2021",
    },
]  # fmt: skip
CSV = """name,num_embeddings,embedding_dim,feature_names,pooling,data_type,pooling_factor,zipf_alpha,access
movies,40000,64,seen;liked,MEAN,FP16,20;2.5,1.05,
history,100,8,past,NONE,,7,,meta_2021
"""
YAML = """tables:
- name: movies
  num_embeddings: 40_000
  embedding_dim: 64
  feature_names: [seen, liked]
  pooling: mean
  data_type: FP16
  pooling_factor: [20, 2.5]
  zipf_alpha: 1.05
- {name: history, num_embeddings: 100, embedding_dim: 8, feature_names: past,
   pooling: NONE, pooling_factor: 7, access: meta_2021}
"""
ROW = "name,num_embeddings,embedding_dim,feature_names\n"


def test_every_format_gives_the_same_tables(tmp_path: Path) -> None:
    more = {"data_type": DataType.FP16, "pooling": PoolingType.MEAN}
    movies = EmbeddingBagConfig(40_000, 64, name="movies", feature_names=["seen", "liked"], **more)  # type: ignore[arg-type]
    for name, text in (("t.json", json.dumps(TABLES)), ("t.csv", CSV), ("t.yaml", YAML), ("t.YML", YAML)):
        (tmp_path / name).write_text(text)
        found = read_tables(tmp_path / name)
        assert found.tables == [movies, EmbeddingConfig(100, 8, name="history", feature_names=["past"])], name
        load = found.workload(batch_size=64)
        assert load.batch_size == 64
        assert load.pooling_factors == {"seen": 20.0, "liked": 2.5, "past": 7.0}
        assert load.zipf_alpha == {"movies": 1.05}
        assert load.access == {"history": AccessProfile.meta_2021()}


ERRORS = [
    ("t.yaml", YAML.replace("40_000", "many"), "t.yaml, line 2 (table 'movies'), field 'num_embeddings'"),
    ("t.yaml", YAML.replace("pooling: mean", "poling: mean"), "unknown field 'poling' (did you mean 'pooling'?)"),
    ("t.yaml", YAML.replace("FP16", "FP17"), "field 'data_type': 'FP17' is not one of"),
    ("t.yaml", YAML.replace("[20, 2.5]", "[20]"), "field 'pooling_factor': 2 features need one number or 2, got 1"),
    ("t.yaml", YAML.replace("1.05", "-1"), "field 'zipf_alpha': must be a finite number from 0 up"),
    ("t.yaml", YAML.replace("1.05", ".nan"), "field 'zipf_alpha': must be a finite number"),
    ("t.yaml", YAML.replace("meta_2021", "meta"), "line 10 (table 'history'), field 'access'"),
    ("t.yaml", YAML.replace("  embedding_dim: 64\n", ""), "(table 'movies'): field 'embedding_dim' is missing"),
    ("t.yaml", YAML.replace("pooling: mean", "name: twice"), "t.yaml, line 6: field 'name' occurs twice"),
    ("t.yaml", YAML.replace("history", "movies"), "line 10 (table 'movies'), field 'name'"),
    ("t.yaml", "- name: [", "t.yaml, line 2: not YAML"),
    ("t.yaml", "- &a [*a]", "line 1: the alias *a names no finished entry"),
    ("t.yaml", "tables: 3", "must be a list of tables"),
    ("t.yaml", "", "must be a list of tables"),
    ("t.yaml", "[]", "holds no tables"),
    ("t.json", '[{"name": "a"},\n}]', "t.json, line 2: not JSON"),
    ("t.json", json.dumps([TABLES[0], {**TABLES[1], "embedding_dim": 0}]), "entry 2 (table 'history'), field 'embe"),
    ("t.json", '[{"name": "a", "name": "b"}]', "field 'name' occurs twice"),
    ("t.json", '[{"nme": "a"}]', "entry 1: unknown field 'nme'"),
    ("t.json", "[" * 100_000, "t.json"),
    ("t.json", json.dumps([{**TABLES[0], "name": "a.b"}]), "entry 1 (table 'a.b')"),
    ("t.json", json.dumps({"tables": TABLES, "batch": 3}), "'tables' and no other key, got tables, batch"),
    ("t.csv", ROW + "movies,4x,64,seen\n", "t.csv, line 2, field 'num_embeddings': must be a number, got '4x'"),
    ("t.csv", ROW + "movies,4,64\n", "t.csv, line 2: the header has 4 columns"),
    ("t.csv", ROW + "a,4,64,f\nmovies,4,,f\n", "line 3 (table 'movies'): field 'embedding_dim' is missing"),
    ("t.csv", "name,name\n", "a column occurs twice"),
    ("t.csv", "", "holds no tables"),
    ("t.toml", "", "expected .yaml, .yml, .json, .csv"),
]


def test_errors_name_file_line_and_field(tmp_path: Path) -> None:
    for name, text, words in ERRORS:
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=re.escape(words)) as refused:
            read_tables(tmp_path / name)
        assert name in str(refused.value)


def test_one_feature_read_by_two_tables_has_one_pooling_factor(tmp_path: Path) -> None:
    other = {**TABLES[1], "feature_names": ["seen"]}
    (tmp_path / "t.json").write_text(json.dumps([TABLES[0], other]))
    with pytest.raises(ValueError, match="'seen' has 7 ids per sample here and 20 in another table"):
        read_tables(tmp_path / "t.json")
