"""Metrics of order: they need the samples themselves, and store those of the window.

An area under a curve needs all samples at once: every rank receives them. Groups are independent: one rank receives
each group's samples, and the sums of the groups' values are added over ranks.

Shape letters: n samples, K steps of the window, G groups.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recshard_lab.comm import all_reduce
from recshard_lab.train.metrics.exchange import gather_rows, packed, rows_to, unpacked
from recshard_lab.train.metrics.formulas import average_precision, discordant_pairs
from recshard_lab.train.metrics.ranking import group_aucs, group_hits, group_ndcgs, group_recalls
from recshard_lab.train.metrics.rec_metric import RecMetric, Samples

COLUMNS = ("predictions", "labels", "weights", "groups")


class WindowedMetric(RecMetric):
    """A metric of the samples of the last K steps. With a `window_size` of a whole pass, it is exact for the pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forget()

    def _forget(self) -> None:
        self._window: dict[str, deque[Samples]] = defaultdict(lambda: deque(maxlen=self.window_steps))

    def _take(self, task: str, samples: Samples) -> None:
        groups = samples.groups.clone() if self.grouped else samples.groups[:0]
        self._window[task].append(
            Samples(_kept(samples.predictions), _kept(samples.labels), _kept(samples.weights), groups)
        )

    def _rows(self, task: str) -> Tensor:
        """int64 ``[n, 5]`` of this rank: predictions, labels, weights, groups, and the step in the window."""
        steps = list(self._window[task])
        none = torch.zeros(0, dtype=torch.float64, device=self.device)
        numbers = [torch.cat([none, *(getattr(own, name) for own in steps)]) for name in COLUMNS[:3]]
        sizes = torch.tensor([len(own.labels) for own in steps], dtype=torch.int64, device=self.device)
        groups = (
            torch.cat([sizes[:0], *(own.groups for own in steps)]) if self.grouped else sizes.new_zeros(len(numbers[0]))
        )
        return packed(numbers, [groups, torch.arange(len(steps), device=self.device).repeat_interleave(sizes)])

    def _state(self, task: str) -> dict[str, Any]:
        *columns, step = unpacked(gather_rows(self._rows(task), self.env).cpu(), 3)
        by_step = torch.argsort(step, stable=True)
        sizes = torch.bincount(step, minlength=len(self._window[task]))
        return {"sizes": sizes, **{name: column[by_step] for name, column in zip(COLUMNS, columns, strict=True)}}

    def _load(self, task: str, state: Mapping[str, Any]) -> None:
        rank, world = self.env.rank, self.env.world_size
        columns = [state[name].to(self.device).split(state["sizes"].tolist()) for name in COLUMNS]
        for step in zip(*columns, strict=True):
            self._take(task, Samples(*(column[rank::world] for column in step)))


def _kept(column: Tensor) -> Tensor:
    """A copy ``[n]``: in fp32 if that is exact, which halves its memory. Does not wait for a GPU."""
    narrow = column.float()
    same = not column.is_cuda and torch.equal(narrow.double(), column)
    return narrow if same else column.clone()


