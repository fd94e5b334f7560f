"""``recshard plan`` and its commands: from files and live modules, to JSON, reports, scripts and TorchRec's plans."""

import ast
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from typer.testing import CliRunner

import recshard_lab as rs
from recshard_lab.cli import app
from recshard_lab.cli.options import StepOptions, machine_of
from recshard_lab.documents import read_document
from recshard_lab.planner import read_constraints
from recshard_lab.sharding import PlanError, ShardingPlan
from recshard_lab.sources import read_source
from tests.cli import models
from tests.lab.plans import many
from tests.refusals import not_refused
from tests.train_job.runs import environment

ROOT = Path(__file__).parents[2]
MODELS = "tests.cli.models"
TABLES = """\
- {name: movies, num_embeddings: 9000, embedding_dim: 16, feature_names: [seen, liked], pooling_factor: [2.5, 1]}
- {name: users, num_embeddings: 500, embedding_dim: 8, feature_names: [user]}
- {name: history, num_embeddings: 60, embedding_dim: 8, feature_names: [past], pooling: "NONE", pooling_factor: 3}
"""


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    path = tmp_path / "tables.yaml"
    path.write_text(TABLES)
    return path


def plan(*arguments: object) -> str:
    """What ``recshard plan ...`` prints."""
    done = CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def made(*arguments: object) -> str:
    return plan("make", *arguments)


# ---- live modules ----


