"""The comparison of parity cases. The cases themselves are tests by `conftest`."""

import json
from pathlib import Path

import pytest

from tests.compat.parity.compare import CASES, RECORDED, Observer, difference, names_of, recorded


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_case_is_recorded(path: Path) -> None:
    assert sorted(names_of(path)) == sorted(recorded(path.stem)), "Fix: python -m tests.compat.parity.record"


def test_no_record_is_left_over() -> None:
    assert {path.stem for path in RECORDED.glob("*.json")} == {path.stem for path in CASES}


@pytest.mark.nightly
def test_a_file_that_cannot_be_imported_fails_and_later_files_run(observer: Observer) -> None:
    assert "no_such_file" in observer.results("no_such_file")["import"]["error"]
    assert observer.results("signatures").keys() == recorded("signatures").keys()


def test_a_difference_is_found_where_it_is() -> None:
    theirs = {"a": [1.0, {"b": "x"}]}
    assert not difference(theirs, json.loads(json.dumps(theirs)))
    assert not difference({"a": [float("nan")]}, {"a": [float("nan")]})
    assert difference(theirs, {"a": [1.0, {"b": "y"}]}) == "result['a'][1]['b']: 'x' under TorchRec, 'y' here"
    assert difference({"a": [1.0]}, {"a": [1.1]})
    assert difference({"a": True}, {"a": 1})
