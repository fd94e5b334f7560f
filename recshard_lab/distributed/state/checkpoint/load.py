"""Loads checkpoints that were saved under any plan by any number of ranks. Compares everything before it changes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm import ShardingEnv, agreed
from recshard_lab.distributed.state.checkpoint.save import quiet, trouble, wait_for_save
from recshard_lab.distributed.state.model_state import ModelState
from recshard_lab.saved.files import CHECKPOINT, CheckpointError
from recshard_lab.saved.reader import (
    SafePlanner,
    SafeReader,
    check_tensors,
    read_metadata,
    tensors_in,
    unpacked,
)

_SECTIONS = {
    "model": 2,
    "fused": 3,
    "optimizer": 3,
    "tiers": 3,
    "settings": 1,
    "extra": 1,
}  # name -> length of its key paths
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
    agreed(env, lambda: _compare(folder, expected, saved, state, state.rows_at(sizes)))
    read: dict[str, Any] = {name: torch.empty(tuple(saved[name,].size), dtype=torch.uint8) for name in _PLAIN}
    tiers = agreed(env, lambda: _tiers(folder, saved, state))
    if tiers:
        read["tiers"] = {name: {"partitions": own} for name, own in tiers.items() if len(own)}
    read_into(read, folder, metadata, env)
    settings, added = agreed(env, lambda: (_settings(read["settings"]), unpacked(read["extra"], "extra")))
    if state.optimizer is not None:
        entries = {key[1:]: entry for key, entry in saved.items() if key[0] == "optimizer"}
        agreed(env, lambda: _compare_groups(folder, state, settings, entries))
        agreed(env, lambda: state.make_dense(entries))
        state.read_dense()
    rows = agreed(env, lambda: _tier_rows(folder, saved, state, tiers, optimizer_state))
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
    state.adopt_tiers()
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
    size = tuple(tensors_in(metadata)["extra",].size)
    read: dict[str, Any] = {"extra": torch.empty(size, dtype=torch.uint8)}
    read_into(read, folder, metadata, ShardingEnv.from_local(1, 0))
    return unpacked(read["extra"], "extra")


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
    state: Any,
    rows: Mapping[tuple[str, ...], int] | None = None,
) -> None:
    """Compares tensors of the model with those of a checkpoint. ``rows``: of tensors that will have other rows."""
    wrong = []
    for key, value in expected.items():
        name = ".".join(key[1:])
        if key not in saved:
            wrong.append(f"{name} is not in the checkpoint")
            continue
        sharded = hasattr(value, "local_shards")
        size = tuple(value.metadata().size if sharded else value.shape)
        size = (rows[key], *size[1:]) if rows and key in rows else size
        dtype = value.metadata().tensor_properties.dtype if sharded else value.dtype
        entry = saved[key]
        if tuple(entry.size) != size or entry.properties.dtype != dtype:
            wrong.append(
                f"{name} is {_text(size, dtype)} in the model and {_text(entry.size, entry.properties.dtype)} in the "
                f"checkpoint"
            )
    known = set(state.weights) if state is not None else {key[1] for key in saved if key[0] == "model"}
    wrong += [
        f"{key[1]} is in the checkpoint and not in the model"
        for key in saved
        if key[0] == "model" and key[1] not in known
    ]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"{folder} does not match the model: {'; '.join(wrong[:5])}{more}. Nothing was changed"
            + (
                ""
                if all(key[0] == "model" for key in expected)
                else ". Fix: optimizer_state=False loads only the weights"
            )
        )


def _tiers(folder: Path, saved: Mapping[tuple[str, ...], Any], state: ModelState) -> dict[str, Tensor]:
    """Table with tiers -> memory for the rows of each partition; empty for tables that were saved without tiers."""
    own, found = state.tiers(), {}
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
        found[name] = torch.zeros(0 if entry is None else partitions, dtype=torch.int64)
    return found


def _tier_rows(
    folder: Path,
    saved: Mapping[tuple[str, ...], Any],
    state: ModelState,
    tiers: Mapping[str, Tensor],
    optimizer_state: bool,
) -> dict[str, dict[str, Any]]:
    """What is read of the rows of tiers, in memory that the model allocates."""
    partitions = state.tiers()
    counts = {name: own.tolist() or [0] * partitions[name] for name, own in tiers.items()}
    if any(count < 0 for own in counts.values() for count in own):
        raise CheckpointError(f"{folder} is damaged: it has a negative number of rows in a partition")
    content: dict[str, dict[str, Any]] = {}
    for name, entry in state.expect_tiers(counts).items():
        matrices = {key: value for key, value in entry.items() if key != "partitions"}
        if not optimizer_state:
            matrices = {key: value for key, value in matrices.items() if key in ("index", "weight")}
        expected: dict[tuple[str, ...], Any] = {("tiers", name, key): value for key, value in matrices.items()}
        _compare(folder, expected, saved, None)
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
