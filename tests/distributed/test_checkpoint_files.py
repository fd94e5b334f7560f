"""Every rank's file is read before a load trusts it, and a file holds no more than its rank's blocks."""

from pathlib import Path
from typing import Any

import pytest

from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.distributed.state.checkpoint import load_checkpoint, save_checkpoint
from tests.distributed import state_jobs
from tests.distributed.test_reshard import case_of


@pytest.mark.gate
def test_a_flipped_bit_in_the_file_of_any_rank_is_found_by_all(two: Any, tmp_path: Path) -> None:
    case, folder = case_of(2, "exact_sgd", steps=0), tmp_path / "run"
    two.run(state_jobs.train_and_save, case, str(folder))
    files = sorted(folder.glob("*.distcp"))
    assert len(files) == 2
    for file in [*files, folder / ".metadata"]:
        whole = file.read_bytes()
        damaged = bytearray(whole)
        damaged[len(whole) // 2] ^= 4
        file.write_bytes(damaged)
        for error, changed in two.run(state_jobs.refused_load, case, str(folder)):
            assert file.name in error
            assert not changed
        file.write_bytes(whole)
    for error, _ in two.run(state_jobs.refused_load, case, str(folder)):
        assert error == ""


def test_a_file_of_many_blocks_is_as_large_as_the_table(tmp_path: Path) -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=8192, embedding_dim=16, feature_names=["f"])
    module, size = EmbeddingBagCollection([table]), 8192 * 16 * 4
    with state_jobs.blocks_of(size // 16):
        save_checkpoint(tmp_path / "run", module)
    (file,) = (tmp_path / "run").glob("*.distcp")
    assert size < file.stat().st_size < 1.1 * size  # of each block a header of about 1 KB, and not the whole table
    again = EmbeddingBagCollection([table])
    load_checkpoint(tmp_path / "run", again)
    assert state_jobs.same(dict(module.state_dict()), dict(again.state_dict())) == []
