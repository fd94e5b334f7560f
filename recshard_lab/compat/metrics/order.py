"""Metrics of order: ``torchrec.metrics.auc``, ``gauc``, ``ndcg`` and ``recall_session``.

Equal scores keep the order of the samples, as in TorchRec. `recshard_lab.train.metrics` shares their gain instead, so
that its results do not depend on the order of the samples.

Shape letters: T tasks, n samples, G groups, L samples of the largest group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recshard_lab.compat.metrics.config import RecTaskInfo, SessionMetricDef
from recshard_lab.compat.metrics.names import MetricName, MetricNamespace, MetricPrefix
from recshard_lab.compat.metrics.rec_metric import (
    MetricComputationReport,
    RecMetric,
    RecMetricComputation,
    RecMetricException,
)
from recshard_lab.compat.metrics.sums import Get, SumsComputation

PREDICTIONS, LABELS, WEIGHTS = "predictions", "labels", "weights"
GROUPING_KEYS, REQUIRED_INPUTS, SESSION_KEY = "grouping_keys", "required_inputs", "session_id"
SUM_NDCG, NUM_SESSIONS = "sum_ndcg", "num_sessions"
NUM_TRUE_POS, NUM_FALSE_NEGATIVE, NUM_FALSE_POS = "num_true_pos", "num_false_neg", "num_false_pos"


# ---- AUC of a window ----


def one_row(samples: Sequence[Tensor] | Tensor) -> Tensor:
    """Parts ``[T, n]`` as one."""
    return samples if isinstance(samples, Tensor) else torch.cat(list(samples), dim=-1)


def _area(predictions: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The area under the ROC curve of ``[n]``; 0.5 with one class."""
    order = torch.argsort(predictions, descending=True, dim=-1)
    positive = (weights * labels)[order].cumsum(0)
    negative = (weights * (1 - labels))[order].cumsum(0)
    if not len(order) or not bool(positive[-1] * negative[-1] > 0):
        return predictions.new_tensor(0.5)
    return torch.trapezoid(positive, negative) / positive[-1] / negative[-1]


def compute_auc(
    n_tasks: int,
    predictions: Sequence[Tensor] | Tensor,
    labels: Sequence[Tensor] | Tensor,
    weights: Sequence[Tensor] | Tensor,
    apply_bin: bool = False,
) -> Tensor:
    """The area under the ROC curve of each task, ``[T]``; 0.5 with one class.

    Args:
        n_tasks: T.
        predictions, labels, weights: ``[T, n]``, or a list of such parts.
        apply_bin: accepted as in TorchRec. Areas are exact in any case.

    >>> compute_auc(1, torch.tensor([[0.9, 0.4, 0.6]]), torch.tensor([[1.0, 1, 0]]), torch.ones(1, 3))
    tensor([0.5000])
    """
    rows = zip(one_row(predictions), one_row(labels), one_row(weights), strict=True)
    return torch.stack([_area(*row) for row in rows])


def compute_auc_per_group(
    n_tasks: int,
    predictions: Sequence[Tensor] | Tensor,
    labels: Sequence[Tensor] | Tensor,
    weights: Sequence[Tensor] | Tensor,
    grouping_keys: Tensor,
) -> Tensor:
    """The mean of the areas of all groups, ``[T]``. A group with one class counts as 0.5.

    Args:
        n_tasks, predictions, labels, weights: as of `compute_auc`.
        grouping_keys: ``[n]``, the group of each sample.
    """
    columns = [one_row(samples) for samples in (predictions, labels, weights)]
    groups = [grouping_keys == key for key in grouping_keys.unique()]
    scores, targets, weight = columns
    areas = [compute_auc(n_tasks, scores[:, own], targets[:, own], weight[:, own]) for own in groups]
    return torch.stack(areas).mean(0) if areas else columns[0].new_full((n_tasks,), 0.5)


