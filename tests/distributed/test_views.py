"""Ids, lengths, offsets and weights may be views of any stride, int32 or int64: the numbers are the same."""

from typing import Any

import pytest

from tests.distributed import views
from tests.grid import NIGHT


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


@pytest.mark.gate
@pytest.mark.parametrize("scheme", views.SCHEMES)
def test_every_scheme_reads_and_trains_the_rows_of_views(two: Any, scheme: str) -> None:
    """Every kind of batch under a third of the schemes; at night under all."""
    number = views.SCHEMES.index(scheme)
    for kind in views.KINDS if NIGHT else [views.KINDS[number % 3]]:
        for tried, wrong in two.run(views.wrong_on_rank, kind, scheme):
            assert tried > 50
            assert not wrong, kind
