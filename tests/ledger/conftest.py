"""The devices that these tests run on: the ledger, which every machine has, and NVIDIA GPUs where there are some."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import recshard_lab

GPUS = torch.cuda.device_count()
DEVICES = [
    "ledger",
    pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(GPUS == 0, reason="no NVIDIA GPU here")]),
]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """The device of the ranks, by its type."""
    return str(request.param)


@pytest.fixture(scope="module", params=[1, 2], ids=lambda n: f"W{n}")
def ranks(request: pytest.FixtureRequest, device: str) -> Iterator[Any]:
    """Launched ranks. Only they register the ledger device: this process stays as it is."""
    if device == "cuda" and request.param > GPUS:
        pytest.skip(f"{request.param} ranks need as many GPUs, here is {GPUS}")
    with recshard_lab.launch(request.param) as launched:
        yield launched


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Any]:
    """A process in which the ledger device may be registered."""
    with recshard_lab.launch(1) as launched:
        yield launched
