"""Ids, lengths, offsets and weights may be views of any stride, int32 or int64: the numbers are the same."""

from collections.abc import Iterator
from typing import Any

import pytest

import recshard_lab
from tests.distributed import views


@pytest.mark.parametrize("entry", views.ENTRIES)
def test_views_give_what_contiguous_tensors_give(entry: str) -> None:
    call, wrong = views.ENTRIES[entry], []
    truths: dict[str, Any] = {}
    for name, truth, seen in views.pairs():
        key = str((truth.values.tolist(), truth.lengths is None))
        truths[key] = truths.get(key) or views.plain(call(truth))
        if views.plain(call(seen)) != truths[key]:
            wrong.append(name)
    assert not wrong


@pytest.fixture(scope="module")
def two() -> Iterator[Any]:
    with recshard_lab.launch(2) as launched:
        yield launched


@pytest.mark.gate
@pytest.mark.parametrize("kind", views.KINDS)
def test_every_scheme_reads_and_trains_the_rows_of_views(two: Any, kind: str) -> None:
    for scheme in views.SCHEMES:
        for tried, wrong in two.run(views.wrong_on_rank, kind, scheme):
            assert tried > 50
            assert not wrong, scheme


def test_a_pipeline_reads_and_trains_the_rows_of_views(two: Any) -> None:
    assert two.run(views.wrong_in_pipeline) == [[], []]