@pytest.mark.parametrize("place", [MODELS, "tests/cli/models.py"])
def test_a_model_larger_than_this_machine_is_planned_by_its_name(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = read_source(f"{place}:huge")
    assert {path: [t.num_embeddings for t in own] for path, own in found.tables.items()} == {
        "embedding_bag_collection": [models.HUGE] * 2
    }
    assert all(parameter.is_meta for parameter in found.module.parameters())
    dense = sum(p.numel() for name, p in models.dlrm().named_parameters() if "embedding_bags" not in name)
    assert found.workload().dense_parameters == found.dense_parameters == dense
    assert found.notes == ()
    planned = made(f"{place}:huge", "--topology", "h100x256")
    assert "movies  10,000,000,000 x 16" in planned


@pytest.mark.parametrize("name", ["dlrm", "ready", "not_on_meta", "TwoTowers", "bare", "listed"])
def test_what_a_name_stands_for_may_be_a_model_a_class_a_function_or_a_list(name: str) -> None:
    found = read_source(f"{MODELS}:{name}")
    plan = found.plan(rs.EmbeddingShardingPlanner(rs.Topology(2), workload=found.workload()))
    assert {path: list(own) for path, own in plan.plan.items()} == {
        path: [table.name for table in own] for path, own in found.tables.items()
    }
    assert bool(found.notes) == (name == "not_on_meta")


def test_a_source_that_cannot_be_is_named(tmp_path: Path) -> None:
    refused = [
        ("nothing.py:model", "file nothing.py does not exist"),
        ("no_such_package.x:model", "module 'no_such_package' exists neither here"),
        (f"{MODELS}:dlmr", r"has no 'dlmr' \(did you mean 'dlrm'\?\)"),
        (f"{MODELS}:broken", r"broken\(\) raised KeyError: 'no such layer'"),
        (f"{MODELS}:plain", "Linear that holds no embedding collection"),
        (f"{MODELS}:HUGE", "gives a int, expected a torch.nn.Module"),
        (MODELS, "neither a file of tables .* nor a model"),
        ("a b:c", "neither a .py file nor the name of a module"),
        ("tables.toml", "neither a file of tables"),
    ]
    for text, words in (("1 / 0", "ZeroDivisionError"), ("raise SystemExit(3)", "SystemExit"), ("(", "SyntaxError")):
        file = tmp_path / f"{words}.py"
        file.write_text(text)
        refused.append((f"{file}:build", rf"{words}.py:build: importing it raised {words}"))
    assert not_refused([(partial(read_source, source), words) for source, words in refused]) == []
    with pytest.raises(OSError, match=r"nothing\.yaml"):
        read_source("nothing.yaml")


@pytest.mark.parametrize(("topology", "ours", "other"), [("h100x8", "hbm_cap", "ddr_cap"), ("", "ddr_cap", "hbm_cap")])
def test_memory_of_one_rank_is_that_of_its_device(topology: str, ours: str, other: str) -> None:
    for wrong in (0, 1e300, float("nan")):
        with pytest.raises(ValueError, match=r"the memory of one rank must be above 0 .* got .*Fix: "):
            machine_of(StepOptions("h100x8", memory_gb=wrong))
    usual, asked = machine_of(StepOptions(topology)), machine_of(StepOptions(topology, memory_gb=3.5))
    assert getattr(asked, ours) == asked.memory_cap_bytes == 3.5e9 != getattr(usual, ours)
    assert getattr(asked, other) == getattr(usual, other)


# ---- wishes from a file ----


def test_wishes_of_a_file_are_those_of_parameter_constraints(tables: Path, tmp_path: Path) -> None:
    wishes = tmp_path / "wishes.yaml"
    wishes.write_text(
        "movies: {sharding_types: [row_wise], forbidden_ranks: [0]}\n"
        "users: {shards: [[2, 0, 500, 0, 4], [1, 0, 500, 4, 8]]}\n"
    )
    out = tmp_path / "plan.json"
    made(tables, "--ranks", 3, "--constraints", wishes, "--out", out)
    found = ShardingPlan.from_json(out.read_text()).tables()
    assert found["movies"].sharding_type == "row_wise"
    assert sorted(found["movies"].ranks or []) == [1, 2]
    assert found["users"].shards == (rs.Shard(2, (0, 500), (0, 4)), rs.Shard(1, (0, 500), (4, 8)))
    as_json = tmp_path / "wishes.json"
    as_json.write_text(json.dumps({"movies": {"ranks": [1]}}))
    assert read_constraints(as_json)["movies"].ranks == [1]


def test_wishes_that_cannot_be_are_named_with_their_line(tmp_path: Path) -> None:
    def read(text: str) -> None:
        (tmp_path / "wishes.yaml").write_text(text)
        read_constraints(tmp_path / "wishes.yaml", ["movies", "users"])

    refused = {
        "movie: {ranks: [0]}": r"line 1, field 'movie': unknown table \(did you mean 'movies'\?\)",
        "movies:\n  ranks: [0]\n  rank: 1": r"line 3, field 'movies.rank': unknown field \(did you mean 'r",
        "movies: {ranks: [0, 0]}": "line 1, field 'movies.ranks': ranks must be distinct",
        "movies: {shards: [[0, 1]]}": r"must be a list of \[rank, r0, r1, c0, c1\]",
        "movies: 3": "field 'movies': must be an object",
        "[movies]": "must be an object of table names",
        "movies: {}\nmovies: {}": "line 2: field 'movies' occurs twice",
        "movies: {": "not YAML",
    }
    assert not_refused([(partial(read, text), words) for text, words in refused.items()]) == []


@pytest.mark.parametrize("given", [[], ["tables"]], ids=["alone", "with its tables"])
@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ([(0, (5, 250), (0, 8)), (1, (250, 500), (0, 8))], r"no shard covers rows \[0, 5\) x cols \[0, 8\)"),
        ([(0, (0, 255), (0, 8)), (1, (250, 500), (0, 8))], r"overlap in rows \[250, 255\)"),
    ],
    ids=["hole", "overlap"],
)
def test_check_refuses_shards_that_do_not_tile_with_and_without_tables(
    tables: Path, tmp_path: Path, shards: list[Any], words: str, given: list[str]
) -> None:
    entries = {"users": rs.ParameterSharding("row_wise", shards=[rs.Shard(*shard) for shard in shards])}
    for name, size in {"movies": (9000, 16), "history": (60, 8)}.items():
        entries[name] = rs.ParameterSharding("table_wise", shards=[rs.Shard(0, (0, size[0]), (0, size[1]))])
    path = tmp_path / "plan.json"
    path.write_text(ShardingPlan({"": entries}).to_json())  # type: ignore[dict-item]
    with pytest.raises(PlanError, match=f"{path.name}: table 'users' .*{words}"):
        plan("check", path, *(tables for _ in given))


