"""``torchrec.metrics``."""

SERVED: dict[str, dict[str, str]] = {
    "torchrec.metrics": {},
    "torchrec.metrics.auc": {"train": "AUCMetric"},
    "torchrec.metrics.calibration": {"train": "CalibrationMetric"},
    "torchrec.metrics.ctr": {"train": "CTRMetric"},
    "torchrec.metrics.gauc": {"train": "GAUCMetric"},
    "torchrec.metrics.metric_module": {"train": "RecMetricModule generate_metric_module"},
    "torchrec.metrics.metrics_config": {
        "train.metrics": "DefaultMetricsConfig DefaultTaskInfo MetricsConfig RecMetricDef RecMetricEnum RecTaskInfo "
        "SessionMetricDef ThroughputDef",
    },
    "torchrec.metrics.ndcg": {"train": "NDCGMetric"},
    "torchrec.metrics.ne": {"train": "NEMetric"},
    "torchrec.metrics.rec_metric": {"train": "RecMetric"},
    "torchrec.metrics.recall_session": {"train": "RecallSessionMetric"},
    "torchrec.metrics.throughput": {"train": "ThroughputMetric"},
}
