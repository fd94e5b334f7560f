"""The devices that these tests run on: the ledger, which every machine has, and NVIDIA GPUs where there are some."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import recshard_lab
from recshard_lab.embedding import kernels
from recshard_lab.embedding.kernels import fbgemm
from tests.launched import launched

GPUS = torch.cuda.device_count()
DEVICES = [
    "ledger",
    pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(GPUS == 0, reason="no NVIDIA GPU here")]),
]


def skip_without_fbgemm() -> None:
    """Skips a test of fbgemm's CUDA kernels where they are not installed."""
    reason = fbgemm.why_no_cuda() if "fbgemm" in kernels.available() else "fbgemm-gpu is not installed"
    if reason:
        pytest.skip(f"needs fbgemm's CUDA kernels: {reason}")


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """The device of the ranks, by its type."""
    return str(request.param)


@pytest.fixture(scope="module", params=[1, 2], ids=lambda n: f"W{n}")
def ranks(request: pytest.FixtureRequest, device: str) -> Iterator[Any]:
    """Launched ranks; more of them than GPUs share a GPU.

    Only they register the ledger device: this process stays as it is.
    """
    options: dict[str, Any] = {"share_gpu": request.param > GPUS} if device == "cuda" else {"devices": "cpu"}
    with recshard_lab.launch(request.param, **options) as launched:
        yield launched


# A process in which the ledger device may be registered.
one_rank = launched(1, devices="cpu")
