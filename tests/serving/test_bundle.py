"""A bundle answers what the model answered, bit for bit."""

from pathlib import Path

import pytest
import torch

from recshard_lab.serving import Inputs, load_bundle, save_bundle
from tests.serving.bundles import COLUMNS, batch_of, dlrm, eager


@pytest.mark.parametrize("weighted", [False, True])
def test_a_bundle_answers_bit_for_bit_at_every_size(tmp_path: Path, weighted: bool) -> None:
    model = dlrm(weighted)
    inputs = Inputs.of(model, COLUMNS)
    save_bundle(model, tmp_path / "1", inputs=inputs, outputs={"probability": torch.sigmoid})
    loaded = load_bundle(tmp_path / "1", check_hashes=True)
    assert (loaded.inputs, loaded.outputs) == (inputs, ("probability",))
    for size, most in [(0, 3), (1, 0), (1, 3), (2, 0), (2, 1), (64, 5)]:
        batch = batch_of(inputs, size, most)
        answer = loaded.predict(batch)["probability"]
        assert answer.shape == (size,)
        assert torch.equal(answer, torch.sigmoid(eager(model, inputs, batch)))