# ---- JSON ----


def documents() -> dict[str, Any]:
    planner = rs.EmbeddingShardingPlanner(rs.Topology(4, local_world_size=2))
    plans = {"planned": planner.plan_tables(many(20))}
    plans["routed"] = plans["planned"].with_route("two_hop")
    plans["bare"] = ShardingPlan({"ebc": {"t": rs.ParameterSharding("data_parallel")}})  # type: ignore[dict-item]
    return {name: json.loads(plan.to_json()) for name, plan in plans.items()}


def test_what_a_plan_writes_keeps_to_its_published_schema() -> None:
    schema = json.loads(plan("check", "--schema"))
    assert schema == ShardingPlan.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for document in documents().values():
        jsonschema.validate(document, schema)


@pytest.mark.gate
@pytest.mark.parametrize(
    "change",
    [
        lambda plan, entry: plan.pop("schema"),
        lambda plan, entry: plan.update(version=2),
        lambda plan, entry: plan.update(notes="x"),
        lambda plan, entry: entry.pop("ranks"),
        lambda plan, entry: entry.update(rank=1),
        lambda plan, entry: entry.update(route="by sea"),
        lambda plan, entry: entry.update(ranks=[-1]),
        lambda plan, entry: entry.update(shards=[[0, 1, 2, 3, "4"]]),
        lambda plan, entry: entry.update(sharding_type="data_parallel", route="two_hop"),
    ],
)
def test_what_is_refused_when_it_is_read_breaks_the_schema_too(change: Any) -> None:
    wrong = documents()["planned"]
    change(wrong, next(iter(next(iter(wrong["modules"].values())).values())))
    with pytest.raises(PlanError):
        ShardingPlan.from_json(json.dumps(wrong))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, ShardingPlan.json_schema())


