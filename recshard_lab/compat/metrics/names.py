"""Names of metrics and their keys: ``torchrec.metrics.metrics_namespace``."""

from __future__ import annotations

from enum import Enum


class StrValueMixin:
    """``str()`` of a member is its value."""

    value: str

    def __str__(self) -> str:
        return self.value


class MetricNameBase(StrValueMixin, Enum):
    """The base of enums of metric names, for metrics of yours."""


class MetricName(MetricNameBase):
    """The name of a value in a key."""

    DEFAULT = ""
    NE = "ne"
    LOG_LOSS = "logloss"
    THROUGHPUT = "throughput"
    TOTAL_EXAMPLES = "total_examples"
    ATTEMPT_EXAMPLES = "attempt_examples"
    BATCH_SIZE = "batch_size"
    CTR = "ctr"
    CALIBRATION = "calibration"
    MSE = "mse"
    MAE = "mae"
    RMSE = "rmse"
    R_SQUARED = "r_squared"
    AUC = "auc"
    GAUC = "gauc"
    GAUC_NUM_SAMPLES = "gauc_num_samples"
    GROUPED_AUC = "grouped_auc"
    RECALL_SESSION_LEVEL = "recall_session_level"
    WEIGHTED_AVG = "weighted_avg"
    ACCURACY = "accuracy"
    NDCG = "ndcg"
    XAUC = "xauc"
    PRECISION = "precision"
    RECALL = "recall"
    LABEL_AVERAGE = "label_average"
    PREDICTION_AVERAGE = "prediction_average"


class MetricNamespaceBase(StrValueMixin, Enum):
    """The base of enums of namespaces, for metrics of yours."""


class MetricNamespace(MetricNamespaceBase):
    """The first part of a key: the metric."""

    DEFAULT = ""
    NE = "ne"
    THROUGHPUT = "throughput"
    CTR = "ctr"
    CALIBRATION = "calibration"
    MSE = "mse"
    AUC = "auc"
    GAUC = "gauc"
    MAE = "mae"
    ACCURACY = "accuracy"
    OPTIMIZERS = "optimizers"
    MODEL_CONFIGURATOR = "model_configurator"
    WEIGHTED_AVG = "weighted_avg"
    RECALL_SESSION_LEVEL = "recall_session_level"
    NDCG = "ndcg"
    XAUC = "xauc"
    PRECISION = "precision"
    RECALL = "recall"
    AVERAGE = "average"


class MetricPrefix(StrValueMixin, Enum):
    """The samples of a value: all so far, or those of the window."""

    DEFAULT = ""
    LIFETIME = "lifetime_"
    WINDOW = "window_"
    ATTEMPT = "attempt_"


def compose_metric_namespace(namespace: MetricNamespaceBase, task_name: str) -> str:
    """The first part of a key.

    >>> compose_metric_namespace(MetricNamespace.NE, "click")
    'ne-click'
    """
    return f"{namespace}-{task_name}"


def compose_customized_metric_key(namespace: str, metric_name: str, description: str | None = None) -> str:
    """A key of free text."""
    return f"{namespace}|{metric_name}{description or ''}"


def compose_metric_key(
    namespace: MetricNamespaceBase,
    task_name: str,
    metric_name: MetricNameBase,
    metric_prefix: MetricPrefix = MetricPrefix.DEFAULT,
    description: str | None = None,
) -> str:
    """The key of a value in a metric's results.

    >>> compose_metric_key(MetricNamespace.NE, "click", MetricName.NE, MetricPrefix.WINDOW)
    'ne-click|window_ne'
    """
    space = compose_metric_namespace(namespace, task_name)
    return compose_customized_metric_key(space, f"{metric_prefix}{metric_name}", description)
