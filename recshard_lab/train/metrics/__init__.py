"""Metrics of predictions: functions of the samples of one process, and metrics over ranks, steps and windows."""

from recshard_lab.train.metrics.functions import auc as auc
from recshard_lab.train.metrics.functions import calibration as calibration
from recshard_lab.train.metrics.functions import grouped_auc as grouped_auc
from recshard_lab.train.metrics.functions import log_loss as log_loss
from recshard_lab.train.metrics.functions import ndcg as ndcg
from recshard_lab.train.metrics.functions import normalized_entropy as normalized_entropy
from recshard_lab.train.metrics.functions import recall_at_k as recall_at_k
from recshard_lab.train.metrics.module import DefaultMetricsConfig as DefaultMetricsConfig
from recshard_lab.train.metrics.module import MetricsConfig as MetricsConfig
from recshard_lab.train.metrics.module import RecMetricDef as RecMetricDef
from recshard_lab.train.metrics.module import RecMetricEnum as RecMetricEnum
from recshard_lab.train.metrics.module import RecMetricModule as RecMetricModule
from recshard_lab.train.metrics.module import ThroughputDef as ThroughputDef
from recshard_lab.train.metrics.module import generate_metric_module as generate_metric_module
from recshard_lab.train.metrics.rec_metric import DefaultTaskInfo as DefaultTaskInfo
from recshard_lab.train.metrics.rec_metric import RecMetric as RecMetric
from recshard_lab.train.metrics.rec_metric import RecTaskInfo as RecTaskInfo
from recshard_lab.train.metrics.rec_metric import SessionMetricDef as SessionMetricDef
from recshard_lab.train.metrics.sums import CalibrationMetric as CalibrationMetric
from recshard_lab.train.metrics.sums import CTRMetric as CTRMetric
from recshard_lab.train.metrics.sums import LogLossMetric as LogLossMetric
from recshard_lab.train.metrics.sums import NEMetric as NEMetric
from recshard_lab.train.metrics.throughput import ThroughputMetric as ThroughputMetric
from recshard_lab.train.metrics.windowed import AUCMetric as AUCMetric
from recshard_lab.train.metrics.windowed import GAUCMetric as GAUCMetric
from recshard_lab.train.metrics.windowed import NDCGMetric as NDCGMetric
from recshard_lab.train.metrics.windowed import RecallSessionMetric as RecallSessionMetric

__all__ = [
    "AUCMetric",
    "CTRMetric",
    "CalibrationMetric",
    "DefaultMetricsConfig",
    "DefaultTaskInfo",
    "GAUCMetric",
    "LogLossMetric",
    "MetricsConfig",
    "NDCGMetric",
    "NEMetric",
    "RecMetric",
    "RecMetricDef",
    "RecMetricEnum",
    "RecMetricModule",
    "RecTaskInfo",
    "RecallSessionMetric",
    "SessionMetricDef",
    "ThroughputDef",
    "ThroughputMetric",
    "auc",
    "calibration",
    "generate_metric_module",
    "grouped_auc",
    "log_loss",
    "ndcg",
    "normalized_entropy",
    "recall_at_k",
]
