"""Checkpoints in torch's own distributed format, written and read under any plan and any number of ranks.

Read first: `checkpoint_files` (when is a checkpoint whole), `model_state` (what is in it), `checkpoint_reader` (why
nothing in a file is ever run), `checkpoint_writer` (why neither way needs much memory).
"""

import errno
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm import ShardingEnv, all_gather_object, barrier, broadcast_object
from recshard_lab.distributed import checkpoint_files as files
from recshard_lab.distributed.checkpoint_files import CheckpointError
from recshard_lab.distributed.checkpoint_reader import (
    SafePlanner,
    SafeReader,
    packed,
    read_metadata,
    tensors_in,
    unpacked,
)
from recshard_lab.distributed.checkpoint_writer import BlockPlanner, BlockWriter
from recshard_lab.distributed.model_state import ModelState

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@names_wrong_arguments
def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
) -> None:
    """Writes a model's weights and optimizer states; a process killed meanwhile leaves the one before whole.

    All ranks of a sharded model must call it, with a path that all of them reach. An unsharded module is written by
    the process that calls it.

    Args:
        path: the checkpoint's folder; a checkpoint that is there is replaced once the new one is whole.
        model: a `DistributedModelParallel` or any module; states of fused optimizers are saved with it.
        optimizer: the torch optimizer over ``dense_parameters()``.
        extra: numbers, strings, lists, dictionaries and tensors, of rank 0: epoch, schedule, ...

    Raises:
        CheckpointError: ``path`` is there and is no checkpoint.
        ValueError: ``extra`` or a state that could not be read back as plain data; replicas (`DMPCollection`) that
            differ.
        OSError: the disk is full, or cannot be written; what was there before is there still.

    >>> from tempfile import TemporaryDirectory
    >>> model = nn.Linear(2, 1)
    >>> with TemporaryDirectory() as folder:
    ...     save_checkpoint(f"{folder}/run", model, extra={"epoch": 3})
    ...     load_checkpoint(f"{folder}/run", nn.Linear(2, 1))
    Loaded(2 tensors, extra={'epoch': 3})
    """
    folder = Path(path)
    state = ModelState(model, optimizer)
    env = state.env
    agreed(env, state.refuse_replicas_apart)
    data = [packed(state.settings(), "the optimizers' settings"), packed(extra, "extra")]
    data = broadcast_object(data, env)
    content = {
        "model": state.weights,
        "fused": state.fused,
        "optimizer": state.dense,
        "settings": data[0],
        "extra": data[1],
    }
    total = sum(all_gather_object(_bytes_of(content), env))  # replicas are counted on every rank: an upper bound
    staging = _on_rank_0(env, lambda: _started(folder, total))
    trouble: str | None = None
    try:
        with _quiet():
            writer = BlockWriter(staging)
            save(
                content,
                storage_writer=writer,
                planner=BlockPlanner(),
                process_group=env.pg,
                no_dist=env.pg is None,
            )
        mine = writer.written
    except (CheckpointException, OSError) as error:
        trouble, mine = _trouble(error), {}
    told = all_gather_object((trouble, mine), env)
    troubles = [each for each, _ in told if each]
    if troubles:
        barrier(env)
        if env.rank == 0:
            files.discard(staging)
        raise OSError(
            f"{folder} could not be saved: {troubles[0]}. What was saved there before is whole and in its place"
        )
    every = {name: entry for _, each in told for name, entry in each.items()}

    def finish() -> None:
        files.commit(staging, folder, every | files.described([staging / ".metadata"]))

    _on_rank_0(env, finish)


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint gave.

    Attributes:
        extra: what the caller had added.
        tensors: how many tensors were filled.
        left: names of saved tensors that the model has no place for (optimizer states of a model without optimizer).
    """

    extra: Any
    tensors: int
    left: tuple[str, ...]

    def __repr__(self) -> str:
        rest = f", {len(self.left)} optimizer states left in the file" if self.left else ""
        return f"Loaded({self.tensors} tensors{rest}, extra={self.extra!r:.60})"


@names_wrong_arguments
def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    optimizer_state: bool = True,
) -> Loaded:
    """Fills a model, and its optimizers, from a checkpoint that was saved under any plan by any number of ranks.

    All ranks of a sharded model must call it; each reads only what its rectangles need. Everything is checked before
    anything in the model is changed: files against their checksums, names, shapes and number formats against the
    model. Nothing in the files is run.

    Args:
        path: what `save_checkpoint` wrote.
        model: a `DistributedModelParallel` or any module with the same names.
        optimizer: the torch optimizer over the dense part, to be filled too.
        optimizer_state: False leaves all optimizers as they are.

    Raises:
        CheckpointError: no checkpoint, a file that is truncated or damaged, or tensors that are not this model's: by
            name; nothing has changed.

    >>> load_checkpoint("nowhere", nn.Linear(2, 1))
    Traceback (most recent call last):
    ...
    recshard_lab.distributed.checkpoint_files.CheckpointError: there is no checkpoint at nowhere
    """
    state = ModelState(model, optimizer if optimizer_state else None)
    env = state.env
    folder, found = agreed(env, lambda: _checked(Path(path), env))
    saved = tensors_in(found)
    own: dict[tuple[str, ...], Any] = {("model", name): value for name, value in state.weights.items()}
    fused = optimizer_state and bool(state.fused)
    if fused:
        own |= {("fused", key, name): value for key, entry in state.fused.items() for name, value in entry.items()}
    told = {
        name: torch.empty(tuple(saved[name,].size), dtype=torch.uint8)
        for name in ("settings", "extra")
        if (name,) in saved
    }
    agreed(env, lambda: _compare(folder, own, saved, state))
    read: dict[str, Any] = dict(told)
    read_into(read, folder, found, env)
    settings = unpacked(read["settings"])
    if state.optimizer is not None:
        entries = {key[1:]: entry for key, entry in saved.items() if key[0] == "optimizer"}
        agreed(env, lambda: _compare_groups(folder, state, settings, entries))
        state.make_dense(entries)
    content: dict[str, Any] = {"model": state.weights}
    if fused:
        content["fused"] = state.fused
    if state.dense:
        content["optimizer"] = state.dense
    read_into(content, folder, found, env)
    state.adopt(settings if optimizer_state else None, fused)
    filled = set(own) | {("optimizer", name, key) for name, entry in state.dense.items() for key in entry}
    left = [".".join(key) for key in saved if key not in filled and key[0] in ("fused", "optimizer")]
    return Loaded(unpacked(read["extra"]), len(filled), tuple(sorted(left)))


@names_wrong_arguments
def read_extra(path: str | Path) -> Any:
    """What the caller of `save_checkpoint` had added, read by this process alone, without a model.

    Nothing else is read, nor compared with its checksum: `load_checkpoint` does that.

    Raises:
        CheckpointError: no checkpoint, or one without its manifest.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save_checkpoint(f"{folder}/run", nn.Linear(2, 1), extra={"epoch": 3})
    ...     read_extra(f"{folder}/run")
    {'epoch': 3}
    """
    folder = files.readable(path)
    found = read_metadata(folder, [name for name in files.manifest_of(folder) if name.endswith(".distcp")])
    size = tuple(tensors_in(found)["extra",].size)
    read: dict[str, Any] = {"extra": torch.empty(size, dtype=torch.uint8)}
    read_into(read, folder, found, ShardingEnv.from_local(1, 0))
    return unpacked(read["extra"])


# ---- steps of saving ----


def _started(folder: Path, needed: int) -> Path:
    staging = files.staging_of(folder)
    free = shutil.disk_usage(staging).free
    if needed > free:
        files.discard(staging)
        raise OSError(
            errno.ENOSPC,
            f"the disk of {folder} is full: the checkpoint needs {needed:,} bytes, {free:,} are free. Nothing was "
            f"changed there",
        )
    return staging


def _bytes_of(content: Mapping[str, Any]) -> int:
    total = 0
    for value in content.values():
        if isinstance(value, Mapping):
            total += _bytes_of(value)
        elif hasattr(value, "local_shards"):
            total += sum(shard.tensor.nbytes for shard in value.local_shards())
        elif isinstance(value, Tensor):
            total += value.nbytes
    return total


def _trouble(error: BaseException) -> str:
    """The first cause, in words; a full disk is called one."""
    causes = [pair[0] for pair in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    first = next((cause for cause in causes if isinstance(cause, OSError)), causes[0])
    number = getattr(first, "errno", None)
    full = number in _NO_SPACE or "No space left" in str(first) or "unexpected pos" in str(first)
    return f"the disk is full ({first})" if full else f"{type(first).__name__}: {first}"


def _on_rank_0(env: ShardingEnv, action: Any) -> Any:
    """Rank 0 does it; everybody gets the result, or the error."""
    result, error = None, None
    if env.rank == 0:
        try:
            result = action()
        except (OSError, ValueError) as caught:
            error = caught
    result, told = broadcast_object((result, error), env)
    if told is not None:
        raise told
    return result


# ---- steps of loading ----


def agreed(env: ShardingEnv, action: Any) -> Any:
    """Every rank does it; if one cannot, all leave with an error."""
    result, error = None, None
    try:
        result = action()
    except (OSError, ValueError) as caught:
        error = caught
    told = all_gather_object(None if error is None else str(error), env)
    if error is not None:
        raise error
    for text in told:
        if text is not None:
            raise CheckpointError(text)
    return result


def _checked(path: Path, env: ShardingEnv) -> tuple[Path, Any]:
    folder = files.readable(path)
    listed = files.manifest_of(folder)
    files.check_files(folder, listed, env.rank, env.world_size)
    return folder, read_metadata(folder, [name for name in listed if name.endswith(".distcp")])


def _compare(
    folder: Path, own: Mapping[tuple[str, ...], Any], saved: Mapping[tuple[str, ...], Any], state: Any
) -> None:
    wrong = []
    for key, value in own.items():
        name = ".".join(key[1:])
        if key not in saved:
            wrong.append(f"{name} is not in it")
            continue
        sharded = hasattr(value, "local_shards")
        size = tuple(value.metadata().size if sharded else value.shape)
        dtype = value.metadata().tensor_properties.dtype if sharded else value.dtype
        entry = saved[key]
        if tuple(entry.size) != size or entry.properties.dtype != dtype:
            wrong.append(
                f"{name} is {_text(size, dtype)} in the model and {_text(entry.size, entry.properties.dtype)} in it"
            )
    known = set(state.weights)
    wrong += [f"{key[1]} is in it and not in the model" for key in saved if key[0] == "model" and key[1] not in known]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"{folder} is not of this model: {'; '.join(wrong[:5])}{more}. Nothing was changed"
            + ("" if all(key[0] == "model" for key in own) else " (optimizer_state=False loads weights alone)")
        )


def _compare_groups(folder: Path, state: ModelState, settings: Any, entries: Mapping[tuple[str, ...], Any]) -> None:
    try:
        state.paired_groups(settings)
    except ValueError as error:
        raise CheckpointError(f"{folder} does not fit the optimizer given: {error}. Nothing was changed") from None
    known = {*state.names.values(), *state.tables}
    for name, *_ in entries:
        if name not in known:
            raise CheckpointError(f"{folder} has optimizer states of {name}, which the model has not")


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns that there is one process only, and that sharded tensors will be replaced some day."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _text(size: Any, dtype: torch.dtype) -> str:
    return f"{' x '.join(f'{n:,}' for n in size) or 'a number'} {str(dtype).removeprefix('torch.')}"


def read_into(content: dict[str, Any], folder: Path, metadata: Any, env: ShardingEnv) -> None:
    with _quiet(), torch.no_grad():
        try:
            load(
                content,
                storage_reader=SafeReader(folder, metadata),
                planner=SafePlanner(),
                process_group=env.pg,
                no_dist=env.pg is None,
            )
        except CheckpointException as error:
            raise CheckpointError(f"{folder} could not be read: {_trouble(error)}") from error
