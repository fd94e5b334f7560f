"""The checkpoint from which a run resumes, and the run's state in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recshard_lab.comm import ShardingEnv, from_first_rank
from recshard_lab.distributed.state.checkpoint import read_extra
from recshard_lab.saved.files import CheckpointError
from recshard_lab.train.job.config import TrainConfig

FORMAT = "recshard_lab training run"


def saved_state(config: TrainConfig, env: ShardingEnv) -> dict[str, Any] | None:
    """The run's state in the checkpoint, read by rank 0; None without a checkpoint."""
    if config.checkpoint is None:
        return None
    return from_first_rank(env, lambda: _read_saved(config))


def _read_saved(config: TrainConfig) -> dict[str, Any] | None:
    assert config.checkpoint is not None
    folder, resume = Path(config.checkpoint.path), config.checkpoint.resume
    empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if empty and not (folder.parent / f".{folder.name}.previous").exists():
        if resume == "always":
            raise CheckpointError(f"checkpoint.resume is 'always', but {folder} has no checkpoint. Fix: resume: auto")
        return None
    if resume == "never":
        raise CheckpointError(f"checkpoint.resume is 'never', but {folder} has a checkpoint. Fix: choose another path")
    found = read_extra(folder)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(f"{folder} is a checkpoint, but not of a training run. Fix: choose another path")
    return found