def test_a_plan_is_checked_by_itself_and_against_its_tables(tables: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    made(tables, "--ranks", 3, "--out", out)
    words = f"{out}: a plan of 3 tables without holes or overlaps on 3 ranks. Pass its tables to check their sizes too."
    assert plan("check", out).split() == words.split()
    assert "tiles every table" in " ".join(plan("check", out, tables).split())
    for given in ([], [tables]):
        with pytest.raises(PlanError, match=r"plan.json: table '\w+' .*rank 2"):
            plan("check", out, *given, "--ranks", 2)
    tables.write_text(TABLES.replace("9000", "9001"))
    assert "without holes or overlaps" in " ".join(plan("check", out).split())
    with pytest.raises(PlanError, match=r"plan.json: table 'movies' \(9,001 x 16\)"):
        plan("check", out, tables)
    out.write_text("{}")
    with pytest.raises(PlanError, match=r"plan.json: field 'schema'"):
        plan("check", out)


# ---- what is said of a plan ----


def test_a_plan_from_a_file_is_explained_and_told_from_another(tables: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    made(tables, "--ranks", 2, "--out", first)
    other = ShardingPlan.from_json(first.read_text())
    home = other.plan[""]
    home["movies"] = rs.table_wise(rank=1)(
        rs.EmbeddingBagConfig(9000, 16, name="movies", feature_names=["seen", "liked"]), rs.Topology(2)
    )
    second.write_text(other.to_json())
    text = plan("explain", tables, "movies", "-n", 2, "--plan", second)
    assert "movies: table_wise on rank 1." in text
    assert "users:" not in text
    changes = plan("diff", tables, first, second, "-n", 2)
    assert "1 of 3 tables change" in changes
    assert "No table changes" in plan("diff", tables, first, "-n", 2)  # the planner made it
    answer = plan("explain", tables, "-n", 2, "--why-not", "users=row_wise")
    assert answer.startswith("With users row_wise the predicted step")
    everything = plan("explain", tables, "-n", 2)
    assert [f"\n{name}: " in f"\n{everything}" for name in ("movies", "users", "history")] == [True] * 3
    text += changes + answer + everything
    assert max(map(len, text.splitlines())) <= 100
    assert "predicted step" in made(tables, "--ranks", 2, "--plan", second)


def test_a_pipeline_hides_part_of_the_predicted_step(tables: Path) -> None:
    def step_ms(*more: str) -> float:
        words = made(tables, "--topology", "h100x8", "--batch-size", 4096, *more)
        return float(words.partition("predicted step ")[2].partition(" ms")[0])

    assert step_ms("--pipeline", "sparse_dist") < step_ms()
    with pytest.raises(ValueError, match="pipeline must be one of none, sparse_dist, prefetch, got 'fast'"):
        made(tables, "--ranks", 2, "--pipeline", "fast")


def test_answers_become_pandas_frames() -> None:
    import pandas

    plan = rs.EmbeddingShardingPlanner(rs.Topology(2)).plan_tables(models.tables(100_000))
    explained = plan.explain("movies")
    frame = explained.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.to_dict("records") == explained.records()
    assert frame.loc[frame.chosen, "step_ms"].item() == explained.step_ms
    assert frame.dtypes["more_ms"] == "float64"
    assert len(plan.diff(plan).to_pandas()) == 0
    assert len(plan.why_not({"movies": "row_wise"}).to_pandas()) == 2


def test_the_report_explains_every_table_without_a_script(tables: Path, tmp_path: Path) -> None:
    html = tmp_path / "plan.html"
    made(tables, "--ranks", 2, "--out", html, "--plotly", "none")
    page = html.read_text()
    assert len(re.findall(r'<details class="fold"><summary>\w+: \S+ on [^<]* causes', page)) == 3
    for name in ("movies", "users", "history"):
        assert f"of {name}, ms</th>" in page  # its column of the phases
    assert "<script" not in page


# ---- scripts ----


@pytest.mark.nightly
def test_the_exported_script_trains_under_the_plan_with_torchrun(tables: Path, tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "plan.json"
    command = (tables, "--ranks", 2, "--batch-size", 32, "--optimizer", "exact_row_wise_adagrad")
    made(*command, "--out", script, "--out", out)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    torchrun += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    run = [*torchrun, str(script), "--steps", "20", "--checkpoint", str(tmp_path / "run")]
    done = subprocess.run(run, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 20: loss 0." in done.stdout
    scope: dict[str, Any] = {"__name__": "exported"}
    exec(script.read_text(), scope)  # the model alone, unsharded, takes the weights
    model = scope["Model"]()
    for part in (model.bags, model.rows):
        part.to_empty(device="cpu")
    rs.load_checkpoint(tmp_path / "run", model, optimizer_state=False)
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())
    planned = ShardingPlan.from_json(out.read_text()).tables()
    assert ShardingPlan.from_json(scope["PLAN"]).tables() == planned
    assert scope["FEATURES"] == {"seen": (9000, 2.5), "liked": (9000, 1.0), "user": (500, 1.0), "past": (60, 3.0)}


def run_alone(script: str) -> dict[str, Any]:
    """Two steps of a script for one rank, in this process; its names."""
    scope: dict[str, Any] = {"__name__": "exported"}
    exec(compile(script, "exported", "exec"), scope)
    with scope["join"]() as place:
        scope["train"](place, 2, None)
    return scope


@pytest.mark.gate
@pytest.mark.parametrize(
    ("place", "name"),
    [
        (str(ROOT / "tests/cli/models.py"), "dlrm"),
        *((MODELS, name) for name in ("ready", "TwoTowers", "bare", "listed")),
    ],
)
def test_a_script_of_a_live_model_makes_that_model(place: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = read_source(f"{place}:{name}")
    planner = rs.EmbeddingShardingPlanner(rs.Topology(1), workload=found.workload(batch_size=8))
    plan = found.plan(planner)
    script = plan.to_script(f"{place}:{name}")
    ast.parse(script)
    assert ('with torch.device("meta")' in script) == (name in ("dlrm", "TwoTowers"))
    run_alone(script)
    assert "step 2: loss" in capsys.readouterr().out


def test_a_script_says_whatever_a_config_says(capsys: pytest.CaptureFixture[str]) -> None:
    odd = rs.EmbeddingBagConfig(
        100, 4, 'say "hi"\n', rs.DataType.FP16, ['f"\\', "g"], 0.5, -0.25, pooling=rs.PoolingType.MEAN
    )
    load = rs.Workload(8, pooling_factors={"g": 1.5}, weighted=True, optimizer="adam")
    plan = rs.EmbeddingShardingPlanner(rs.Topology(1), workload=load).plan_tables([odd])
    script = plan.to_script()
    scope = run_alone(script)
    assert scope["BAG_TABLES"] == [odd]
    assert scope["Model"]().bags.is_weighted()
    assert next(scope["batches"](0, 1)).sparse_features.weights().shape
    assert "step 2" in capsys.readouterr().out


def test_scripts_that_cannot_be_are_refused_by_name() -> None:
    planner = rs.EmbeddingShardingPlanner(rs.Topology(2))
    plan = planner.plan(models.Unannotated())
    with pytest.raises(PlanError, match=r"Unannotated.forward\(what: \?, ever: \?\) has arguments for which"):
        plan.to_script(f"{MODELS}:Unannotated")
    with pytest.raises(PlanError, match="has other tables than this plan"):
        plan.to_script(f"{MODELS}:dlrm")
    table = models.tables()[0]
    table.init_fn = torch.nn.init.zeros_
    made = planner.plan_tables([table])
    with pytest.raises(PlanError, match="has an init_fn"):
        made.to_script()
    with pytest.raises(PlanError, match="no planner made this plan"):
        ShardingPlan.from_json(plan.to_json()).to_script()


def test_ranks_of_several_nodes_are_told_how_to_start() -> None:
    plan = rs.EmbeddingShardingPlanner(rs.Topology(8, local_world_size=4)).plan_tables(models.tables())
    assert "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:PORT" in plan.to_script()
    with pytest.raises(SystemExit, match="the plan is for 8 ranks, but 1 run"):
        run_alone(plan.to_script())


# ---- TorchRec ----


def test_a_plan_for_torchrec_is_refused_by_name_where_there_is_none(tables: Path, tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="needs the package torchrec, which is not installed"):
        made(tables, "--ranks", 2, "--out", tmp_path / "plan.pt")


# ---- refusals ----


@pytest.mark.gate
def test_a_refusal_names_an_option_of_the_command_line_that_works(tmp_path: Path) -> None:
    tables = tmp_path / "tables.yaml"
    tables.write_text("- {name: movies, num_embeddings: 100000000, embedding_dim: 64, feature_names: [seen]}\n")

    def planned(gb: str) -> subprocess.CompletedProcess[str]:
        code = "from recshard_lab.cli import main; main()"
        asked = ["plan", "make", str(tables), "--topology", "h100x4", "--memory-gb", gb]
        return subprocess.run([sys.executable, "-c", code, *asked], capture_output=True, text=True, check=False)

    told = planned("2").stderr
    assert "hbm_cap" not in told
    assert "--ranks" in told
    (gb,) = re.findall(r"--memory-gb ([\d.]*\d)", told)
    assert planned(gb).returncode == 0
    assert planned(str(0.9 * float(gb))).returncode == 2


# ---- a newcomer's first minutes ----


def test_the_example_of_tables_and_its_schema_belong_together(tmp_path: Path) -> None:
    path = tmp_path / "tables.yaml"
    path.write_text(made("--example"))
    tables = read_source(str(path)).configs
    assert [table.name for table in tables] == ["movies", "users", "genres"]
    schema = json.loads(made("--schema"))
    content = read_document(path).content
    jsonschema.validate(content, schema)
    jsonschema.validate({"tables": content}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{**content[0], "rows": 3}], schema)
    assert "movies  40,000 x 64" in made(path, "--ranks", 2)
