"""Retrieve, then rank: one model that encodes users, finds candidates and ranks them.

::

    user features -- user tower --> vector -- index --> candidate ids
                                                            | item features, user features
                                                        ranker --> scores --> best items

A bundle of both stages has the files of `save_bundle` for each program, a saved index, and the item features::

    model.json              inputs, outputs, stages and settings
    items.safetensors       item features
    stages/user/            bundle of the user tower
    stages/rank/            bundle of the ranker
    stages/index/           saved index

Shape letters: B users, K columns, k candidates a user, n results a user, M candidates of all users, F features.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from recshard_lab.arguments import names_wrong_arguments, shown
from recshard_lab.complete_folders import Staging, described
from recshard_lab.embedding import EmbeddingBagCollection, embedding_names_by_table
from recshard_lab.models import TwoTower
from recshard_lab.serving.batch import Batch, Inputs, SparseInput
from recshard_lab.serving.bundle import FORMAT, BundleError, Servable, load_bundle, save_bundle
from recshard_lab.serving.export.weights import write_tensors
from recshard_lab.serving.retrieval.checks import is_count
from recshard_lab.serving.retrieval.index import CandidateIndex
from recshard_lab.serving.retrieval.items import ItemFeatures, joined_weights, select_bags
from recshard_lab.serving.retrieval.loading import load_index
from recshard_lab.serving.retrieval.merging import best, without
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, complete_cumsum

STAGES = ("encode", "retrieve", "rank")


@names_wrong_arguments
class RetrieveThenRank:
    """A `Servable` that returns the best items of each user. Threads may call it at the same time.

    Outputs: ``item`` ``[B, n]`` int64, ``score`` ``[B, n]`` float32, descending, and ``count`` ``[B]`` int64. Where
    fewer than n items are left, items are -1 and scores 0 from place ``count`` on.

    Args:
        users: user features -> a vector ``[B, K]``, its first output.
        index: of the items' vectors.
        ranker: user and item features -> a score ``[B]``, its first output.
        items: features of every item in the index. The ranker reads a feature or column from the items if they
            have it, else from the user.
        candidates: k, items that the index finds for each user.
        results: n, at most k.
        exclude_feature: an input whose ids are left out of the results of that user, such as seen items.

    Raises:
        ValueError: counts that do not fit, or an item of the index without features.

    Attributes:
        inputs: features of the user that any stage reads.
        outputs: ``("item", "score", "count")``.
    """

    outputs: tuple[str, ...] = ("item", "score", "count")

    def __init__(
        self,
        users: Servable,
        index: CandidateIndex,
        ranker: Servable,
        items: ItemFeatures,
        *,
        candidates: int = 100,
        results: int = 10,
        exclude_feature: str | None = None,
    ) -> None:
        if not is_count(candidates) or not is_count(results) or results > candidates:
            raise ValueError(
                f"results={shown(results)} must lie in 1 to candidates={shown(candidates)}. "
                "Fix: pass candidates=100, results=10"
            )
        items.positions(index.ids())
        self.users, self.index, self.ranker = users, index, ranker
        self.candidates, self.results, self.exclude_feature = candidates, results, exclude_feature
        self._items = items
        self.inputs = _inputs_of(users.inputs, ranker.inputs, items, exclude_feature)
        self._last = threading.local()
        self._changing = threading.Lock()

    @property
    def items(self) -> ItemFeatures:
        """Features of all items."""
        return self._items

    def stage_seconds(self) -> dict[str, float]:
        """Seconds of each stage in the last `predict` of this thread: encode, retrieve and rank. Empty before it."""
        return dict(getattr(self._last, "seconds", {}))

    def add_items(self, items: ItemFeatures, vectors: Tensor) -> None:
        """Adds items and their vectors ``[N, K]`` while others are served.

        Raises:
            ValueError: an item that is there, or vectors that the index does not take.
        """
        with self._changing:
            before = self._items
            self._items = before.with_items(items)  # first: what a search finds has features
            try:
                self.index.add(vectors, items.ids)
            except BaseException:
                self._items = before
                raise

    @torch.inference_mode()
    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """The best items of each user.

        Raises:
            ValueError: a batch that does not fit `inputs`.
        """
        batch.check(self.inputs)
        marks = [time.perf_counter()]
        user = _Features.of(batch, self.inputs)
        vectors = self.users.predict(user.batch(self.users.inputs))[self.users.outputs[0]]
        marks.append(time.perf_counter())
        exclude = None if self.exclude_feature is None else list(user.bags(self.exclude_feature))
        found = self.index.search_up_to(vectors, self.candidates, exclude)
        marks.append(time.perf_counter())
        there = torch.arange(self.candidates) < found.counts.unsqueeze(1)
        scores = torch.full(found.ids.shape, -torch.inf)
        if bool(there.any()):
            rows = torch.repeat_interleave(torch.arange(batch.size), found.counts)
            both = user.repeated(rows, self._items, found.ids[there])
            answer = self.ranker.predict(both.batch(self.ranker.inputs))[self.ranker.outputs[0]]
            scores[there] = answer.reshape(-1).float()
        ranked = without(*best(scores, found.ids, self.results), self.results, None)
        marks.append(time.perf_counter())
        self._last.seconds = {
            stage: end - begin for stage, begin, end in zip(STAGES, marks[:-1], marks[1:], strict=True)
        }
        shown_scores = ranked.scores.masked_fill(ranked.scores == -torch.inf, 0.0)  # JSON has no infinity
        return {"item": ranked.ids, "score": shown_scores, "count": ranked.counts}

    @classmethod
    def read(cls, folder: Path, content: dict[str, Any], check_hashes: bool) -> RetrieveThenRank:
        """The model of a bundle that `save_retrieval_bundle` wrote."""
        users, ranker = (load_bundle(folder / "stages" / name, check_hashes=check_hashes) for name in ("user", "rank"))
        index = load_index(folder / "stages" / "index")
        items = _items_of(load_file(folder / "items.safetensors"))
        try:
            return cls(users, index, ranker, items, **content["settings"])
        except (LookupError, TypeError) as error:
            raise BundleError(f"{folder} is not a readable bundle of two stages: {error}") from error


class QueryTower(nn.Module):
    """The query tower of a trained TwoTower alone, without the tables of the items. Shares its weights.

    Args:
        two_tower: not sharded.
    """

    def __init__(self, two_tower: TwoTower) -> None:
        super().__init__()
        whole = two_tower.embedding_bag_collection
        tables = whole.embedding_bag_configs()
        keys = embedding_names_by_table(tables)
        own = [t for t, names in zip(tables, keys, strict=True) if set(names) <= set(two_tower.query_keys)]
        self.embedding_bag_collection = EmbeddingBagCollection(
            own, whole.is_weighted(), "meta", out_of_range=whole.out_of_range
        )
        for table in own:
            self.embedding_bag_collection.embedding_bags[table.name].weight = whole.embedding_bags[table.name].weight
        self.proj, self.normalize = two_tower.query_proj, two_tower.normalize

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        """ids of B users -> ``[B, K]``"""
        vectors: Tensor = self.proj(self.embedding_bag_collection(kjt).values())
        return functional.normalize(vectors, dim=1) if self.normalize else vectors


def save_retrieval_bundle(
    path: str | Path,
    *,
    two_tower: TwoTower,
    index: CandidateIndex,
    ranker: nn.Module,
    items: ItemFeatures,
    dense: Sequence[str] = (),
    candidates: int = 100,
    results: int = 10,
    exclude_feature: str | None = None,
    score: Callable[[Tensor], Tensor] | None = torch.sigmoid,
) -> None:
    """Saves both stages as one bundle, which `load_bundle` returns as a `RetrieveThenRank`. Replaces one at ``path``.

    Args:
        path: the folder. Its name is the version of the bundle.
        two_tower: a trained model, not sharded.
        index: of the items' vectors under ``two_tower``, see `index_of_items`.
        ranker: such as `DLRM`, not sharded; its first output is a logit ``[B, 1]``.
        items: features of every item in the index.
        dense: names of the ranker's dense columns, in order.
        candidates, results, exclude_feature: as of `RetrieveThenRank`.
        score: applied to the ranker's output.

    Raises:
        BundleError: ``path`` is something else, or a model cannot be exported.
        ValueError: as `RetrieveThenRank`.
    """
    settings = {"candidates": candidates, "results": results, "exclude_feature": exclude_feature}
    with Staging(FORMAT, Path(path)) as staging:
        stages, tower = staging.path / "stages", QueryTower(two_tower).eval()
        save_bundle(tower, stages / "user", inputs=Inputs.of(tower), outputs=("vector",))
        save_bundle(ranker.eval(), stages / "rank", inputs=Inputs.of(ranker, dense), outputs={"score": score})
        index.save(stages / "index")
        write_tensors(staging.path / "items.safetensors", _tensors_of(items))
        content: dict[str, Any] = {
            "format": 1,
            "stages": [
                {"name": "encode", "kind": "program"},
                {"name": "retrieve", "kind": "index"},
                {"name": "rank", "kind": "program"},
            ],
            "settings": settings,
        }
        whole = RetrieveThenRank.read(staging.path, content, check_hashes=False)  # also a check of all that was saved
        content |= {"inputs": whole.inputs.to_json(), "outputs": list(whole.outputs)}
        (staging.path / "model.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        staging.commit(described([staging.path / "model.json", staging.path / "items.safetensors"]))


class _Features:
    """Columns ``[B]`` and bags of B samples by name."""

    def __init__(self, size: int, dense: dict[str, Tensor], sparse: dict[str, JaggedTensor]) -> None:
        self.size, self.dense, self.sparse = size, dense, sparse

    @staticmethod
    def of(batch: Batch, inputs: Inputs) -> _Features:
        lengths = batch.lengths.long().reshape(len(inputs.sparse), batch.size)
        counts = lengths.sum(1).tolist()
        weights = [None] * len(counts) if batch.weights is None else batch.weights.split(counts)
        parts = zip(inputs.names(), batch.values.split(counts), weights, lengths, strict=True)
        sparse = {name: JaggedTensor(values, own, lengths=each) for name, values, own, each in parts}
        return _Features(batch.size, dict(zip(inputs.dense, batch.dense.T, strict=True)), sparse)

    def bags(self, name: str) -> tuple[Tensor, ...]:
        """The ids of each sample."""
        bags = self.sparse[name]
        return tuple(bags.values().split(bags.lengths().tolist()))

    def repeated(self, rows: Tensor, items: ItemFeatures, ids: Tensor) -> _Features:
        """Samples ``[M]``, where the features of one item replace those of the same name."""
        dense = {name: column[rows] for name, column in self.dense.items()}
        sparse = {}
        for name, bags in self.sparse.items():
            values, lengths, weights = select_bags(bags, complete_cumsum(bags.lengths()), rows)
            sparse[name] = JaggedTensor(values, weights, lengths=lengths)
        at = items.positions(ids)
        dense |= {name: column[at] for name, column in items.dense.items()}
        sparse |= dict(zip(items.sparse, items.bags(ids, list(items.sparse)), strict=True))
        return _Features(len(rows), dense, sparse)

    def batch(self, inputs: Inputs) -> Batch:
        """What a model with these inputs takes."""
        columns = [self.dense[name].float() for name in inputs.dense]
        dense = torch.stack(columns, 1) if columns else torch.zeros(self.size, 0)
        bags = [self.sparse[name] for name in inputs.names()]
        values = torch.cat([torch.empty(0, dtype=torch.int64), *(own.values() for own in bags)])
        lengths = torch.cat([torch.empty(0, dtype=torch.int64), *(own.lengths() for own in bags)])
        weights = joined_weights(bags) if inputs.weighted else None
        return Batch(
            dense, values, lengths, torch.ones(len(values)) if weights is None and inputs.weighted else weights
        )


def _inputs_of(users: Inputs, ranker: Inputs, items: ItemFeatures, exclude_feature: str | None) -> Inputs:
    """User features that the stages read: the smallest number of rows, and weights if any reads them."""
    of_user = [name for name in (*users.dense, *users.names()) if name in items.dense or name in items.sparse]
    if of_user:
        raise ValueError(f"feature {of_user[0]!r} is one of the user tower and of the items. Fix: rename one of them")
    dense = [*users.dense, *(name for name in ranker.dense if name not in items.dense)]
    sparse: dict[str, SparseInput] = {}
    read = [*users.sparse, *(own for own in ranker.sparse if own.name not in items.sparse)]
    if exclude_feature is not None:
        read.append(SparseInput(exclude_feature, None))
    for own in read:
        other = sparse.get(own.name, own)
        rows = [each for each in (own.rows, other.rows) if each is not None]
        sparse[own.name] = SparseInput(own.name, min(rows, default=None), own.weighted or other.weighted)
    return Inputs(tuple(dict.fromkeys(dense)), tuple(sparse.values()))


def _tensors_of(items: ItemFeatures) -> dict[str, Tensor]:
    tensors = {"ids": items.ids.contiguous()}
    for name, bags in items.sparse.items():
        tensors |= {f"sparse.values.{name}": bags.values(), f"sparse.lengths.{name}": bags.lengths()}
        weights = bags.weights_or_none()
        if weights is not None:
            tensors[f"sparse.weights.{name}"] = weights
    tensors |= {f"dense.{name}": column for name, column in items.dense.items()}
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def _items_of(tensors: dict[str, Tensor]) -> ItemFeatures:
    sparse, dense = {}, {}
    for key, tensor in tensors.items():
        if key.startswith("sparse.values."):
            name = key.removeprefix("sparse.values.")
            lengths, weights = tensors[f"sparse.lengths.{name}"], tensors.get(f"sparse.weights.{name}")
            sparse[name] = JaggedTensor(tensor, weights, lengths=lengths)
        elif key.startswith("dense."):
            dense[key.removeprefix("dense.")] = tensor
    return ItemFeatures(tensors["ids"], sparse, dense)
