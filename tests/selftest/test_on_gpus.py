"""The checks of ``recshard selftest --gpu`` on GPUs, without those that run tests and notebooks."""

import pytest
import torch

from recshard_lab.selftest import checks, run_checks


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no NVIDIA GPU on this machine")
@pytest.mark.timeout(900)
def test_every_check_of_the_gpus_passes() -> None:
    launched = checks.Launched()
    try:
        own = [c for c in checks.all_checks(launched, gpu=True) if not c.name.startswith(("notebook", "tests "))]
        report = run_checks(checks=own)
    finally:
        launched.stop()
    assert report.ok, report.markdown()
