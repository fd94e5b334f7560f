"""The exact index: it scores every item.

Adding appends rows to a buffer with spare room, then publishes a longer `_State`. A removed row stays in the buffer
until half of the rows are removed. A search reads one state, so it needs no lock.

Shape letters: Q queries, N items, K columns, k results a query, M items of one call, C rows of the buffer.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from recshard_lab.arguments import device_named, names_wrong_arguments, shown
from recshard_lab.serving.retrieval.checks import Ids, Metric, checked_metric, prepared
from recshard_lab.serving.retrieval.files import read_array, write_array
from recshard_lab.serving.retrieval.index import CandidateIndex, Found, IndexInfo
from recshard_lab.serving.retrieval.merging import best, longest, without
from recshard_lab.serving.retrieval.positions import Positions

Storage = Literal["float32", "float16", "int8"]
SLICE_ROWS = 1 << 15
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}


class _State(NamedTuple):
    """What one search reads.

    Attributes:
        rows: ``[C, K]`` in the storage dtype; the first `used` are written.
        scales: ``[C]`` float32, what an int8 row is multiplied by; None for other dtypes.
        ids: ``[C]`` int64.
        used: rows that are written.
        live: ``[used]`` bool, False for removed rows; None if none is removed.
        positions: of the live items.
    """

    rows: Tensor
    scales: Tensor | None
    ids: Tensor
    used: int
    live: Tensor | None
    positions: Positions


@names_wrong_arguments
class ExactIndex(CandidateIndex):
    """Scores every item, a slice of rows at a time.

    Args:
        vectors: ``[N, K]`` floating point, at least one.
        ids: ``[N]`` int64 item ids; 0 to N - 1 if left out.
        metric: "inner_product" or "cosine".
        storage: "float32", "float16", or "int8" with one scale a row. Scores are computed in float32.
        device: where the rows are stored and searched; that of ``vectors`` if left out.
        metadata: values for JSON, saved with the index.
        slice_rows: rows that are scored at once. A search needs Q times this many floats.

    Raises:
        ValueError: no vector, another shape, a value that is not finite, an id that occurs twice, an unknown setting.

    >>> index = ExactIndex(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([70, -8, 9]))
    >>> found = index.search(torch.tensor([[2.0, 1.0]]), 2)
    >>> found.scores.tolist(), found.ids.tolist()
    ([[3.0, 2.0]], [[9, 70]])
    """

    def __init__(
        self,
        vectors: Tensor,
        ids: Tensor | None = None,
        *,
        metric: Metric = "inner_product",
        storage: Storage = "float32",
        device: torch.device | str | None = None,
        metadata: dict[str, Any] | None = None,
        slice_rows: int = SLICE_ROWS,
    ) -> None:
        self.metric = checked_metric(metric)
        if storage not in get_args(Storage):
            raise ValueError(f"storage={shown(storage)} is not supported. Supported: {', '.join(get_args(Storage))}")
        if slice_rows < 1:
            raise ValueError(f"slice_rows={slice_rows} is not a number of rows. Fix: pass 1 or more")
        rows, numbers = prepared(vectors, ids_or_places(vectors, ids), None, self.metric)
        if not len(rows):
            raise ValueError(f"vectors has shape {list(rows.shape)}: an index needs at least one item")
        self.dim, self.storage, self.metadata = rows.shape[1], storage, dict(metadata or {})
        self._slice_rows = slice_rows
        self._write = threading.Lock()
        self._state = self._fresh(rows.to(device_named(device) or rows.device), numbers)

    def __len__(self) -> int:
        return len(self._state.positions.ids)

    def ids(self) -> Tensor:
        return torch.from_numpy(self._state.positions.ids.copy())

    def contains(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(self._state.positions.has(ids.cpu().numpy()))

    def info(self) -> IndexInfo:
        state = self._state
        held = [state.rows, state.ids, *([] if state.scales is None else [state.scales])]
        size = sum(tensor.nbytes for tensor in held) + sum(array.nbytes for array in state.positions)
        return IndexInfo("exact", len(self), self.dim, self.metric, size, {"storage": self.storage})

    def vectors(self, ids: Tensor) -> Tensor:
        """``[M]`` ids -> ``[M, K]`` float32, as stored.

        Raises:
            ValueError: an id that the index does not contain.
        """
        state = self._state
        return _decoded(state, torch.from_numpy(state.positions.find(ids.cpu().numpy())).to(state.rows.device))

    def _find(self, queries: Tensor, k: int, exclude: list[Tensor] | None) -> Found:
        state, where = self._state, queries.device
        queries = queries.to(state.rows.device)
        wanted = k + longest(exclude)
        scores: list[Tensor] = []
        ids: list[Tensor] = []
        for start in range(0, state.used, self._slice_rows):
            part = slice(start, min(start + self._slice_rows, state.used))
            own = queries @ state.rows[part].float().T
            if state.scales is not None:
                own *= state.scales[part]
            if state.live is not None:
                own.masked_fill_(~state.live[part], -torch.inf)
            top, found = best(own, state.ids[part], wanted)
            scores.append(top)
            ids.append(found)
        if not scores:
            empty = queries.new_empty(len(queries), 0)
            scores, ids = [empty], [empty.long()]
        top, found = (scores[0], ids[0]) if len(scores) == 1 else best(torch.cat(scores, 1), torch.cat(ids, 1), wanted)
        return Found(*(part.to(where) for part in without(top, found, k, exclude)))

    def _add(self, vectors: Tensor, ids: Ids) -> None:
        with self._write:
            state = self._state
            positions = state.positions.added(ids, np.arange(state.used, state.used + len(ids)))
            self._state = self._appended(state, vectors, ids, state.live)._replace(positions=positions)

    def _replace(self, vectors: Tensor, ids: Ids) -> None:
        with self._write:
            state = self._state
            live = _dead(state, state.positions.find(ids))
            positions = state.positions.moved(ids, np.arange(state.used, state.used + len(ids)))
            self._publish(self._appended(state, vectors, ids, live)._replace(positions=positions))

    def _remove(self, ids: Ids) -> None:
        with self._write:
            state = self._state
            live = _dead(state, state.positions.find(ids))
            self._publish(state._replace(live=live, positions=state.positions.removed(ids)))

    def _publish(self, state: _State) -> None:
        """Copies the live rows into a new buffer if half of the rows are removed."""
        live = len(state.positions.ids)
        if state.used > 2 * live:
            kept = torch.from_numpy(np.sort(state.positions.at)).to(state.rows.device)
            ids = state.ids[kept]
            scales = None if state.scales is None else state.scales[kept]
            positions = Positions.of(ids.cpu().numpy(), np.arange(live))
            state = _State(state.rows[kept], scales, ids, live, None, positions)
        self._state = state

    def _appended(self, state: _State, vectors: Tensor, ids: Ids, live: Tensor | None) -> _State:
        """With rows behind the others. Rows that a running search reads do not change."""
        rows, scales = _encoded(vectors.to(state.rows.device), self.storage)
        end = state.used + len(rows)
        if end > len(state.rows):
            spare = end + end // 2
            state = state._replace(
                rows=_grown(state.rows, state.used, spare),
                scales=None if state.scales is None else _grown(state.scales, state.used, spare),
                ids=_grown(state.ids, state.used, spare),
            )
        state.rows[state.used : end] = rows
        if scales is not None and state.scales is not None:
            state.scales[state.used : end] = scales
        state.ids[state.used : end] = torch.from_numpy(ids).to(state.ids.device)
        if live is not None:
            live = torch.cat([live, live.new_ones(len(rows))])
        return state._replace(used=end, live=live)

    def _fresh(self, vectors: Tensor, ids: Ids) -> _State:
        rows, scales = _encoded(vectors, self.storage)
        at = np.arange(len(ids))
        own = torch.from_numpy(ids.copy()).to(rows.device)
        return _State(rows.clone() if rows is vectors else rows, scales, own, len(ids), None, Positions.of(ids, at))

    def write(self, folder: Path) -> dict[str, Any]:
        state = self._state
        kept = torch.from_numpy(state.positions.at).to(state.rows.device)  # by ascending id
        write_array(folder / "ids.npy", state.positions.ids)
        write_array(folder / "vectors.npy", state.rows[kept].cpu().numpy())
        if state.scales is not None:
            write_array(folder / "scales.npy", state.scales[kept].cpu().numpy())
        settings = {"storage": self.storage, "slice_rows": self._slice_rows}
        return {"kind": "exact", "dim": self.dim, "metric": self.metric, "metadata": self.metadata, **settings}

    @classmethod
    def read(cls, folder: Path, content: dict[str, Any], memory_map: bool) -> ExactIndex:
        """What `write` wrote."""
        index = cls.__new__(cls)
        index.dim, index.metric, index.metadata = content["dim"], content["metric"], content["metadata"]
        index.storage, index._slice_rows = content["storage"], content["slice_rows"]
        ids = read_array(folder / "ids.npy", np.int64, 1, memory_map=False)
        dtype = np.dtype(index.storage)
        rows = torch.from_numpy(read_array(folder / "vectors.npy", dtype, 2, memory_map))
        scales = None
        if index.storage == "int8":
            scales = torch.from_numpy(read_array(folder / "scales.npy", np.float32, 1, memory_map))
        if tuple(rows.shape) != (len(ids), index.dim) or (scales is not None and len(scales) != len(ids)):
            raise ValueError(f"{folder} has {len(ids)} ids for vectors {list(rows.shape)} of dim {index.dim}")
        positions = Positions(ids, np.arange(len(ids)))
        index._write = threading.Lock()
        index._state = _State(rows, scales, torch.from_numpy(ids.copy()), len(ids), None, positions)
        return index


def ids_or_places(vectors: Tensor, ids: Tensor | None) -> Tensor:
    """The ids, or 0 to N - 1."""
    return torch.arange(len(vectors)) if ids is None and isinstance(vectors, Tensor) and vectors.dim() else ids  # type: ignore[return-value]


def _encoded(vectors: Tensor, storage: str) -> tuple[Tensor, Tensor | None]:
    """Rows in the storage dtype, and the scales of int8 rows: the largest magnitude of a row is 127.

    Raises:
        ValueError: a value beyond float16.
    """
    if storage != "int8":
        rows = vectors.to(_DTYPES[storage])
        if not bool(torch.isfinite(rows).all()):
            worst = float(vectors.abs().max())
            raise ValueError(f"a value of {worst:g} does not fit float16. Fix: storage='float32', or smaller vectors")
        return rows, None
    scales = vectors.abs().amax(1) / 127
    rows = (vectors / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)).round().clamp(-127, 127)
    return rows.to(torch.int8), scales


def _decoded(state: _State, at: Tensor) -> Tensor:
    rows = state.rows[at].float()
    return rows if state.scales is None else rows * state.scales[at].unsqueeze(1)


def _dead(state: _State, at: Ids) -> Tensor:
    """The mask of live rows without some."""
    rows = state.rows
    live = torch.ones(state.used, dtype=torch.bool, device=rows.device) if state.live is None else state.live.clone()
    live[torch.from_numpy(at).to(rows.device)] = False
    return live


def _grown(tensor: Tensor, used: int, spare: int) -> Tensor:
    longer = tensor.new_empty(spare, *tensor.shape[1:])
    longer[:used] = tensor[:used]
    return longer
