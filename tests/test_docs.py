"""Pages of docs/: their code runs and prints what they state, their links lead to files and headings."""

import doctest
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import recshard_lab as rs
from recshard_lab.planner import read_constraints, read_tables
from recshard_lab.serving.server import serve
from recshard_lab.train.job import read_config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = {DOCS / "tutorials", DOCS / "reference" / "api", DOCS / "reference" / "cli", DOCS / "_build"}
PAGES = sorted(
    page for page in DOCS.rglob("*.md") if not GENERATED & set(page.parents) or page == DOCS / "tutorials" / "index.md"
)
NAMES = [page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES]
BLOCK = re.compile(r"```python\n(?P<code>.*?)```(?:\n+```text\n(?P<output>.*?)```)?", re.DOTALL)
BLOCKS = [
    pytest.param(
        found["code"],
        found["output"],
        id=f"{name}-{number}",
        marks=[pytest.mark.nightly] if "calibrate(" in found["code"] else [],  # measures for 15 s
    )
    for page, name in zip(PAGES, NAMES, strict=True)
    if page.parent.name != "concepts"  # tests/test_concepts.py runs them
    for number, found in enumerate(BLOCK.finditer(page.read_text()))
]
# They change what can be imported, warn on a machine with other work, or leave a dataset registered.
APART = ("compat import install", "calibrate(", "@register_dataset")
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.gate
@pytest.mark.parametrize(("code", "output"), BLOCKS)
def test_every_block_runs_and_prints_what_the_page_states(
    code: str, output: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if any(word in code for word in APART):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=280)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:
        exec(compile(code, "<page>", "exec"), {"__name__": "__main__"})
        printed = capfd.readouterr().out
    for stated in re.findall(r"^ *print\(.*  # (.*)$", code, re.MULTILINE):
        assert re.split(r": (?=[a-z])", stated)[0] in [line.strip() for line in printed.splitlines()]
    if output is not None:
        assert doctest.OutputChecker().check_output(output, printed, SAME), printed


def stated_yaml(page: str, first: str) -> str:
    """The one YAML block of a page that begins with these letters."""
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    (found,) = [block for block in blocks if block.startswith(first)]
    return found


@pytest.mark.parametrize("page", ["howto/plan.md", "reference/schemas.md"])
def test_the_file_of_tables_is_one(page: str, tmp_path: Path) -> None:
    file = tmp_path / "tables.yaml"
    file.write_text(stated_yaml(page, "- {name: movies"))
    assert [table.name for table in read_tables(file).tables] == ["movies", "users", "genres"]


def test_the_file_of_constraints_is_one(tmp_path: Path) -> None:
    file = tmp_path / "constraints.yaml"
    file.write_text(stated_yaml("reference/schemas.md", "movies:"))
    assert read_constraints(file)["users"].shards is not None


@pytest.mark.parametrize(("page", "first"), [("howto/train.md", "model: {name: dlrm,"), ("howto/data.md", "model:")])
def test_the_file_of_a_run_is_one(page: str, first: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(stated_yaml(page, first))
    assert read_config(file).batch_size in (512, 4096)


def anchor(heading: str) -> str:
    """As GitHub and MyST make it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"(?s)^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE)
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`((?:recshard_lab|benchmarks|tests)/[\w/]+\.py)`", text):
        assert (ROOT / name).is_file(), name
    for target in re.findall(r"\]\((?![a-z]+:)(.+?)\)", text):
        path, _, heading = target.partition("#")
        file = page if not path else (page.parent / path).resolve()
        if not GENERATED & set(file.parents):
            assert file.is_file(), target
            assert not heading or heading in anchors(file), target


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda file: file.stem)
def test_every_link_of_a_notebook_into_the_docs_leads_to_a_heading(notebook: Path) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "markdown"]
    for target in re.findall(r"\]\(\.\./docs/(.+?)\)", "".join("".join(cell["source"]) + "\n" for cell in cells)):
        path, _, heading = target.partition("#")
        assert (DOCS / path).is_file(), target
        assert not heading or heading in anchors(DOCS / path), target


def test_the_glossary_is_in_alphabetical_order_and_has_no_term_twice() -> None:
    terms = re.findall(r"^## (.*)$", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    ordered = [term.lower().replace("-", " ").replace("_", " ") for term in terms]
    assert ordered == sorted(set(ordered))


def test_the_table_of_the_parameter_server_is_what_its_block_computes() -> None:
    page = (DOCS / "from_sok_and_hkv.md").read_text()
    found = rs.planner.compare_servers(
        rs.planner.mlperf_dlrm_dcnv2_tables(), rs.planner.mlperf_dlrm_dcnv2_workload(batch_size=512)
    )
    for point in found.points:
        cells = [f"{point.megabytes[name]:.4g} / {ms:.3g}" for name, ms in point.ms.items()]
        assert f"| {point.workers} | {point.servers} | {' | '.join(cells)} |" in page


@pytest.mark.gate
def test_the_client_of_the_serving_page_asks_a_server_with_the_model_of_that_page() -> None:
    blocks = [block.values[0] for block in BLOCKS if str(block.id).startswith("serving-")]
    made, client = (next(code for code in blocks if word in code) for word in ("save_bundle", "def predict"))
    names: dict[str, Any] = {}
    exec(made, names)
    exec(client, names)
    wanted = names["load_bundle"](names["folder"] / "v1").predict(names["example"])["probability"]
    dense = dict(zip(("age", "year"), names["example"].dense.T.tolist(), strict=True))
    with serve(names["folder"]) as server:
        found = names["predict"](server.address, dense, {"movie": [[1, 5], [7]], "genre": [[3], [4]]})
    torch.testing.assert_close(torch.tensor(found["probability"]), wanted)


def test_sections_of_a_run_name_all_registered_choices() -> None:
    from recshard_lab.data import dataset_names
    from recshard_lab.models import model_names
    from recshard_lab.train.job import config
    from recshard_lab.train.pipelines.registry import pipeline_names

    for section, names in (
        (config.ModelSection, model_names()),
        (config.DataSection, dataset_names()),
        (config.PipelineSection, pipeline_names()),
        (config.DenseOptimizer, config.DENSE),
        (config.TrainConfig, config.METRICS),
    ):
        assert [name for name in names if name not in str(section.__doc__)] == [], section.__name__
