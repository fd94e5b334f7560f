"""Checkpoints in torch's distributed format, written and read under any plan and any number of ranks.

In walking order: `saved.files` (when a checkpoint is complete), `state.model_state` (its content), `writer` (in blocks,
with little memory), `save`, `saved.reader` (never runs code of a file), `load`.
"""

import errno
import hashlib
import logging
import os
import shutil
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult

from recshard_lab import complete_folders
from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm import ShardingEnv, agreed, from_first_rank, gathered
from recshard_lab.comm.env import host_env, subgroups
from recshard_lab.distributed.state.dumps import TierRows
from recshard_lab.distributed.state.forms import shape_of
from recshard_lab.distributed.state.model_state import ModelState
from recshard_lab.optim.keyed import local_shards
from recshard_lab.saved.files import CHECKPOINT
from recshard_lab.saved.files import CheckpointError as CheckpointError
from recshard_lab.saved.files import CheckpointSaveError as CheckpointSaveError
from recshard_lab.saved.reader import (
    SafePlanner,
    SafeReader,
    check_tensors,
    packed,
    read_metadata,
    tensors_in,
    unpacked,
)

# Writes torch's distributed checkpoints in blocks of rows, so that saving and loading need little memory.
#
# torch's writer keeps a copy of every tensor that is a view or on a GPU until its file is complete, which would be all
# tables. Each block is saved as one chunk, which torch's readers support.


BLOCK_BYTES = 16 * 2**20


