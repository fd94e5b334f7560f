"""``recshard port``: what it finds in the text of a script for TorchRec."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import recshard_lab as rs
from recshard_lab.cli import app
from recshard_lab.compat import PortReport, read_script

REFUSED = "torchrec.distributed.embedding_lookup.GroupedEmbeddingsLookup"
"""An internal part of TorchRec, which stays refused."""


def report(folder: Path, text: str, **values: Any) -> PortReport:
    path = folder / "train.py"
    path.write_text(text)
    return read_script(path, values)


def sizes(found: PortReport) -> dict[str, tuple[int, int]]:
    return {table.config.name: (table.config.num_embeddings, table.config.embedding_dim) for table in found.tables}


def test_names_are_found_under_every_form_of_import(tmp_path: Path) -> None:
    module, _, name = REFUSED.rpartition(".")
    found = report(
        tmp_path,
        "import torchrec\n"
        "import torchrec.distributed as d\n"
        "from torchrec import distributed as e, JaggedTensor as JT\n"
        f"from {module} import (\n    {name},\n)\n"
        "def later():\n"
        "    from torchrec.models.dlrm import DLRM\n"
        "    return torchrec.distributed.types.ShardingType, d.ShardingEnv, e.ShardingEnv, DLRM, JT\n"
        "ebc = torchrec.KeyedJaggedTensor.from_lengths_sync\n"
        "torch.distributed.types\n",
    )
    by_name = {finding.name: (finding.lines, finding.verdict) for finding in found.findings}
    assert by_name == {
        "torchrec": ((1,), "served"),
        "torchrec.distributed": ((2, 3), "served"),
        "torchrec.JaggedTensor": ((3,), "served"),
        REFUSED: ((5,), "refused"),
        "torchrec.models.dlrm.DLRM": ((8,), by_name["torchrec.models.dlrm.DLRM"][1]),
        "torchrec.distributed.types.ShardingType": ((9,), "served"),
        "torchrec.distributed.ShardingEnv": ((9,), "served"),
        "torchrec.KeyedJaggedTensor": ((10,), "served"),
    }
    (refused,) = found.of("refused")
    assert refused.note.startswith("(internals of sharded modules). Nearest here: ")
    assert f"{refused.note.split('Nearest here: ')[1]}" in str(found).replace("\n", " ")


def test_a_name_that_differs_carries_the_sentence(tmp_path: Path) -> None:
    found = report(tmp_path, "from torchrec.distributed.sharding_plan import grid_shard, row_wise\n")
    (differing,) = found.of("differs")
    assert differing.note == "mean pooling, grid_shard: the sum in TorchRec, the mean, as unsharded here"


def test_arguments_that_signatures_here_do_not_have_are_refused(tmp_path: Path) -> None:
    found = report(
        tmp_path,
        "from torchrec import EmbeddingBagCollection, KeyedJaggedTensor\n"
        "EmbeddingBagCollection(tables=[], colour='red')\n"
        "KeyedJaggedTensor.from_lengths_sync(['a'], values, lengths, shape=3)\n"
        "KeyedJaggedTensor.from_lengths_sync(*anything, **more)\n"
        "KeyedJaggedTensor.no_such_method()\n"
        "EmbeddingBagCollection(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)\n",
    )
    assert [(finding.lines, finding.name) for finding in found.of("refused")] == [
        ((2,), "torchrec.EmbeddingBagCollection(colour=)"),
        ((3,), "torchrec.KeyedJaggedTensor.from_lengths_sync(shape=)"),
        ((5,), "torchrec.KeyedJaggedTensor.no_such_method"),
        ((6,), "torchrec.EmbeddingBagCollection()"),
    ]


def test_tables_are_read_from_constants_loops_functions_and_defaults(tmp_path: Path) -> None:
    found = report(
        tmp_path,
        "import argparse, os, sys\n"
        "from torchrec import EmbeddingBagConfig, EmbeddingConfig, PoolingType\n"
        "from torchrec.datasets.criteo import DEFAULT_CAT_NAMES\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--num-rows', type=int, default=10**3)\n"
        "args = parser.parse_args()\n"
        "DIM = 2 * 8\n"
        "names = DEFAULT_CAT_NAMES[:2]\n"
        "a = [EmbeddingBagConfig(args.num_rows, DIM, name=f't_{n}', feature_names=[n]) for n in names]\n"
        "for n, rows in zip(['x', 'y'], (5, 6)):\n"
        "    a.append(EmbeddingConfig(name=n, num_embeddings=rows + len(a), embedding_dim=4, feature_names=[n]))\n"
        "def table(name, rows=7):\n"
        "    return EmbeddingBagConfig(num_embeddings=rows, embedding_dim=DIM, name=name, pooling=PoolingType.MEAN)\n"
        "class Model:\n"
        "    def __init__(self, dim=32):\n"
        "        self.tables = [table('film'), table('user', rows=int(os.environ.get('USERS', 9)))]\n"
        "        self.more = EmbeddingBagConfig(8, dim, name='more', feature_names=['more'])\n"
        "if len(sys.argv) > 1:\n"
        "    Model(64)\n"
        "if __name__ == '__main__':\n"
        "    Model()\n",
    )
    assert sizes(found) == {
        "t_cat_0": (1000, 16), "t_cat_1": (1000, 16), "x": (7, 4), "y": (9, 4),
        "film": (7, 16), "user": (9, 16), "more": (8, 32),
    }  # fmt: skip
    assert {table.config.embedding_dim for table in found.tables if table.config.name == "more"} == {64, 32}
    (film,) = (table.config for table in found.tables if table.config.name == "film")
    assert film.pooling is rs.PoolingType.MEAN
    plan = found.plan(2).plan  # of two collections, as both have a table "more"
    assert [sorted(tables) for tables in plan.values()] == [sorted(sizes(found)), ["more"]]


def test_a_table_that_needs_the_script_to_run_is_named_and_set_makes_it_readable(tmp_path: Path) -> None:
    text = (
        "from torchrec import EmbeddingBagConfig\n"
        "vocabulary = load('films.txt')\n"
        "film = EmbeddingBagConfig(num_embeddings=len(vocabulary), embedding_dim=8, name='film', feature_names=['f'])\n"
    )
    found = report(tmp_path, text)
    (unread,) = found.unread
    assert (unread.line, unread.argument, unread.expression) == (3, "num_embeddings", "len(vocabulary)")
    assert "Fix: --set 'len(vocabulary)=VALUE'" in str(found).replace("\n", " ")
    with pytest.raises(rs.PlanError, match=r"nothing to plan. Fix: pass the sizes"):
        found.plan(2)
    assert sizes(read_script(tmp_path / "train.py", {"len(vocabulary)": 30})) == {"film": (30, 8)}
    done = CliRunner().invoke(app, ["port", str(tmp_path / "train.py"), "--set", "len(vocabulary)=30", "-n", "3"])
    assert "The plan of these tables on 3 ranks:" in done.stdout


def test_the_plan_keeps_to_the_schemes_that_the_script_allows(tmp_path: Path) -> None:
    found = report(
        tmp_path,
        "import torchrec\n"
        "from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints\n"
        "from torchrec.distributed.sharding_plan import construct_module_sharding_plan, column_wise\n"
        "from torchrec.distributed.types import ShardingType\n"
        "tables = [torchrec.EmbeddingBagConfig(100, 64, name=n, feature_names=[n]) for n in 'abc']\n"
        "limits = {'a': ParameterConstraints(sharding_types=[ShardingType.ROW_WISE.value])}\n"
        "EmbeddingShardingPlanner(topology=None, constraints=limits)\n"
        "construct_module_sharding_plan(ebc, {'b': column_wise(ranks=[0, 1])})\n",
    )
    plan = found.plan(2).tables()
    assert (plan["a"].sharding_type, plan["b"].sharding_type) == ("row_wise", "column_wise")
    assert found.to_dict()["tables"][0]["sharding_types"] == ["row_wise"]


def test_reading_has_no_effects_and_ends(tmp_path: Path) -> None:
    found = report(
        tmp_path,
        "import torchrec\n"
        f"open({str(tmp_path / 'written')!r}, 'w').write('x')\n"
        "x = 'a' * 10**12\n"
        "y = 10**10**10\n"
        "z = list(range(10**12))\n"
        "def again(n):\n    return again(n + 1)\n"
        "again(0)\n"
        "for i in range(10**5):\n"
        "    for j in range(10**5):\n"
        "        k = i + j\n",
    )
    assert not (tmp_path / "written").exists()
    assert not found.tables


def test_the_command_writes_its_report_and_ends_with_one_where_a_name_is_refused(tmp_path: Path) -> None:
    script, text, data = tmp_path / "train.py", tmp_path / "r.txt", tmp_path / "r.json"
    script.write_text(
        "import torch, torchrec\n"
        "t = torchrec.EmbeddingBagConfig(100, 8, name='film', feature_names=['f'])\n"
        "device = torch.device('cuda')\n"
    )
    words = ["port", str(script), "--out", str(text), "--out", str(data), "-n", "2"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "--translate runs these lines without GPUs: 3." in done.stdout
    assert f"Run it: python -m recshard_lab.compat --translate {script}" in done.stdout
    assert text.read_text().strip() in done.stdout
    written = json.loads(data.read_text())
    assert [finding["verdict"] for finding in written["findings"]] == ["served", "served"]
    assert (written["ranks"], written["device_lines"]) == (2, [3])
    assert rs.ShardingPlan.from_json(json.dumps(written["plan"])).tables().keys() == {"film"}
    script.write_text(f"import {REFUSED.rpartition('.')[0]}\n")
    assert CliRunner().invoke(app, ["port", str(script)]).exit_code == 1


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        ("def broken(:\n", [], r"line 1: .*this is not valid Python 3. Fix: "),
        ("import torchrec\n", ["--set", "rows"], r"--set 'rows': expected EXPRESSION=VALUE. Fix: --set"),
        ("import torchrec\n", ["--set", "a b=3"], r"expected EXPRESSION=VALUE"),
        ("import torchrec\n", ["--out", "x.csv"], r"'.csv' is not a supported format"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, words: list[str], says: str) -> None:
    (tmp_path / "train.py").write_text(text)
    done = CliRunner().invoke(app, ["port", str(tmp_path / "train.py"), *words])
    assert isinstance(done.exception, ValueError)
    with pytest.raises(ValueError, match=says):
        raise done.exception


def test_a_missing_file_and_a_broken_notebook(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_script(tmp_path / "none.py")
    (tmp_path / "broken.ipynb").write_text("[]")
    with pytest.raises(ValueError, match=r"broken.ipynb cannot be read: TypeError: .* Fix: pass a Python script"):
        read_script(tmp_path / "broken.ipynb")


def test_arguments_with_a_value_that_is_refused_are_refused_with_the_reason(tmp_path: Path) -> None:
    found = report(
        tmp_path,
        "import torchrec\n"
        "from torchrec.distributed.planner import ParameterConstraints\n"
        "from torchrec.distributed.types import CacheParams\n"
        "virtual = True\n"
        "for n in 'ab':\n"
        "    torchrec.EmbeddingBagConfig(100, 8, n, feature_names=[n], use_virtual_table=virtual)\n"
        "torchrec.EmbeddingConfig(num_embeddings=9, embedding_dim=8, name='c', num_embeddings_post_pruning=5)\n"
        "torchrec.EmbeddingConfig(num_embeddings=9, embedding_dim=8, name='d', num_embeddings_post_pruning=9)\n"
        "torchrec.EmbeddingConfig(9, 8, 'e', use_virtual_table=unknown(), need_pos=True)\n"
        "ParameterConstraints(['row_wise'], None, None, [1.0], None, None, False, None, None, True)\n"
        "CacheParams(None, 0.2, 0.5)\n",
    )
    refused = [(finding.lines, finding.name.rpartition(".")[2]) for finding in found.of("refused")]
    assert refused == [
        ((6,), "EmbeddingBagConfig(use_virtual_table=)"),
        ((7,), "EmbeddingConfig(num_embeddings_post_pruning=)"),
        ((10,), "ParameterConstraints(stochastic_rounding=)"),
        ((11,), "CacheParams(reserved_memory=)"),
    ]
    notes = [finding.note for finding in found.of("refused")]
    assert notes[3] == ("reserved_memory=0.5 is not supported: the cache does not have this setting. Fix: omit it")
    assert all(" is not supported: " in note and " Fix: " in note for note in notes)
