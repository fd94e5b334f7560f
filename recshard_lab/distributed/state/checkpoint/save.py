"""Saves checkpoints: in the caller's thread, or in a background thread while the training continues.

::

    caller's thread       plan        which rank writes which block, agreed by all ranks
                          stage       asynchronous saves only: copies this rank's blocks to the CPU
    either thread         write       each rank's file, then rank 0's metadata and manifest, then the rename

A background thread communicates over a separate process group, so that training collectives keep their order.
"""

import errno
import logging
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from recshard_lab import complete_folders
from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm import ShardingEnv, agreed, from_first_rank, gathered
from recshard_lab.comm.backends import host_env
from recshard_lab.comm.groups import subgroups
from recshard_lab.distributed.state.checkpoint.writer import BlockPlanner, BlockWriter
from recshard_lab.distributed.state.model_state import ModelState
from recshard_lab.optim.state import local_shards
from recshard_lab.saved.files import CHECKPOINT, CheckpointError, CheckpointSaveError
from recshard_lab.saved.reader import packed

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
    _running[_key(state.env)] = pending = PendingSave(save, background)
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


def _key(env: ShardingEnv) -> Any:
    return _ALONE if env.pg is None else env.pg


def wait_for_save(env: ShardingEnv) -> PendingSave | None:
    """Waits for the asynchronous save of these ranks, if one is running. Raises none of its errors."""
    pending = _running.get(_key(env))
    if pending is not None:
        wait([pending])
    return pending


def _finish_previous(env: ShardingEnv) -> None:
    """Waits for an asynchronous save of these ranks, and raises its error unless every rank has seen it. Collective."""
    pending = wait_for_save(env)
    if pending is not None:
        del _running[_key(env)]
        if any(gathered(env, lambda: not pending.seen)):
            pending.result()


def _background_env(env: ShardingEnv) -> ShardingEnv:
    """The same ranks over CPU connections that only background saves use. The first call is collective."""
    if env.pg is None:
        return env
    (group,) = subgroups(env.pg, "checkpoint", lambda: (host_env(env).twin().pg,))
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
        content = {
            "model": state.weights,
            "fused": state.fused,
            "optimizer": state.dense,
            "tiers": state.read_tiers(),
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
