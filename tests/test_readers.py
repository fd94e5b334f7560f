"""Files from strangers: every reader returns data or raises an error with a fix, quickly."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recshard_lab.documents import MOST_BYTES, read_document
from recshard_lab.planner import read_constraints, read_tables
from recshard_lab.sharding import ShardingPlan, Topology, row_wise
from recshard_lab.sharding.hardware.device_profile import DeviceProfile
from recshard_lab.train.job import read_config

MOST_LETTERS = 2000

pytestmark = pytest.mark.timeout(60)  # a bomb of aliases would take hours
EDITS = int(os.environ.get("RECSHARD_FUZZ", "90"))  # of each kind of file

TABLES = """\
- name: movies
  num_embeddings: 40_000
  embedding_dim: 64
  feature_names: [seen, liked]
  pooling: mean
  data_type: FP16
  pooling_factor: [20, 2.5]
  zipf_alpha: 1.05
- {name: users, num_embeddings: 900, embedding_dim: 64, feature_names: [user], weight_init_max: 0.1}
"""
CSV = """\
name,num_embeddings,embedding_dim,feature_names,pooling_factor
movies,40000,64,seen;liked,20;2.5
users,9,8,user,1
"""
JSON_TABLES = [
    {"name": "movies", "num_embeddings": 40, "embedding_dim": 8, "feature_names": ["seen"], "zipf_alpha": 1.0}
]
CONSTRAINTS = """\
movies:
  sharding_types: [row_wise, column_wise]
  ranks: [0, 1]
  min_partition: 32
  pooling_factors: [2.5]
users:
  shards: [[0, 0, 500, 0, 64], [1, 500, 1000, 0, 64]]
