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
from recshard_lab.comm import ShardingEnv, agreed, from_first_rank, gathered
from recshard_lab.distributed.state.checkpoint import files
from recshard_lab.distributed.state.checkpoint.files import CheckpointError, CheckpointSaveError, Staging
from recshard_lab.distributed.state.checkpoint.reader import (
    SafePlanner,
    SafeReader,
    check_tensors,
    packed,
    read_metadata,
    tensors_in,
    unpacked,
)
from recshard_lab.distributed.state.checkpoint.writer import BlockPlanner, BlockWriter
from recshard_lab.distributed.state.model_state import ModelState

_SECTIONS = {"model": 2, "fused": 3, "optimizer": 3, "settings": 1, "extra": 1}  # name -> length of its key paths
_PLAIN = ("settings", "extra")  # sections that are bytes
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

    Several processes may save to one path at the same time: each save is whole, and the last one to finish stays.

    Raises:
        CheckpointError: ``path`` holds something else than a checkpoint.
        CheckpointSaveError: an error on any rank while writing (a `CheckpointError` and an ``OSError``): the disk is
            full, for example. It is raised on all ranks. What was there before is whole, and nothing else is left.
        ValueError: ``extra`` or a state that could not be read back as plain data; replicas (`DMPCollection`) that
            differ.

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
    settings, added = from_first_rank(
        env, lambda: (packed(state.settings(), "the optimizers' settings"), packed(extra, "extra"))
    )
    content = {
        "model": state.weights,
        "fused": state.fused,
        "optimizer": state.dense,
        "settings": settings,
        "extra": added,
    }
    staging: Staging | None = None

    def start() -> Path:
        nonlocal staging
        staging = _started(folder, total)
        return staging.path

    try:
        total = sum(gathered(env, lambda: _bytes_of(content)))  # replicas are counted on every rank: an upper bound
        path_of_all = from_first_rank(env, start)
        written = gathered(env, lambda: _written(content, path_of_all, env))
        every = {name: entry for each in written for name, entry in each.items()}

        def finish() -> None:
            assert staging is not None
            staging.commit(every | files.described([staging.path / ".metadata"]))

        from_first_rank(env, finish)
    except CheckpointError:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, _Unwritten) else _trouble(error, env)
        raise CheckpointSaveError(
            f"{folder} could not be saved: {text}. What was saved there before is whole and in its place"
        ) from error
    finally:
        if staging is not None:
            staging.discard()


class _Unwritten(Exception):
    """torch's error of a save, in words."""


