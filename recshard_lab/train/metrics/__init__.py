"""Metrics of predictions: functions of the samples of one process, and metrics over ranks, steps and windows."""

from recshard_lab.train.metrics.classes import AccuracyMetric as AccuracyMetric
from recshard_lab.train.metrics.classes import HindsightTargetPRMetric as HindsightTargetPRMetric
from recshard_lab.train.metrics.classes import MulticlassRecallMetric as MulticlassRecallMetric
from recshard_lab.train.metrics.classes import MultiLabelPrecisionMetric as MultiLabelPrecisionMetric
from recshard_lab.train.metrics.classes import PrecisionMetric as PrecisionMetric
from recshard_lab.train.metrics.classes import RecallMetric as RecallMetric
from recshard_lab.train.metrics.entropies import CaliFreeNEMetric as CaliFreeNEMetric
from recshard_lab.train.metrics.entropies import NEPositiveMetric as NEPositiveMetric
from recshard_lab.train.metrics.entropies import RecalibratedCalibrationMetric as RecalibratedCalibrationMetric
from recshard_lab.train.metrics.entropies import RecalibratedNEMetric as RecalibratedNEMetric
from recshard_lab.train.metrics.entropies import SegmentedNEMetric as SegmentedNEMetric
from recshard_lab.train.metrics.entropies import ServingCalibrationMetric as ServingCalibrationMetric
from recshard_lab.train.metrics.entropies import ServingNEMetric as ServingNEMetric
from recshard_lab.train.metrics.entropies import UnweightedNEMetric as UnweightedNEMetric
from recshard_lab.train.metrics.functions import auc as auc
from recshard_lab.train.metrics.functions import calibration as calibration
from recshard_lab.train.metrics.functions import grouped_auc as grouped_auc
from recshard_lab.train.metrics.functions import log_loss as log_loss
from recshard_lab.train.metrics.functions import ndcg as ndcg
from recshard_lab.train.metrics.functions import normalized_entropy as normalized_entropy
from recshard_lab.train.metrics.functions import recall_at_k as recall_at_k
from recshard_lab.train.metrics.means import AverageMetric as AverageMetric
from recshard_lab.train.metrics.means import MAEMetric as MAEMetric
from recshard_lab.train.metrics.means import MSEMetric as MSEMetric
from recshard_lab.train.metrics.means import NMSEMetric as NMSEMetric
from recshard_lab.train.metrics.means import NumMissingLabelsMetric as NumMissingLabelsMetric
from recshard_lab.train.metrics.means import NumPositiveSamplesMetric as NumPositiveSamplesMetric
from recshard_lab.train.metrics.means import ScalarMetric as ScalarMetric
from recshard_lab.train.metrics.means import SumWeightsMetric as SumWeightsMetric
from recshard_lab.train.metrics.means import WeightedAvgMetric as WeightedAvgMetric
from recshard_lab.train.metrics.means import WeightedSumPredictionsMetric as WeightedSumPredictionsMetric
from recshard_lab.train.metrics.means import XAUCMetric as XAUCMetric
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
from recshard_lab.train.metrics.windowed import AUPRCMetric as AUPRCMetric
from recshard_lab.train.metrics.windowed import GAUCMetric as GAUCMetric
from recshard_lab.train.metrics.windowed import NDCGMetric as NDCGMetric
from recshard_lab.train.metrics.windowed import PrecisionSessionMetric as PrecisionSessionMetric
from recshard_lab.train.metrics.windowed import RAUCMetric as RAUCMetric
from recshard_lab.train.metrics.windowed import RecallSessionMetric as RecallSessionMetric

__all__ = [
    "AUCMetric",
    "AUPRCMetric",
    "AccuracyMetric",
    "AverageMetric",
    "CTRMetric",
    "CaliFreeNEMetric",
    "CalibrationMetric",
    "DefaultMetricsConfig",
    "DefaultTaskInfo",
    "GAUCMetric",
    "HindsightTargetPRMetric",
    "LogLossMetric",
    "MAEMetric",
    "MSEMetric",
    "MetricsConfig",
    "MultiLabelPrecisionMetric",
    "MulticlassRecallMetric",
    "NDCGMetric",
    "NEMetric",
    "NEPositiveMetric",
    "NMSEMetric",
    "NumMissingLabelsMetric",
    "NumPositiveSamplesMetric",
    "PrecisionMetric",
    "PrecisionSessionMetric",
    "RAUCMetric",
    "RecMetric",
    "RecMetricDef",
    "RecMetricEnum",
    "RecMetricModule",
    "RecTaskInfo",
    "RecalibratedCalibrationMetric",
    "RecalibratedNEMetric",
    "RecallMetric",
    "RecallSessionMetric",
    "ScalarMetric",
    "SegmentedNEMetric",
    "ServingCalibrationMetric",
    "ServingNEMetric",
    "SessionMetricDef",
    "SumWeightsMetric",
    "ThroughputDef",
    "ThroughputMetric",
    "UnweightedNEMetric",
    "WeightedAvgMetric",
    "WeightedSumPredictionsMetric",
    "XAUCMetric",
    "auc",
    "calibration",
    "generate_metric_module",
    "grouped_auc",
    "log_loss",
    "ndcg",
    "normalized_entropy",
    "recall_at_k",
]