"""
CONFIG = """\
model: {name: dlrm, embedding_dim: 8}
data: {name: movielens}
batch_size: 64
epochs: 2
optimizer: {dense: {name: adam, lr: 1e-3}}
metrics: [auc, log_loss]
checkpoint: {path: somewhere, every_steps: 10}
"""
PROFILE = DeviceProfile(
    2, 2, "cpu", 2, {"peer_ms": 0.2, "update_cost": {"exact_sgd": 1.0}}, {"cpu": "any"}, "2026-01-01"
)


def _plan() -> str:
    from recshard_lab.embedding.configs import EmbeddingBagConfig
    from recshard_lab.sharding import EmbeddingModuleShardingPlan

    table = EmbeddingBagConfig(name="movies", num_embeddings=40, embedding_dim=8, feature_names=["seen"])
    plan = ShardingPlan({"ebc": EmbeddingModuleShardingPlan({"movies": row_wise()(table, Topology(2))})})
    return plan.to_json(indent=1)


def _read_plan(path: Path) -> Any:
    from recshard_lab.cli.plan.planning import read_plan

    return read_plan(path)


@dataclass(frozen=True)
class Kind:
    """A kind of file: its ending, a good one, and its reader."""

    ending: str
    good: Callable[[], str]
    read: Callable[[Path], Any]


KINDS = {
    "tables.yaml": Kind(".yaml", lambda: TABLES, read_tables),
    "tables.json": Kind(".json", lambda: json.dumps(JSON_TABLES, indent=1), read_tables),
    "tables.csv": Kind(".csv", lambda: CSV, read_tables),
    "constraints.yaml": Kind(".yaml", lambda: CONSTRAINTS, lambda path: read_constraints(path, ["movies", "users"])),
    "constraints.json": Kind(".json", lambda: json.dumps({"movies": {"ranks": [0, 1]}}), read_constraints),
    "plan.json": Kind(".json", _plan, _read_plan),
    "profile.json": Kind(".json", PROFILE.to_json, Topology.from_profile),
    "config.yaml": Kind(".yaml", lambda: CONFIG, read_config),
}
BOMB = "x0: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"x{i + 1}: &x{i + 1} [{', '.join([f'*x{i}'] * 9)}]\n" for i in range(9)
)
HOSTILE = {
    "bomb": BOMB,
    "deep list": "[" * 100_000,
    "deep object": '{"a":' * 100_000,
    "deep block": "- " * 100_000 + "x",
    "self": "&a [*a]",
    "merge": "<<: {tables: []}",
    "merge of a number": "movies: {<<: 3}",
    "long number": '[{"name": "a", "num_embeddings": ' + "9" * 5000 + "}]",
    "long hex": "movies: {min_partition: 0x" + "f" * 5000 + "}",
    "long text": json.dumps([{"name": "a" * 10**6, "num_embeddings": "b" * 10**6}]),
    "a list of 10^5": json.dumps([{"name": "a", "weight_init_max": [0] * 10**5, "num_embeddings": [1] * 10**5}]),
    "keys": json.dumps({f"k{i}": i for i in range(2 * 10**4)}),
    "object in an object": json.dumps({"movies": {"ranks": {"a": {"b": {"c": [[[[1]]]]}}}}}),
    "date": "movies: 2024-13-45",
    "tag": "!!python/object/apply:os.system ['true']",
    "binary": "movies: !!binary '///'",
    "key that is a list": "? [a, b]\n: 1",
    "two documents": "a: 1\n---\nb: 2\n",
    "empty": "",
    "null": "null",
    "true": "true",
    "nan": "movies: {min_partition: .nan, pooling_factors: [.inf]}",
    "NaN": '{"movies": {"min_partition": NaN, "pooling_factors": [Infinity]}}',
    "line breaks": "\r\n\x85\u2028" * 1000,
}  # fmt: skip
ODD = ["-1", "0", "1e999", ".nan", "null", "true", "[]", "{}", "'x'", "9" * 30, "9" * 5000, "1.5", "y" * 3000,
       "[[[[1]]]]", "\x00", "\ud7ff", "&a", "*a", "<<", ":", ",", "\n", "\t", "]", "}", "- ",
       "#", "|", "!!int x", "2001-01-99"]  # fmt: skip


def answered(kind: Kind, path: Path) -> str:
    """The message with which a file is refused, "" where it is read; fails on any other error."""
    try:
        kind.read(path)
        words = ""
    except ValueError as error:
        words = str(error)
        assert words, "an error without words"
    if words:
        assert len(words) < MOST_LETTERS, f"{len(words)} characters"
        assert str(path) in words
        assert "Fix: " in words, words
    return words


def edited(text: str, draw: random.Random) -> str:
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(text) + 1)
        end = min(len(text), at + draw.choice([0, 1, 1, 5, 20]))
        lines = text.splitlines(keepends=True) or [""]
        how = draw.randrange(6)
        if how == 0:  # a part is cut out or replaced
            text = text[:at] + draw.choice(["", draw.choice(ODD)]) + text[end:]
        elif how == 1:  # a part twice
            text = text[:end] + text[at:]
        elif how == 2:  # cut short
            text = text[:at]
        elif how == 3:  # lines change places
            draw.shuffle(lines)
            text = "".join(lines)
        elif how == 4:  # a value is replaced
            words = text.replace(",", " ,").split(" ")
            words[draw.randrange(len(words))] = draw.choice(ODD)
            text = " ".join(words)
        else:  # a line is lost, or is there twice
            line = draw.randrange(len(lines))
            lines[line : line + 1] = [lines[line]] * draw.choice([0, 2])
            text = "".join(lines)
    return text


@pytest.mark.parametrize("name", KINDS)
def test_a_good_file_is_read_and_edits_of_it_are_read_or_refused_in_words(name: str, tmp_path: Path) -> None:
    kind, path = KINDS[name], tmp_path / f"file{KINDS[name].ending}"
    path.write_text(kind.good())
    assert answered(kind, path) == ""
    refused = 0
    for seed in range(EDITS):
        path.write_bytes(edited(kind.good(), random.Random(f"{name} {seed}")).encode("utf-8", "surrogatepass"))
        try:
            refused += answered(kind, path) != ""
        except BaseException:
            print(name, seed, path.read_bytes()[:1000])
            raise
    assert refused > EDITS / 4


@pytest.mark.parametrize("name", KINDS)
def test_hostile_files_are_refused_quickly_by_every_reader(name: str, tmp_path: Path) -> None:
    kind, path = KINDS[name], tmp_path / f"file{KINDS[name].ending}"
    for what, text in HOSTILE.items():
        path.write_text(text)
        try:
            assert answered(kind, path)
        except AssertionError as error:
            raise AssertionError(f"{name}, {what}: {error}") from error
    path.write_bytes(b"\xff\xfe\x00bad")
    assert "not UTF-8" in answered(kind, path)


def test_a_file_beyond_the_limit_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "tables.yaml"
    with path.open("wb") as file:
        file.truncate(MOST_BYTES[".yaml"] * 1000)
    assert "MiB" in answered(KINDS["tables.yaml"], path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "tables.yaml"
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"pipe or device.*Fix: "):
        read_tables(path)


def test_yaml_as_people_write_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "base: &b {p: 1, q: [1, 2]}\nsub: {<<: *b, p: 3}\nboth:\n  <<: [*b, {r: 5}]\nn: 40_000\ne: 1e-3\nf: .5\n"
        "h: 0x10\nt: yes\nz: ~\ns: 'NONE'\nd: 2024-01-05\ntext: |\n  two\n  lines\n4: four\n"
    )
    document = read_document(path)
    assert document.content == {
        "base": {"p": 1, "q": [1, 2]}, "sub": {"p": 3, "q": [1, 2]}, "both": {"p": 1, "q": [1, 2], "r": 5},
        "n": 40_000, "e": 1e-3, "f": 0.5, "h": 16, "t": True, "z": None, "s": "NONE", "d": "2024-01-05",
        "text": "two\nlines\n", 4: "four",
    }  # fmt: skip
    assert document.where(["base", "q"]) == f"{path}, line 1, field 'base.q'"
    assert document.where(["both", "r"]).startswith(f"{path}, line 3")


@pytest.mark.parametrize(
    ("field", "meant"), [("rows", "num_embeddings"), ("num_rows", "num_embeddings"), ("size", "num_embeddings"),
                         ("dim", "embedding_dim"), ("features", "feature_names")],
)  # fmt: skip
def test_the_first_error_of_a_newcomer_names_the_field_and_shows_two_tables(
    field: str, meant: str, tmp_path: Path
) -> None:
    path = tmp_path / "tables.yaml"
    path.write_text(f"- name: movies\n  {field}: 40\n")
    words = answered(KINDS["tables.yaml"], path)
    assert f"did you mean {meant!r}?" in words
    example = tmp_path / "example.yaml"
    example.write_text(words.partition("Fix: ")[2].partition("\n")[2].rstrip("."))
    assert len(read_tables(example).tables) == 2