def _written(content: Mapping[str, Any], folder: Path, env: ShardingEnv) -> dict[str, dict[str, Any]]:
    """Writes this rank's file: name -> size and SHA-256. Collective; torch raises an error of one rank on all."""
    with _quiet():
        writer = BlockWriter(folder)
        try:
            save(
                dict(content),
                storage_writer=writer,
                planner=BlockPlanner(),
                process_group=env.pg,
                no_dist=env.pg is None,
            )
        except CheckpointException as error:  # not an Exception in torch
            raise _Unwritten(_trouble(error, env)) from error
    return writer.written


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
    recshard_lab.distributed.state.checkpoint.files.CheckpointError: there is no checkpoint at nowhere
    """
    state = ModelState(model, optimizer if optimizer_state else None)
    env = state.env
    folder, found = agreed(env, lambda: _checked(Path(path), env))
    saved = tensors_in(found)
    own: dict[tuple[str, ...], Any] = {("model", name): value for name, value in state.weights.items()}
    fused = optimizer_state and bool(state.fused)
    if fused:
        own |= {("fused", key, name): value for key, entry in state.fused.items() for name, value in entry.items()}
    told = {name: torch.empty(tuple(saved[name,].size), dtype=torch.uint8) for name in _PLAIN}
    agreed(env, lambda: _compare(folder, own, saved, state))
    read: dict[str, Any] = dict(told)
    read_into(read, folder, found, env)
    settings, added = agreed(env, lambda: (_settings(read["settings"]), unpacked(read["extra"], "extra")))
    if state.optimizer is not None:
        entries = {key[1:]: entry for key, entry in saved.items() if key[0] == "optimizer"}
        agreed(env, lambda: _compare_groups(folder, state, settings, entries))
        agreed(env, lambda: state.make_dense(entries))
        state.read_dense()
    content: dict[str, Any] = {"model": state.weights}
    if fused:
        content["fused"] = state.fused
    if state.dense:
        content["optimizer"] = state.dense
    read_into(content, folder, found, env)
    state.adopt(settings if optimizer_state else None, fused)
    filled = set(own) | {("optimizer", name, key) for name, entry in state.dense.items() for key in entry}
    left = [".".join(key) for key in saved if key not in filled and key[0] in ("fused", "optimizer")]
    return Loaded(added, len(filled), tuple(sorted(left)))


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
    found = _metadata(folder, files.manifest_of(folder))
    size = tuple(tensors_in(found)["extra",].size)
    read: dict[str, Any] = {"extra": torch.empty(size, dtype=torch.uint8)}
    read_into(read, folder, found, ShardingEnv.from_local(1, 0))
    return unpacked(read["extra"], "extra")


# ---- steps of saving ----


def _started(folder: Path, needed: int) -> Staging:
    staging = Staging(folder)
    free = shutil.disk_usage(staging.path).free
    if needed > free:
        staging.discard()
        raise OSError(errno.ENOSPC, f"the checkpoint needs {needed:,} bytes, {free:,} are free")
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


def _trouble(error: BaseException, env: ShardingEnv) -> str:
    """The first cause and its rank, in words; a full disk is named as one."""
    causes: dict[int | None, BaseException] = {None: error}
    if isinstance(error, CheckpointException):
        causes = {rank: pair[0] for rank, pair in error.failures.items()}
    place, first = next((item for item in causes.items() if isinstance(item[1], OSError)), next(iter(causes.items())))
    number = getattr(first, "errno", None)
    full = number in _NO_SPACE or "No space left" in str(first) or "unexpected pos" in str(first)
    text = f"the disk is full ({first})" if full else f"{type(first).__name__}: {first}"
    return text if place is None or env.pg is None else f"rank {place}: {text}"


# ---- steps of loading ----


def _checked(path: Path, env: ShardingEnv) -> tuple[Path, Any]:
    folder = files.readable(path)
    listed = files.manifest_of(folder)
    files.check_files(folder, listed, env.rank, env.world_size)
    return folder, _metadata(folder, listed)


def _metadata(folder: Path, listed: Mapping[str, Any]) -> Any:
    """Metadata that was checked against the files, with the sections that `save_checkpoint` writes."""
    found = read_metadata(folder, [name for name in listed if name.endswith(".distcp")])
    check_tensors(found, folder)
    saved = tensors_in(found)
    for key in saved:
        if len(key) != _SECTIONS.get(next(iter(key), "")):
            raise CheckpointError(f"{folder} holds {'.'.join(key)!r}, which is in no section of a checkpoint")
    for name in _PLAIN:
        entry = saved.get((name,))
        if entry is None or len(entry.size) != 1 or entry.properties.dtype != torch.uint8:
            raise CheckpointError(f"{folder} is not whole: {name!r} is missing or not stored as bytes")
    return found


def _settings(data: Tensor) -> dict[str, Any]:
    """The optimizers' settings, in the shape that `ModelState.settings` gives them."""
    found = unpacked(data, "settings")
    try:
        rates = all(isinstance(name, str) and isinstance(rate, float | int) for name, rate in found["fused"].items())
        groups = all(isinstance(name, str) for group in found["optimizer"] for name in dict(group)["params"])
    except (LookupError, TypeError, ValueError, AttributeError):
        rates = groups = False
    if not (rates and groups):
        raise CheckpointError("settings in the checkpoint are damaged: expected learning rates and param groups")
    return dict(found)


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
        except (Exception, CheckpointException) as error:  # crafted files may hold anything
            raise CheckpointError(f"{folder} could not be read: {_trouble(error, env)}") from error
