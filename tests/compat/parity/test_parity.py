"""Each case gives the same under TorchRec 1.8 (stored) and under its names served by this library."""

import json
import re
import sys
from functools import lru_cache
from typing import Any

import pytest

from tests.compat.parity.compare import CASES, RECORDED, difference, recorded, run


def named(path: Any) -> list[str]:
    """Names of the cases of a file, in its order."""
    return re.findall(r"^@case\(.*?^def (\w+)", path.read_text(), re.MULTILINE | re.DOTALL)


@lru_cache(maxsize=1)
def ours(file: str) -> dict[str, Any]:
    return run(sys.executable, "recshard_lab", [file])[file]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("file", "name"), [(path.stem, name) for path in CASES for name in named(path)])
def test_a_case_gives_what_torchrec_gives(file: str, name: str) -> None:
    results = ours(file)
    assert name in results, results
    result = results[name]
    assert "error" not in result, result["error"]
    found = difference(recorded(file)[name], result["value"])
    if result["differs"]:
        assert found, f"{file}.{name} no longer differs. Fix: remove differs= from its case"
    else:
        assert not found, found


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_case_is_recorded(path: Any) -> None:
    assert sorted(named(path)) == sorted(recorded(path.stem)), "Fix: python -m tests.compat.parity.record"


def test_no_record_is_left_over() -> None:
    assert {path.stem for path in RECORDED.glob("*.json")} == {path.stem for path in CASES}


def test_a_difference_is_found_where_it_is() -> None:
    theirs = {"a": [1.0, {"b": "x"}]}
    assert not difference(theirs, json.loads(json.dumps(theirs)))
    assert not difference({"a": [float("nan")]}, {"a": [float("nan")]})
    assert difference(theirs, {"a": [1.0, {"b": "y"}]}) == "result['a'][1]['b']: 'x' under TorchRec, 'y' here"
    assert difference({"a": [1.0]}, {"a": [1.1]})
    assert difference({"a": True}, {"a": 1})
