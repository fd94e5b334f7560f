"""Pages of docs/: their code runs, their links lead to files, and their computed table is what their code computes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import recshard_lab as rs
from recshard_lab.serving.server import serve

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCKS = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


def test_there_are_pages_with_code() -> None:
    assert "from_sok_and_hkv" in {page.stem for page in PAGES}
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("code", BLOCKS)
def test_every_block_runs_and_prints_what_its_comments_state(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(code, {})
    printed = capsys.readouterr().out.splitlines()
    stated = [line.rsplit("# ", 1)[1] for line in code.splitlines() if line.startswith("print(") and "# " in line]
    for words in stated:
        assert words.split(":")[0] in printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_named_file_exists(page: Path) -> None:
    for name in re.findall(r"`(recshard_lab/[\w/]+\.py)`", page.read_text()):
        assert (ROOT / name).is_file(), name
    for target in re.findall(r"\]\((?!https?:)(.+?)\)", page.read_text()):
        assert (page.parent / target).is_file(), target


def test_the_table_of_the_parameter_server_is_what_its_block_computes() -> None:
    page = (ROOT / "docs" / "from_sok_and_hkv.md").read_text()
    found = rs.planner.compare_servers(
        rs.planner.mlperf_dlrm_dcnv2_tables(), rs.planner.mlperf_dlrm_dcnv2_workload(batch_size=512)
    )
    for point in found.points:
        cells = [f"{point.megabytes[name]:.4g} / {ms:.3g}" for name, ms in point.ms.items()]
        assert f"| {point.workers} | {point.servers} | {' | '.join(cells)} |" in page


def test_the_client_of_the_serving_page_asks_a_server_with_the_model_of_that_page() -> None:
    blocks = [block.values[0] for block in BLOCKS if block.id.startswith("serving-")]
    made, client = (next(code for code in blocks if word in code) for word in ("save_bundle", "def predict"))
    names: dict[str, Any] = {}
    exec(made, names)
    exec(client, names)
    wanted = names["load_bundle"](names["folder"] / "v1").predict(names["example"])["probability"]
    dense = dict(zip(("age", "year"), names["example"].dense.T.tolist(), strict=True))
    with serve(names["folder"]) as server:
        found = names["predict"](server.address, dense, {"movie": [[1, 5], [7]], "genre": [[3], [4]]})
    torch.testing.assert_close(torch.tensor(found["probability"]), wanted)
