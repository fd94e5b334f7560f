"""A checkpoint as a folder that is either complete or absent, see `recshard_lab.complete_folders`."""

from recshard_lab.complete_folders import FolderFormat


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete, of another format version, or of another model."""


class CheckpointSaveError(CheckpointError, OSError):
    """A checkpoint that could not be written, for example to a full disk. The previous one is complete."""


CHECKPOINT = FolderFormat(
    noun="checkpoint",
    name="recshard_lab checkpoint",
    version=1,
    error=CheckpointError,
    fix="pass a folder that save_checkpoint wrote",
    index=".metadata",
)
