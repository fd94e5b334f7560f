"""Pages of docs/: their code runs, their links lead to files, and their computed table is what their code computes."""

import re
from pathlib import Path

import pytest

import recshard_lab as rs

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
    found = rs.compare_servers(rs.mlperf_dlrm_dcnv2_tables(), rs.mlperf_dlrm_dcnv2_workload(batch_size=512))
    for point in found.points:
        cells = [f"{point.megabytes[name]:.4g} / {ms:.3g}" for name, ms in point.ms.items()]
        assert f"| {point.workers} | {point.servers} | {' | '.join(cells)} |" in page
