"""Codecs on a device count values that they cut, and warn of them, without a wait of the host."""

import logging
from typing import Any

import pytest
import torch

from recshard_lab.comm import CommType
from recshard_lab.comm.codecs import make_codec
from tests.ledger import jobs


def cut(precision: CommType, limit: float, device: str) -> tuple[list[Any], int, list[int], list[str]]:
    """The decoded rows, those cut, how many warnings came after each of three messages, and the warnings."""
    jobs.register(device)
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("recshard_lab").addHandler(handler)
    try:
        codec = make_codec(precision)
        small = torch.ones(1, 4, device=device)
        rows = torch.tensor([[limit * 2, -limit * 2, 3.0, 4.0]]).to(device)
        encoded, warned = [], []
        for message in (small, rows, small):
            with jobs.without_waiting(device):
                encoded.append(codec.encode(message))
            warned.append(len(found))
            if device == "cuda":
                torch.cuda.synchronize()  # so that the count has arrived before the next message
        return codec.decode(encoded[1], 4).cpu().tolist(), codec.saturated, warned, found
    finally:
        logging.getLogger("recshard_lab").removeHandler(handler)


FORMATS = [(CommType.FP16, 65504.0), (CommType.INT8, torch.finfo(torch.float32).max / 4)]


@pytest.mark.parametrize(("precision", "limit"), FORMATS)
def test_values_that_are_too_large_are_counted_without_a_host_read(
    ranks: Any, device: str, precision: CommType, limit: float
) -> None:
    for kept, saturated, warned, warnings in ranks.run(cut, precision, limit, device):
        assert kept[0][:2] == pytest.approx([limit, -limit], rel=0.01)
        assert saturated == 2
        assert warned == [0, 0, 1]  # a later message warns of what an earlier one counted
        assert f"{precision} codec: 2 values beyond {limit:g}" in warnings[0]
