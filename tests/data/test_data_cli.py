"""``recshard data`` from planted text to files that are checked, and what it says of a mistake."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from recshard_lab.cli import app, main
from recshard_lab.data import CriteoClicks, SyntheticClicks


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("zipped", [False, True])
def test_planted_text_becomes_the_planted_samples(tmp_path: Path, zipped: bool) -> None:
    told = run(
        "synthetic-criteo", "--out", tmp_path / "in", "--samples", 900, "--days", 2, "--memory-gb", 0.01, "--seed", 5,
        *(["--gz"] if zipped else []),
    )  # fmt: skip
    assert "best AUC 0." in told
    names = ["day_0.gz", "day_1.gz"] if zipped else ["day_0", "day_1"]
    told = run("criteo", *(tmp_path / "in" / name for name in names), "--out", tmp_path / "out", "--threshold", 1)
    assert "day_1 450" in told
    assert "num_embeddings: " in told
    assert "complete and correct" in run("check", tmp_path / "out")
    planted = SyntheticClicks(900, memory_bytes=10_000_000, seed=5)
    batch, own = CriteoClicks.open(tmp_path / "out").batch(range(900)), planted.batch(range(900))
    assert batch.labels.tolist() == own.labels.tolist()
    np.testing.assert_allclose(batch.dense_features, own.dense_features, rtol=1e-6)
    for new, old in zip(*(each.sparse_features.values().view(26, -1).numpy() for each in (batch, own)), strict=True):
        pairs = np.unique(np.stack([new, old]), axis=1)
        assert len(np.unique(pairs[0])) == len(np.unique(pairs[1])) == pairs.shape[1]  # other numbers, the same ids


def test_a_mistake_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run("synthetic-criteo", "--out", tmp_path / "in", "--samples", 50)
    for arguments, says in (
        (["criteo", str(tmp_path / "day_9"), "--out", str(tmp_path / "out")], "day_9 does not exist"),
        (["synthetic-criteo", "--out", str(tmp_path / "in")], "is there already: give another folder"),
        (["check", str(tmp_path / "in")], "has no manifest.json: make it with `recshard data criteo"),
    ):
        monkeypatch.setattr("sys.argv", ["recshard", "data", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert says in " ".join(capsys.readouterr().err.split())
