"""``recshard bench compat``: its rows, and that its counts are those of the parity suite and of the coverage table."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks import compat
from recshard_lab.cli import app
from recshard_lab.compat import coverage
from tests.compat.parity.compare import recorded


@pytest.mark.nightly
def test_it_prints_each_module_and_compares_cases_with_the_stored_ones() -> None:
    done = CliRunner().invoke(app, ["bench", "compat", "--quick", "--only", "jagged", "--json"])
    figures = json.loads(done.stdout)
    modules = coverage()
    served = sum(len(module.served) for module in modules)
    every = served + sum(len(module.missing) for module in modules)
    assert (figures[compat.SERVED]["value"], figures[compat.SERVED]["of"]) == (served, every)
    assert {module.module for module in modules} <= set(figures)
    assert all(figures[m.module]["value"] == len(m.served) for m in modules)
    assert all(figures[m.module]["refused"] == len(m.missing) for m in modules)
    assert figures[compat.NO_REASON]["value"] == 0
    assert figures[compat.CASES]["of"] == len(recorded("jagged"))
    assert figures[compat.DISAGREE]["value"] == 0
    row = figures["torchrec.sparse.jagged_tensor"]
    assert row["cases"] == row["agree"] > 0
    assert figures[compat.IMPORT]["modules"] > 0
    assert set(compat.TARGETS) <= set(figures)


@pytest.mark.nightly
def test_a_case_that_gives_another_result_is_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = recorded("jagged") | {"an_unknown_key": "nothing"}
    monkeypatch.setattr("tests.compat.parity.compare.recorded", lambda file: stored)
    _, agree, _, disagree = compat._parity(["jagged"])
    assert agree[""] == len(stored) - 1
    assert disagree == ["jagged.an_unknown_key: result: 'nothing' under TorchRec, 'KeyError' here"]


def test_the_module_of_a_name_is_its_longest_known_parent() -> None:
    names = ["torchrec.sparse.jagged_tensor.KeyedJaggedTensor.split", "torchrec.models.dlrm.DLRM", "json.loads"]
    assert compat._modules(names) == {"torchrec.sparse.jagged_tensor", "torchrec.models.dlrm"}
