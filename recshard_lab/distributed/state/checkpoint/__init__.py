"""Checkpoints in torch's distributed format, written and read under any plan and any number of ranks.

In walking order: `saved.files` (when a checkpoint is complete), `state.model_state` (its content), `writer` (in blocks,
with little memory), `save`, `saved.reader` (never runs code of a file), `load`.
"""

from recshard_lab.distributed.state.checkpoint.load import Loaded as Loaded
from recshard_lab.distributed.state.checkpoint.load import load_checkpoint as load_checkpoint
from recshard_lab.distributed.state.checkpoint.load import read_extra as read_extra
from recshard_lab.distributed.state.checkpoint.save import PendingSave as PendingSave
from recshard_lab.distributed.state.checkpoint.save import async_save_checkpoint as async_save_checkpoint
from recshard_lab.distributed.state.checkpoint.save import save_checkpoint as save_checkpoint
from recshard_lab.saved.files import CheckpointError as CheckpointError
from recshard_lab.saved.files import CheckpointSaveError as CheckpointSaveError