class BlockPlanner(DefaultSavePlanner):
    """torch's planner, with large tensors split into blocks of rows."""

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self._blocks: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[block for item in plan.items for block in self._split(item)])
        return self.plan

    def _split(self, item: WriteItem) -> list[WriteItem]:
        written = item.tensor_data
        assert written is not None, f"{item.index.fqn} is not a tensor"
        tensor = self.lookup_object(item.index).detach()
        count = max(1, BLOCK_BYTES * tensor.shape[0] // tensor.nbytes) if tensor.dim() and tensor.nbytes else 1
        if tensor.nbytes <= BLOCK_BYTES or count >= tensor.shape[0]:
            self._blocks[item.index] = tensor
            return [item]
        blocks = []
        for start, rows in zip(range(0, tensor.shape[0], count), tensor.split(count), strict=True):
            offsets = torch.Size([written.chunk.offsets[0] + start, *written.chunk.offsets[1:]])
            chunk = ChunkStorageMetadata(offsets, rows.shape)
            index = MetadataIndex(item.index.fqn, offsets)
            self._blocks[index] = rows
            data = TensorWriteData(chunk, written.properties, written.size)
            blocks.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return blocks

    def stage(self, plan: SavePlan) -> None:
        """Copies the blocks of a plan to the CPU and drops all references to the model."""
        self._blocks = {item.index: self._blocks[item.index].to("cpu", copy=True) for item in plan.items}
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """A block, once: a staged copy is freed after it is written."""
        return self._blocks.pop(write_item.index)


class BlockWriter(FileSystemWriter):
    """torch's writer, which keeps one block in memory and computes checksums while it writes."""

    def write(self, plan: SavePlan, planner: BlockPlanner) -> tuple[list[WriteResult], dict[str, dict[str, Any]]]:
        """Writes this rank's file. Returns the place of each block, and name -> size and SHA-256 of the file."""
        if not plan.items:
            return [], {}
        name = f"{plan.storage_data.prefix}0.distcp"
        with (Path(self.path) / name).open("wb") as file:
            stream = _Hashed(file)
            results = [_written(item, planner, stream, name) for item in plan.items]
            file.flush()
            os.fsync(file.fileno())
        return results, {name: {"bytes": stream.size, "sha256": stream.digest.hexdigest()}}


def _written(item: WriteItem, planner: BlockPlanner, stream: "_Hashed", name: str) -> WriteResult:
    copy = planner.resolve_data(item).cpu()
    if copy.untyped_storage().nbytes() != copy.nbytes:  # torch.save writes whole storages
        copy = copy.clone()
    start = stream.size
    torch.save(copy, stream)  # type: ignore[arg-type]  # it uses only write and flush
    length = stream.size - start
    return WriteResult(item.index, length, _StorageInfo(name, start, length))


class _Hashed:
    """A file that is written sequentially, with its SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        count = self.file.write(data)
        self.size += count
        return count

    def flush(self) -> None:
        self.file.flush()


# Saves checkpoints: in the caller's thread, or in a background thread while the training continues.
#
# ::
#
#     caller's thread       plan        which rank writes which block, agreed by all ranks
#                           stage       asynchronous saves only: copies this rank's blocks to the CPU
#     either thread         write       each rank's file, then rank 0's metadata and manifest, then the rename
#
# A background thread communicates over a separate process group, so that training collectives keep their order.


_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@names_wrong_arguments
def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
) -> None:
    """Writes a model's weights and optimizer states. If the process is killed, the previous checkpoint stays complete.

    Collective over a sharded model's ranks, with a path that all of them can reach. An unsharded module is written by
    the calling process. Waits for an asynchronous save of the same ranks.

    Args:
        path: the checkpoint's folder. An existing checkpoint is replaced once the new one is complete.
        model: a `DistributedModelParallel` or any module; states of fused optimizers are saved with it.
        optimizer: the torch optimizer over ``dense_parameters()``.
        extra: numbers, strings, lists, dictionaries and tensors of rank 0: epoch, schedule, ...

    Several processes may save to one path at the same time. Each save is complete, and the last one to finish stays.

    Raises:
        CheckpointError: ``path`` exists and is not a checkpoint.
        CheckpointSaveError: an error on any rank while writing, such as a full disk (a `CheckpointError` and an
            ``OSError``). It is raised on all ranks. The previous checkpoint is complete, and no other files are left.
            Also the error of the asynchronous save before, unless all ranks have raised it. Nothing is written then.
        ValueError: ``extra`` or a state that is not plain data; replicas (`DMPCollection`) that may differ.

    >>> from tempfile import TemporaryDirectory
    >>> from recshard_lab import load_checkpoint
    >>> model = nn.Linear(2, 1)
    >>> with TemporaryDirectory() as folder:
    ...     save_checkpoint(f"{folder}/run", model, extra={"epoch": 3})
    ...     load_checkpoint(f"{folder}/run", nn.Linear(2, 1))
    Loaded(2 tensors, extra={'epoch': 3})
    """
    save = _Save(Path(path), ModelState(model, optimizer), extra)
    save.write(save.env)


@names_wrong_arguments
def async_save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
) -> "PendingSave":
    """Copies a model's weights and optimizer states to host memory, and writes them while the training continues.

    Later steps do not change what is saved. The copies need host memory of the size of this rank's file, which shrinks
    while the file is written. Collective like `save_checkpoint`, with the same arguments, format and guarantees.

    The ranks have one asynchronous save at a time: the next save or load waits for it, and so does the end of the
    process. Call ``result()`` before you destroy the process group.

    Returns:
        A future of the checkpoint's path. Its ``result()`` waits and raises errors of the background thread. If it is
        not called, the next save raises the error. Each error is also logged.

    Raises:
        CheckpointError, ValueError: as `save_checkpoint`, for errors before the background thread starts, such as too
            little memory for the copies.

    >>> from tempfile import TemporaryDirectory
    >>> from recshard_lab import load_checkpoint
    >>> model = nn.Linear(2, 1)
    >>> with TemporaryDirectory() as folder:
    ...     saving = async_save_checkpoint(f"{folder}/run", model)
    ...     nn.init.zeros_(model.weight)  # does not change what is saved
    ...     load_checkpoint(saving.result(), nn.Linear(2, 1))
    Parameter containing:
    tensor([[0., 0.]], requires_grad=True)
    Loaded(2 tensors, extra=None)
    """
    state = ModelState(model, optimizer)
    background = _background_env(state.env)
    save = _Save(Path(path), state, extra)
    save.stage()
    _running[_group(state.env)] = pending = PendingSave(save, background)
    return pending


class PendingSave(Future[Path]):
    """An asynchronous save. ``result()`` waits for it and returns the checkpoint's path, or raises its error.

    Attributes:
        seen: whether the caller has received the result or the error.
    """

    def __init__(self, save: "_Save", env: ShardingEnv) -> None:
        super().__init__()
        self.seen = False
        self.set_running_or_notify_cancel()
        threading.Thread(target=self._run, args=(save, env), name=f"saving {save.folder}").start()

    def _run(self, save: "_Save", env: ShardingEnv) -> None:
        try:
            save.write(env)
        except BaseException as error:
            logging.getLogger("recshard_lab").error(str(error))
            self.set_exception(error)
        else:
            self.set_result(save.folder)

    def result(self, timeout: float | None = None) -> Path:
        """The checkpoint's path, once it is complete on all ranks.

        Args:
            timeout: seconds to wait. Default: no limit.

        Raises:
            TimeoutError: the save is still running.
            CheckpointSaveError: as `save_checkpoint`.
        """
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of the save, or None. Waits like `result`."""
        error = super().exception(timeout)
        self.seen = True
        return error


_ALONE = ShardingEnv.from_local(1, 0)  # stands for the process group of a single process
_running: "WeakKeyDictionary[Any, PendingSave]" = WeakKeyDictionary()


def _group(env: ShardingEnv) -> Any:
    return _ALONE if env.pg is None else env.pg


def wait_for_save(env: ShardingEnv) -> PendingSave | None:
    """Waits for the asynchronous save of these ranks, if one is running. Raises none of its errors."""
    pending = _running.get(_group(env))
    if pending is not None:
        wait([pending])
    return pending


def _finish_previous(env: ShardingEnv) -> None:
    """Waits for an asynchronous save of these ranks, and raises its error unless every rank has seen it. Collective."""
    pending = wait_for_save(env)
    if pending is not None:
        del _running[_group(env)]
        if any(gathered(env, lambda: not pending.seen)):
            pending.result()


def _background_env(env: ShardingEnv) -> ShardingEnv:
    """The same ranks over CPU connections that only background saves use. The first call is collective."""
    if env.pg is None:
        return env
    (group,) = subgroups(env.pg, "checkpoint", lambda: (host_env(env).duplicate().pg,))
    return replace(env, pg=group)


class _Save:
    """One save. The constructor reads the model and plans the files. Collective."""

    def __init__(self, folder: Path, state: ModelState, extra: Any) -> None:
        self.folder, self.env = folder, state.env
        env = self.env
        _finish_previous(env)
        agreed(env, state.refuse_replicas_apart)
        settings, added = from_first_rank(
            env, lambda: (packed(state.settings(), "the optimizers' settings"), packed(extra, "extra"))
        )
        tiers = agreed(env, lambda: TierRows(state.collections))
        tiers.exchange(env)
        content = {
            "model": state.weights,
            "fused": state.fused,
            "optimizer": state.dense,
            "tiers": tiers.entries(env),
            "settings": settings,
            "extra": added,
        }
        self.staging: complete_folders.Staging | None = None
        with self._reported():
            total = sum(gathered(env, lambda: _bytes_of(content)))  # counts replicas on every rank: an upper bound
            self.writer = BlockWriter(from_first_rank(env, lambda: self._start(total)))
            self.planner = BlockPlanner()
            plans = gathered(env, lambda: self._local_plan(content))
            every, self.metadata = from_first_rank(env, lambda: self._global_plan(plans))
            self.plan: SavePlan = self.planner.finish_plan(every[env.rank])

    def _start(self, needed: int) -> Path:
        """Creates the private folder, on rank 0."""
        self.staging = complete_folders.Staging(CHECKPOINT, self.folder)
        free = shutil.disk_usage(self.staging.path).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"the checkpoint needs {needed:,} bytes, {free:,} are free")
        return self.staging.path

    def _local_plan(self, content: dict[str, Any]) -> SavePlan:
        is_coordinator = self.env.rank == 0
        with quiet():
            self.planner.set_up_planner(content, self.writer.storage_meta(), is_coordinator)
            self.writer.set_up_storage_writer(is_coordinator)
            return self.writer.prepare_local_plan(self.planner.create_local_plan())

    def _global_plan(self, plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        every, metadata = self.planner.create_global_plan(plans)
        return self.writer.prepare_global_plan(every), metadata

    def stage(self) -> None:
        """Copies the blocks that this rank writes. Later changes of the model do not reach them. Collective."""
        with self._reported():
            agreed(self.env, lambda: self.planner.stage(self.plan))

    def write(self, env: ShardingEnv) -> None:
        """Writes all files and replaces the previous checkpoint. Collective over ``env``."""
        with self._reported():
            written = gathered(env, lambda: self.writer.write(self.plan, self.planner))

            def finish() -> None:
                assert self.staging is not None
                self.writer.finish(self.metadata, [results for results, _ in written])
                every = {name: entry for _, rank_files in written for name, entry in rank_files.items()}
                self.staging.commit(every | complete_folders.described([self.staging.path / ".metadata"]))

            from_first_rank(env, finish)
            self.staging = None

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Removes the unfinished files after an error, which becomes a `CheckpointSaveError`."""
        try:
            yield
        except BaseException as error:
            if self.staging is not None:
                self.staging.discard()
            if isinstance(error, CheckpointError) or not isinstance(error, Exception):
                raise
            raise CheckpointSaveError(
                f"{self.folder} could not be saved: {trouble(error)}. A previous checkpoint there is complete"
            ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses torch's warnings about a single process and about deprecated sharded tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _bytes_of(content: Mapping[str, Any]) -> int:
    total = 0
    for value in content.values():
        if isinstance(value, Mapping):
            total += _bytes_of(value)
        elif (shards := local_shards(value)) is not None:
            total += sum(tensor.nbytes for _, tensor in shards)
        elif isinstance(value, Tensor):
            total += value.nbytes
    return total


def trouble(error: BaseException) -> str:
    """An error as text, with a clear text for a full disk."""
    full = getattr(error, "errno", None) in _NO_SPACE or "No space left" in str(error) or "unexpected pos" in str(error)
    return f"the disk is full ({error})" if full else f"{type(error).__name__}: {error}"


# Loads checkpoints that were saved under any plan by any number of ranks. Compares everything before it changes it.


#: name -> length of its key paths
_SECTIONS = {"model": 2, "fused": 3, "optimizer": 3, "tiers": 3, "settings": 1, "extra": 1}
_PLAIN = ("settings", "extra")  # sections that are bytes


@dataclass(frozen=True)
class Loaded:
    """Result of a load.

    Attributes:
        extra: the value that the caller saved.
        tensors: number of filled tensors.
        left: names of saved optimizer states that were not loaded, such as those of a model without optimizer.
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
    """Fills a model and its optimizers from a checkpoint that was saved under any plan by any number of ranks.

    Collective over a sharded model's ranks; each reads only its shards. Before the model is changed, files are compared
    with their checksums, and names, shapes and dtypes with the model. Loading never runs code of a file. Waits for an
    asynchronous save of the same ranks. A dynamic table that grows gets the size that it has in the checkpoint.

    Args:
        path: the folder that `save_checkpoint` wrote.
        model: a `DistributedModelParallel` or any module with the same names.
        optimizer: the torch optimizer over the dense part, which is filled too.
        optimizer_state: whether to load optimizer states; False leaves all optimizers unchanged.

    Raises:
        CheckpointError: no checkpoint, another format version, a truncated or damaged file, or tensors that do not
            match the model, by name. Nothing was changed.

    >>> load_checkpoint("nowhere", nn.Linear(2, 1))
    Traceback (most recent call last):
    ...
    recshard_lab.saved.files.CheckpointError: no checkpoint at nowhere. Fix: ...
    """
    state = ModelState(model, optimizer if optimizer_state else None)
    env = state.env
    wait_for_save(env)
    folder, metadata = agreed(env, lambda: _checked(Path(path), env))
    saved = tensors_in(metadata)
    expected: dict[tuple[str, ...], Any] = {("model", name): value for name, value in state.weights.items()}
    fused = optimizer_state and bool(state.fused)
    if fused:
        expected |= {("fused", key, name): value for key, entry in state.fused.items() for name, value in entry.items()}
    rows_saved = {key[1]: entry.size[0] for key, entry in saved.items() if _is_weight(key, entry)}
    sizes = agreed(env, lambda: state.other_sizes(rows_saved))
    agreed(env, lambda: _compare(folder, expected, saved, state.weights, state.rows_at(sizes)))
    read: dict[str, Any] = {name: torch.empty(tuple(saved[name,].size), dtype=torch.uint8) for name in _PLAIN}
    tiers = agreed(env, lambda: TierRows(state.collections, reads=False))
    counts = agreed(env, lambda: _tier_counts(folder, saved, tiers))
    counted = {name: {"partitions": own} for name, own in counts.items() if ("tiers", name, "partitions") in saved}
    read |= {"tiers": counted} if counted else {}
    read_into(read, folder, metadata, env)
    settings, added = agreed(env, lambda: (_settings(read["settings"]), unpacked(read["extra"], "extra")))
    if state.optimizer is not None:
        entries = {key[1:]: entry for key, entry in saved.items() if key[0] == "optimizer"}
        agreed(env, lambda: _compare_groups(folder, state, settings, entries))
        agreed(env, lambda: state.make_dense(entries))
        state.read_dense()
    rows = agreed(env, lambda: _tier_rows(folder, saved, tiers, counts, env, optimizer_state))
    agreed(env, lambda: state.set_sizes(sizes))
    content: dict[str, Any] = {"model": state.weights}
    if rows:
        content["tiers"] = rows
    if fused:
        content["fused"] = state.fused
    if state.dense:
        content["optimizer"] = state.dense
    read_into(content, folder, metadata, env)
    state.adopt(settings if optimizer_state else None, fused)
    state.adopt_tiers(tiers)
    filled = set(expected) | {("optimizer", name, key) for name, entry in state.dense.items() for key in entry}
    left = [".".join(key) for key in saved if key not in filled and key[0] in ("fused", "optimizer")]
    return Loaded(added, len(filled), tuple(sorted(left)))


@names_wrong_arguments
def read_extra(path: str | Path) -> Any:
    """The ``extra`` of `save_checkpoint`, read by this process without a model. Not collective.

    Reads nothing else and compares no checksums; `load_checkpoint` does.

    Raises:
        CheckpointError: no checkpoint, or no manifest in it.

    >>> from tempfile import TemporaryDirectory
    >>> from recshard_lab import save_checkpoint
    >>> with TemporaryDirectory() as folder:
    ...     save_checkpoint(f"{folder}/run", nn.Linear(2, 1), extra={"epoch": 3})
    ...     read_extra(f"{folder}/run")
    {'epoch': 3}
    """
    folder = CHECKPOINT.readable(path)
    metadata = _metadata(folder, CHECKPOINT.manifest_of(folder)["files"])
    data = torch.empty(tuple(tensors_in(metadata)["extra",].size), dtype=torch.uint8)
    read_into({"extra": data}, folder, metadata, ShardingEnv.from_local(1, 0))
    return unpacked(data, "extra")


def _checked(path: Path, env: ShardingEnv) -> tuple[Path, Any]:
    folder = CHECKPOINT.readable(path)
    listed = CHECKPOINT.manifest_of(folder)["files"]
    CHECKPOINT.check_files(folder, listed, env.rank, env.world_size)
    return folder, _metadata(folder, listed)


def _metadata(folder: Path, listed: Mapping[str, Any]) -> Any:
    """The metadata, checked against the files and the sections that `save_checkpoint` writes."""
    metadata = read_metadata(folder, [name for name in listed if name.endswith(".distcp")])
    check_tensors(metadata, folder)
    saved = tensors_in(metadata)
    for key in saved:
        if len(key) != _SECTIONS.get(next(iter(key), "")):
            raise CheckpointError(
                f"{folder} contains {'.'.join(key)!r}, which does not belong to a section of a checkpoint"
            )
    for name in _PLAIN:
        entry = saved.get((name,))
        if entry is None or len(entry.size) != 1 or entry.properties.dtype != torch.uint8:
            raise CheckpointError(f"{folder} is incomplete: {name!r} is missing or not stored as bytes")
    return metadata


def _settings(data: Tensor) -> dict[str, Any]:
    """The optimizers' settings, as `ModelState.settings` returns them."""
    settings = unpacked(data, "settings")
    try:
        rates = all(isinstance(name, str) and isinstance(rate, float | int) for name, rate in settings["fused"].items())
        groups = all(isinstance(name, str) for group in settings["optimizer"] for name in dict(group)["params"])
    except (LookupError, TypeError, ValueError, AttributeError):
        rates = groups = False
    if not (rates and groups):
        raise CheckpointError("settings in the checkpoint are damaged: expected learning rates and param groups")
    return dict(settings)


def _is_weight(key: tuple[str, ...], entry: Any) -> bool:
    return key[0] == "model" and key[1].endswith(".weight") and len(entry.size) == 2


def _compare(
    folder: Path,
    expected: Mapping[tuple[str, ...], Any],
    saved: Mapping[tuple[str, ...], Any],
    weights: Collection[str] | None,
    rows: Mapping[tuple[str, ...], int] = MappingProxyType({}),
) -> None:
    """Compares tensors of the model with those of a checkpoint.

    Args:
        folder: of the checkpoint.
        expected: key -> tensor of the model.
        saved: key -> metadata.
        weights: names of all weights of the model, if the checkpoint may have no others.
        rows: of tensors that will have other rows.
    """
    wrong = []
    for key, value in expected.items():
        name = ".".join(key[1:])
        if key not in saved:
            wrong.append(f"{name} is not in the checkpoint")
            continue
        size, dtype = shape_of(value)
        here = (rows[key], *size[1:]) if key in rows else size, dtype
        there = tuple(saved[key].size), saved[key].properties.dtype
        if here != there:
            wrong.append(f"{name} is {_text(*here)} in the model and {_text(*there)} in the checkpoint")
    if weights is not None:
        left = (key[1] for key in saved if key[0] == "model" and key[1] not in weights)
        wrong += [f"{name} is in the checkpoint and not in the model" for name in left]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        only_weights = all(key[0] == "model" for key in expected)
        fix = "" if only_weights else ". Fix: optimizer_state=False loads only the weights"
        raise CheckpointError(
            f"{folder} does not match the model: {'; '.join(wrong[:5])}{more}. Nothing was changed{fix}"
        )


def _tier_counts(folder: Path, saved: Mapping[tuple[str, ...], Any], tiers: TierRows) -> dict[str, Tensor]:
    """Table with tiers -> memory for the number of rows in each partition."""
    own = {name: len(counts) for name, counts in tiers.counts.items()}
    for _, name, _ in (key for key in saved if key[0] == "tiers"):
        if name not in own:
            raise CheckpointError(
                f"{folder} has rows of tiers of {name}, and the model's table has no tiers. Nothing was changed. Fix: "
                f"build it with tiers, or use dmp.dump and dmp.load"
            )
    for name, partitions in own.items():
        entry = saved.get(("tiers", name, "partitions"))
        if entry is not None and (tuple(entry.size) != (partitions,) or entry.properties.dtype != torch.int64):
            raise CheckpointError(f"{folder} has {tuple(entry.size)} partitions of {name}, and the model {partitions}")
    return {name: torch.zeros(partitions, dtype=torch.int64) for name, partitions in own.items()}


def _tier_rows(
    folder: Path,
    saved: Mapping[tuple[str, ...], Any],
    tiers: TierRows,
    counts: Mapping[str, Tensor],
    env: ShardingEnv,
    optimizer_state: bool,
) -> dict[str, dict[str, Any]]:
    """What is read of the rows of tiers, in memory that is allocated here."""
    if any(bool((own < 0).any()) for own in counts.values()):
        raise CheckpointError(f"{folder} is damaged: it has a negative number of rows in a partition")
    tiers.expect({name: own.tolist() for name, own in counts.items()})
    content: dict[str, dict[str, Any]] = {}
    for name, entry in tiers.entries(env).items():
        read = set(entry) - {"partitions"} if optimizer_state else {"index", "weight"}
        matrices = {key: value for key, value in entry.items() if key in read}
        _compare(folder, {("tiers", name, key): value for key, value in matrices.items()}, saved, None)
        if matrices:
            content[name] = matrices
    return content


def _compare_groups(folder: Path, state: ModelState, settings: Any, entries: Mapping[tuple[str, ...], Any]) -> None:
    try:
        state.paired_groups(settings)
    except ValueError as error:
        raise CheckpointError(f"{folder} does not match the optimizer: {error}. Nothing was changed") from None
    known = {*state.names.values(), *state.tables}
    for name, *_ in entries:
        if name not in known:
            raise CheckpointError(f"{folder} has optimizer states of {name}, which the model lacks")


def _text(size: Any, dtype: torch.dtype) -> str:
    return f"{' x '.join(f'{n:,}' for n in size) or 'a number'} {str(dtype).removeprefix('torch.')}"


def read_into(content: dict[str, Any], folder: Path, metadata: Any, env: ShardingEnv) -> None:
    with quiet(), torch.no_grad():
        try:
            load(
                content,
                storage_reader=SafeReader(folder, metadata),
                planner=SafePlanner(),
                process_group=env.pg,
                no_dist=env.pg is None,
            )
        except (Exception, CheckpointException) as error:  # crafted files can raise anything
            raise CheckpointError(f"{folder} could not be read: {_first_trouble(error)}") from error


def _first_trouble(error: BaseException) -> str:
    """The first error of torch's loader and its rank as text."""
    if not isinstance(error, CheckpointException) or len(error.failures) == 0:
        return trouble(error)
    rank, first = next(item for item in error.failures.items())
    return f"rank {rank}: {trouble(first[0])}"