class _OfWindow(WindowedMetric):
    """A value of all samples of the window, which every rank receives."""

    @abstractmethod
    def _value(self, predictions: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """The value of ``[n]``, n from 1; NaN if it is undefined."""

    def _values(self, task: str) -> dict[str, Tensor]:
        predictions, labels, weights, _, _ = unpacked(gather_rows(self._rows(task), self.env), 3)
        known = len(labels) and not bool(predictions.isnan().any())
        value = self._value(predictions, labels, weights) if known else predictions.new_tensor(torch.nan)
        return {f"window_{self.namespace}": value}


class AUCMetric(_OfWindow):
    """Exact area under the ROC curve of the window; NaN if it has only one class.

    Predictions may be any numbers; only their order counts.

    >>> metric = AUCMetric(batch_size=4)
    >>> metric.update(predictions=torch.tensor([0.9, 0.4, 0.6, 0.1]), labels=torch.tensor([1, 1, 0, 0]))
    >>> metric.compute()["auc-DefaultTask|window_auc"].item()
    0.75
    """

    namespace = "auc"

    def _value(self, predictions: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        areas, _ = group_aucs(predictions, labels, weights, torch.zeros_like(labels, dtype=torch.int64))
        return areas[0]


class AUPRCMetric(_OfWindow):
    """Area under the precision-recall curve of the window (`formulas.average_precision`); NaN without a positive."""

    namespace = "auprc"

    def _value(self, predictions: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        value = average_precision(predictions, labels, weights)
        return torch.where((weights * labels).sum() > 0, value, torch.nan)


class RAUCMetric(_OfWindow):
    """AUC of a regression: the share of the window's pairs that predictions do not order against their labels.

    ``1 - discordant pairs / (n (n - 1) / 2)``, Kendall's discordant pairs (Kendall 1938, Biometrika 30). Ties are in
    order, and weights do not count. NaN with fewer than 2 samples.
    """

    namespace = "rauc"
    labels_are = "finite"

    def _value(self, predictions: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        pairs = len(labels) * (len(labels) - 1) / 2
        return predictions.new_tensor(1 - discordant_pairs(predictions, labels) / pairs if pairs else torch.nan)


class GroupedMetric(WindowedMetric):
    """A mean over groups. The rank ``group mod W`` computes the value of a group."""

    grouped = True

    @abstractmethod
    def _sums(self, predictions: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> Tensor:
        """The sums to add over ranks, ``[2]``: of the values, and of their weights."""

    def _values(self, task: str) -> dict[str, Tensor]:
        rows = self._rows(task)
        mine = rows_to(rows[:, 3] % self.env.world_size, rows, self.env)
        predictions, labels, weights, groups, _ = unpacked(mine, 3)
        sums = self._sums(predictions, labels, weights, groups)
        if bool(predictions.isnan().any()):
            sums = sums * torch.nan
        value, count = all_reduce(sums, self.env, f"metrics/{self.namespace}")
        return self._named(value / torch.where(count > 0, count, torch.nan), count)

    def _named(self, value: Tensor, count: Tensor) -> dict[str, Tensor]:
        return {f"window_{self.namespace}": value}


class GAUCMetric(GroupedMetric):
    """AUC inside each group, weighed by the group's samples (Zhu et al. 2018, arXiv 1706.06978, section 6.3).

    Groups with one class are omitted; ``window_gauc_num_samples`` is the weight of the others.
    """

    namespace = "gauc"

    def _sums(self, predictions: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> Tensor:
        areas, sizes = group_aucs(predictions, labels, weights, groups)
        both = ~areas.isnan()
        return torch.stack([(areas * sizes)[both].sum(), sizes[both].sum()])

    def _named(self, value: Tensor, count: Tensor) -> dict[str, Tensor]:
        return {"window_gauc": value, "window_gauc_num_samples": count}


class _AtK(GroupedMetric):
    def __init__(self, *args: Any, k: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        defined = {task.session_metric_def.top_threshold for task in self.tasks.values() if task.session_metric_def}
        self.k = k if k is not None else next(iter(defined), None) if len(defined) == 1 else None
        if self.k is not None and (
            isinstance(self.k, bool) or not isinstance(self.k, int) or not 1 <= self.k < 1 << 31
        ):
            raise ValueError(f"{type(self).__name__}: k must be an integer from 1 to 2**31, got {self.k!r}")


class NDCGMetric(_AtK):
    """NDCG@k, the mean over groups with a gain (Jarvelin and Kekalainen 2002).

    Args:
        k: number of places that count. Default: ``top_threshold`` of the task's `SessionMetricDef`, otherwise all.
        others: as in `RecMetric`. Labels are gains, 0 or more; weights do not count.
    """

    namespace = "ndcg"
    labels_are = "finite and not negative"

    def _sums(self, predictions: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> Tensor:
        return _total(group_ndcgs(predictions, labels, groups, self.k))


class _OfSessions(_AtK):
    def __init__(self, *args: Any, k: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, k=k, **kwargs)
        if self.k is None:
            name = type(self).__name__
            raise ValueError(f"{name} needs k=..., or one top_threshold in the tasks' session_metric_def")


class RecallSessionMetric(_OfSessions):
    """Recall@k: the share of a group's relevant samples that are among its k best, averaged over groups with one.

    Args:
        k: number of places that count. Default: ``top_threshold`` of the task's `SessionMetricDef`.
        others: as in `RecMetric`. Labels are 1 for relevant samples; weights do not count.

    Raises:
        ValueError: no k.
    """

    namespace = "recall_session"

    def _sums(self, predictions: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> Tensor:
        assert self.k is not None
        return _total(group_recalls(predictions, labels, groups, self.k))


class PrecisionSessionMetric(_OfSessions):
    """Precision@k: the weight of relevant samples over that of all samples, among the k best of each group.

    Args:
        k: number of places that count. Default: ``top_threshold`` of the task's `SessionMetricDef`.
        others: as in `RecMetric`. Labels are 1 for relevant samples.

    Raises:
        ValueError: no k.
    """

    namespace = "precision_session"

    def _sums(self, predictions: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> Tensor:
        assert self.k is not None
        return group_hits(predictions, labels, weights, groups, self.k)


def _total(each: Tensor) -> Tensor:
    known = each[~each.isnan()]
    return torch.stack([known.sum(), known.new_tensor(float(len(known)))])
