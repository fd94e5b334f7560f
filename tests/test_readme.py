"""What the README says is so: its examples run, its links lead somewhere, its set-up lines are those that CI uses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def example(word: str) -> str:
    """The one example that has this word."""
    (found,) = [code for code in EXAMPLES if word in code]
    return found


def test_the_first_example_has_ten_lines() -> None:
    assert len([line for line in EXAMPLES[0].splitlines() if line]) == 10


def test_the_first_example_plans_launches_and_measures(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[0])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "predicted:" in done.stdout
    assert re.search(r"measured: .* per step", done.stdout)


def test_the_example_of_a_comparison_prints_its_plans_and_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(example("found.diff("), {})
    printed = capsys.readouterr().out
    assert "planned" in printed.splitlines()[0]
    assert "(best)" in printed
    assert "2 of 2 tables change" in printed


def test_the_example_of_an_export_writes_a_page_a_plan_and_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(example("rs.export"), {})
    assert (tmp_path / "plans.html").stat().st_size <= 3_000_000
    assert '"row_wise"' in (tmp_path / "rows.json").read_text()
    compile((tmp_path / "train.py").read_text(), "train.py", "exec")


def test_the_example_of_a_sweep_says_that_it_is_simulated() -> None:
    code = example("rs.sweep")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Simulated, not measured: 4 points of 26 tables" in done.stdout


def test_the_example_of_a_pipeline_reports_and_draws_its_stages() -> None:
    code = example("TrainPipelineSparseDist")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "model.embedding_bag_collection: its ids are sent ahead, from batch.sparse_features" in done.stdout
    assert "of input_dist ran behind computing" in done.stdout


def test_the_example_of_checkpoints_saves_and_loads(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", example("save_checkpoint")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3\n"


def test_the_example_of_a_loader_goes_on_where_it_stood() -> None:
    code = example("SyntheticClicks")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epoch 0: 4,096 of 100,000 samples (4.1%) Best(auc=0.8")


def test_the_scheme_of_the_example_tiles_and_is_planned() -> None:
    import recshard_lab as rs
    from recshard_lab.sharding.schemes import unregister_scheme

    exec(example("register_scheme"), {"__name__": "__main__"})
    try:
        table = rs.EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name="t", feature_names=["f"])
        wish = {"t": rs.ParameterConstraints(sharding_types=["halves"])}
        plan = rs.EmbeddingShardingPlanner(rs.Topology(2), constraints=wish).plan_tables([table])
        assert [shard.rows for shard in plan.tables()["t"].shards] == [(0, 4), (4, 9)]
        plan.validate([table], 2)
    finally:
        unregister_scheme("halves")


def test_the_example_of_models_plans_mlperfs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", example("build_model")], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "26,151,671,809 parameters on 8 ranks\n"


def test_the_example_for_readers_of_torchrec_runs() -> None:
    code = example("shadow=True").replace("\ninstall()", "\ninstall(shadow=True)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "seen" in done.stdout


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!https?:)(.+?)\)", README))))
def test_every_link_leads_to_a_file(target: str) -> None:
    assert (ROOT / target).is_file()


def test_the_set_up_lines_are_the_two_promised() -> None:
    lines = [line.split("#")[0].strip() for line in README.splitlines() if line.startswith("    pip install")]
    assert lines == ['pip install -e ".[cpu]" && recshard lab', 'pip install -e ".[cpu,test]" && pytest']
    assert '".[cpu,test]"' in (ROOT / ".ci" / "run").read_text()


def test_the_run_of_the_readme_is_one(tmp_path: Path) -> None:
    from recshard_lab.train.job import read_config

    (text,) = re.findall(r"```yaml\n(model:.*?)```", README, re.DOTALL)
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert read_config(file).optimizer.dense.lr == 0.002