class WindowComputation(RecMetricComputation):
    """A computation of the samples of the window, which ranks join.

    Args:
        grouped: whether to store also the group of each sample, which ``required_inputs["grouping_keys"]`` names.
        others: as of `RecMetricComputation`.
    """

    predictions: list[Tensor]
    labels: list[Tensor]
    weights: list[Tensor]
    grouping_keys: list[Tensor]

    def __init__(self, *args: Any, grouped: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._grouped = grouped
        self._columns = [PREDICTIONS, LABELS, WEIGHTS, *[GROUPING_KEYS] * grouped]
        for name in self._columns:
            self._add_state(name, [], add_window_state=False)

    def update(self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any) -> None:
        """Adds samples, and removes those that leave the window.

        Raises:
            RecMetricException: groups are missing.
        """
        assert predictions is not None
        samples = [predictions.float(), labels, torch.ones_like(predictions) if weights is None else weights]
        if self._grouped:
            given = kwargs.get(REQUIRED_INPUTS, {}).get(GROUPING_KEYS)
            if given is None:
                raise RecMetricException(
                    "a metric of groups reads them. Fix: update(required_inputs={'grouping_keys': ...})"
                )
            samples.append(given.reshape(-1))
        for name, part in zip(self._columns, samples, strict=True):
            parts: list[Tensor] = getattr(self, name)
            parts.append(part.detach().clone())
            surplus = sum(own.shape[-1] for own in parts) - self._window_size
            while surplus > 0:
                first = parts[0].shape[-1]
                parts[:1] = [] if first <= surplus else [parts[0][..., surplus:]]
                surplus -= min(first, surplus)

    def _samples(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Predictions, labels and weights ``[T, n]``, and groups ``[n]``."""
        empty = torch.zeros(self._n_tasks, 0)
        scores, labels, weights = (one_row([empty, *getattr(self, name)]) for name in self._columns[:3])
        keys = torch.cat(self.grouping_keys) if self._grouped and self.grouping_keys else torch.zeros(0)
        return scores, labels, weights, keys


class AUCMetricComputation(WindowComputation):
    """The area under the ROC curve of the window, from its samples.

    Args:
        grouped_auc: whether to report also the mean over groups, which ``required_inputs["grouping_keys"]`` names.
        apply_bin: accepted as in TorchRec. Areas are exact in any case.
        others: as of `RecMetricComputation`.
    """

    def __init__(self, *args: Any, grouped_auc: bool = False, apply_bin: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, grouped=grouped_auc, **kwargs)

    def _compute(self) -> list[MetricComputationReport]:
        scores, labels, weights, keys = self._samples()
        areas = compute_auc(self._n_tasks, scores, labels, weights)
        reports = [MetricComputationReport(MetricName.AUC, MetricPrefix.WINDOW, areas)]
        if self._grouped:
            grouped = compute_auc_per_group(self._n_tasks, scores, labels, weights, keys)
            reports.append(MetricComputationReport(MetricName.GROUPED_AUC, MetricPrefix.WINDOW, grouped))
        return reports


class AUCMetric(RecMetric):
    """The area under the ROC curve of the window; see `AUCMetricComputation`."""

    _namespace = MetricNamespace.AUC
    _computation_class = AUCMetricComputation

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if kwargs.get("grouped_auc"):
            self._required_inputs.add(GROUPING_KEYS)


# ---- AUC of groups ----


def to_3d(tensor_2d: Tensor, seq_lengths: Tensor, max_length: int) -> Tensor:
    """Rows of groups, padded with zeros.

    Args:
        tensor_2d: ``[n, T]``, the samples of all groups.
        seq_lengths: ``[G]``, the samples of each group.
        max_length: L. Further samples of a group are dropped.

    Returns:
        ``[G, L, T]``.

    >>> to_3d(torch.tensor([[1], [2], [3]]), torch.tensor([1, 2]), 2).squeeze(-1)
    tensor([[1, 0],
            [2, 3]])
    """
    places = torch.arange(max_length, device=tensor_2d.device)
    kept = places < seq_lengths.unsqueeze(1)
    source = (seq_lengths.cumsum(0) - seq_lengths).unsqueeze(1) + places
    padded = tensor_2d.new_zeros(len(seq_lengths), max_length, tensor_2d.shape[1])
    padded[kept] = tensor_2d[source[kept]]
    return padded


def compute_gauc_3d(predictions: Tensor, labels: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The sum of the areas of groups, and their number.

    Groups with equal predictions only, or with one class only, are left out.

    Args:
        predictions, labels, weights: ``[T, G, L]``. Padding has weight 0.

    Returns:
        ``auc_sum`` and ``num_samples``, ``[T]``.
    """
    order = torch.flip(torch.argsort(predictions, dim=-1, stable=True), dims=(-1,))
    ranked = [column.gather(-1, order) for column in (labels, weights)]
    positive = (ranked[0] * ranked[1]).cumsum(-1)
    negative = (1 - ranked[0]) * ranked[1]
    pairs = positive[..., -1] * negative.sum(-1)
    differ = predictions.masked_fill(weights == 0, -torch.inf).amax(-1) != predictions.masked_fill(
        weights == 0, torch.inf
    ).amin(-1)
    counts = differ & (pairs > 0)
    areas = torch.where(counts, (positive * negative).sum(-1) / pairs, 0.0)
    return {"auc_sum": areas.sum(-1), "num_samples": counts.sum(-1)}


def get_auc_states(labels: Tensor, predictions: Tensor, weights: Tensor, num_candidates: Tensor) -> dict[str, Tensor]:
    """`compute_gauc_3d` of groups that follow each other.

    Args:
        labels, predictions, weights: ``[T, n]``.
        num_candidates: ``[G]``, the samples of each group.
    """
    most = int(num_candidates.max()) if len(num_candidates) else 0
    if not most:
        zeros = torch.zeros(labels.shape[0])
        return {"auc_sum": zeros, "num_samples": zeros.long()}
    padded = [to_3d(column.T, num_candidates, most).permute(2, 0, 1) for column in (predictions, labels, weights)]
    return compute_gauc_3d(*padded)


def compute_window_auc(auc: Tensor, num_samples: Tensor) -> dict[str, Tensor]:
    """The mean area and the number of groups; 0.5 without groups."""
    return {"gauc": (auc + 1e-9) / (num_samples + 2e-9), "num_samples": num_samples}


class GAUCMetricComputation(SumsComputation):
    """The mean area of groups. ``update`` takes ``num_candidates``: ``[G]``, the samples of each group."""

    states = ("auc_sum", "num_samples")

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        if "num_candidates" not in more:
            raise TypeError("GAUC reads the sizes of groups. Fix: update(num_candidates=)")
        return get_auc_states(labels, predictions, weights, more["num_candidates"])

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        found = compute_window_auc(*map(get, self.states))
        return [(MetricName.GAUC, found["gauc"]), (MetricName.GAUC_NUM_SAMPLES, found["num_samples"])]


class GAUCMetric(RecMetric):
    """The mean area under the ROC curves of groups; see `GAUCMetricComputation`."""

    _namespace = MetricNamespace.GAUC
    _computation_class = GAUCMetricComputation


# ---- sessions ----


def _session_of(more: dict[str, Any], name: str, metric: str) -> Tensor:
    given: Tensor | None = more.get(REQUIRED_INPUTS, {}).get(name, more.get(name))
    if given is None:
        raise RecMetricException(f"{metric} reads sessions. Fix: update(required_inputs={{{name!r}: ...}})")
    return given if given.dim() == 2 else given.reshape(1, -1)


def _gains(scores: Tensor, gains: Tensor, session: Tensor, sessions: int, k: int) -> Tensor:
    """Discounted gain of the first k samples of each session, ``[sessions]``."""
    order = torch.argsort(scores, descending=True, stable=True)
    order = order[torch.argsort(session[order], stable=True)]
    sizes = torch.bincount(session, minlength=sessions)
    place = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[session[order]]
    discounted = gains[order] / torch.log2(place.double() + 2)
    if k > 0:
        discounted = torch.where(place < k, discounted, 0.0)
    return torch.zeros(sessions, dtype=torch.double, device=order.device).index_add(0, session[order], discounted)


class NDCGComputation(SumsComputation):
    """NDCG@k, the mean over sessions (Jarvelin and Kekalainen 2002). A session without a gain has 0.

    Args:
        exponential_gain: whether a label is worth ``2 ** label - 1``. Otherwise it is worth itself.
        session_key: the required input with the session of each sample.
        k: places that count; -1 for all.
        report_ndcg_as_decreasing_curve: whether to report ``1 - NDCG``.
        remove_single_length_sessions: whether sessions of one sample are left out.
        scale_by_weights_tensor: whether weights multiply scores and labels. Otherwise the highest weight of a
            session multiplies its value.
        is_negative_task_mask: for each task whether labels and predictions are read as ``1 - value``.
        others: as of `RecMetricComputation`.
    """

    states = (SUM_NDCG, NUM_SESSIONS)

    def __init__(
        self,
        *args: Any,
        exponential_gain: bool = False,
        session_key: str = SESSION_KEY,
        k: int = -1,
        report_ndcg_as_decreasing_curve: bool = True,
        remove_single_length_sessions: bool = False,
        scale_by_weights_tensor: bool = False,
        is_negative_task_mask: list[bool] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._exponential_gain, self._session_key, self._k = exponential_gain, session_key, k
        self._decreasing, self._remove_single = report_ndcg_as_decreasing_curve, remove_single_length_sessions
        self._scale_by_weights = scale_by_weights_tensor
        self._negative = is_negative_task_mask or [False] * self._n_tasks

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        keys = _session_of(more, self._session_key, "NDCG").expand(labels.shape)
        rows = zip(self._negative, keys, predictions, labels, weights, strict=True)
        sums, counts = zip(*(self._sums_of_task(*row) for row in rows), strict=True)
        return {SUM_NDCG: torch.stack(sums), NUM_SESSIONS: torch.stack(counts)}

    def _sums_of_task(
        self, negative: bool, keys: Tensor, predictions: Tensor, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The sum over sessions, and their number, of one task's ``[n]``."""
        _, session, sizes = keys.unique(return_inverse=True, return_counts=True)
        score, label, weight = predictions.double(), labels.double(), weights.double()
        if negative:
            score, label = 1 - score, 1 - label
        if self._scale_by_weights:
            score, label = score * weight, label * weight
        gain = 2**label - 1 if self._exponential_gain else label
        best = _gains(label, gain, session, len(sizes), self._k)
        value = _gains(score, gain, session, len(sizes), self._k) / torch.where(best > 0, best, 1.0)
        value = 1 - value if self._decreasing else value
        if not self._scale_by_weights:
            value = value * torch.zeros_like(value).scatter_reduce(0, session, weight, "amax")
        counts = sizes > 1 if self._remove_single else sizes > 0
        return (value * counts).sum(), counts.sum()

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        total, count = map(get, self.states)
        return [(MetricName.NDCG, total / count)]


class NDCGMetric(RecMetric):
    """NDCG@k, as ``1 - NDCG`` by default; see `NDCGComputation`."""

    _namespace = MetricNamespace.NDCG
    _computation_class = NDCGComputation

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._required_inputs.add(kwargs.get("session_key", SESSION_KEY))

    def _get_task_kwargs(self, task_config: RecTaskInfo | list[RecTaskInfo]) -> dict[str, Any]:
        tasks = task_config if isinstance(task_config, list) else [task_config]
        return {"is_negative_task_mask": [task.is_negative_task for task in tasks]}


def ranking_within_session(predictions: Tensor, session: Tensor) -> Tensor:
    """For each sample the number of samples of its session that have lower predictions, ``[n]`` int64.

    >>> ranking_within_session(torch.tensor([0.1, 0.5, 0.3]), torch.tensor([0, 0, 1]))
    tensor([0, 1, 0])
    """
    lower = predictions.unsqueeze(0) < predictions.unsqueeze(1)
    return (lower & (session.unsqueeze(0) == session.unsqueeze(1))).sum(1)


class SessionComputation(SumsComputation):
    """Sums over the best samples of sessions, or over the others.

    Args:
        session_metric_def: the sessions, and how many best samples there are.
        others: as of `RecMetricComputation`.

    Raises:
        RecMetricException: ``top_threshold`` is missing.
    """

    def __init__(self, *args: Any, session_metric_def: SessionMetricDef, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if session_metric_def.top_threshold is None:
            raise RecMetricException("metrics of sessions need SessionMetricDef(top_threshold=)")
        self._definition, self._top = session_metric_def, session_metric_def.top_threshold

    def _best(self, labels: Tensor, predictions: Tensor, session: Tensor) -> tuple[Tensor, Tensor]:
        """``[T, n]``: which samples are among the best of their session, and the labels."""
        best, ranked = [], []
        for row, own in enumerate(session.expand(labels.shape)):
            best.append(ranking_within_session(-predictions[row], own) < self._top)
            if self._definition.run_ranking_of_labels:
                ranked.append((ranking_within_session(-labels[row], own) < self._top).to(labels.dtype))
        return torch.stack(best), torch.stack(ranked) if ranked else labels

    def _session(self, more: dict[str, Any]) -> Tensor:
        return _session_of(more, self._definition.session_var_name, "a metric of sessions")


class RecallSessionMetricComputation(SessionComputation):
    """The share of labels that are among the best samples of their session; arguments as of `SessionComputation`."""

    states = (NUM_TRUE_POS, NUM_FALSE_NEGATIVE)

    def get_recall_states(
        self, labels: Tensor, predictions: Tensor, weights: Tensor, session: Tensor
    ) -> dict[str, Tensor]:
        """The sums of recall. Arguments are ``[T, n]``; sessions also ``[1, n]``."""
        best, labels = self._best(labels, predictions, session)
        gain = (weights * labels).double()
        return {NUM_TRUE_POS: (gain * best).sum(-1), NUM_FALSE_NEGATIVE: (gain * ~best).sum(-1)}

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return self.get_recall_states(labels, predictions, weights, self._session(more))

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        found, missed = map(get, self.states)
        return [(MetricName.RECALL_SESSION_LEVEL, found / (found + missed))]


class PrecisionSessionMetricComputation(SessionComputation):
    """The share of the best samples of sessions that have a label; arguments as of `RecallSessionMetricComputation`."""

    states = (NUM_TRUE_POS, NUM_FALSE_POS)

    def get_precision_states(
        self, labels: Tensor, predictions: Tensor, weights: Tensor, session: Tensor
    ) -> dict[str, Tensor]:
        """The sums of precision. Arguments are ``[T, n]``; sessions also ``[1, n]``."""
        best, labels = self._best(labels, predictions, session)
        counted = (weights * best).double()
        return {NUM_TRUE_POS: (counted * labels).sum(-1), NUM_FALSE_POS: (counted * (1 - labels)).sum(-1)}

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return self.get_precision_states(labels, predictions, weights, self._session(more))

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        true, false = map(get, self.states)
        return [(MetricName.PRECISION_SESSION_LEVEL, true / (true + false))]


class _SessionMetric(RecMetric):
    def _get_task_kwargs(self, task_config: RecTaskInfo | list[RecTaskInfo]) -> dict[str, Any]:
        if isinstance(task_config, list):
            raise RecMetricException("a metric of sessions has one computation for each task. Fix: do not fuse tasks")
        if task_config.session_metric_def is None:
            raise RecMetricException(
                f"task {task_config.name!r} has no sessions. Fix: RecTaskInfo(session_metric_def=)"
            )
        return {"session_metric_def": task_config.session_metric_def}

    def _get_task_required_inputs(self, task_config: RecTaskInfo | list[RecTaskInfo]) -> set[str]:
        tasks = task_config if isinstance(task_config, list) else [task_config]
        return {task.session_metric_def.session_var_name for task in tasks if task.session_metric_def}


class RecallSessionMetric(_SessionMetric):
    """The share of labels that are among the best samples of their session; NaN without labels.

    Raises:
        RecMetricException: a task without `SessionMetricDef`, or fused tasks.
    """

    _namespace = MetricNamespace.RECALL_SESSION_LEVEL
    _computation_class = RecallSessionMetricComputation


class PrecisionSessionMetric(_SessionMetric):
    """The share of the best samples of sessions that have a label; NaN without samples.

    Raises:
        RecMetricException: a task without `SessionMetricDef`, or fused tasks.
    """

    _namespace = MetricNamespace.PRECISION_SESSION_LEVEL
    _computation_class = PrecisionSessionMetricComputation
