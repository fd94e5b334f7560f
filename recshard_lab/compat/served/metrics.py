"""``torchrec.metrics``."""

_ROOM = "compat.metrics"
_ORDER, _SUMS = f"{_ROOM}.order", f"{_ROOM}.sums"

SERVED: dict[str, dict[str, str]] = {
    "torchrec.metrics": {},
    "torchrec.metrics.accuracy": {
        _SUMS: "AccuracyMetric AccuracyMetricComputation THRESHOLD compute_accuracy get_accuracy_states",
    },
    "torchrec.metrics.auc": {
        _ORDER: "AUCMetric AUCMetricComputation GROUPING_KEYS LABELS PREDICTIONS REQUIRED_INPUTS WEIGHTS compute_auc "
        "compute_auc_per_group",
    },
    "torchrec.metrics.calibration": {
        _SUMS: "CALIBRATION_DENOM CALIBRATION_NUM CalibrationMetric CalibrationMetricComputation compute_calibration "
        "get_calibration_states",
    },
    "torchrec.metrics.ctr": {
        _SUMS: "CTRMetric CTRMetricComputation CTR_DENOM CTR_NUM compute_ctr get_ctr_states",
    },
    "torchrec.metrics.gauc": {
        _ORDER: "GAUCMetric GAUCMetricComputation compute_gauc_3d compute_window_auc get_auc_states to_3d",
    },
    "torchrec.metrics.mae": {
        _SUMS: "ERROR_SUM MAEMetric MAEMetricComputation WEIGHTED_NUM_SAMPLES compute_mae get_mae_states",
    },
    "torchrec.metrics.metric_module": {
        f"{_ROOM}.module": "MODEL_METRIC_LABEL REC_METRICS_MAPPING RecMetricModule STATE_METRICS_NAMESPACE_MAPPING "
        "StateMetric generate_metric_module",
    },
    "torchrec.metrics.metrics_config": {
        f"{_ROOM}.config": "BatchSizeStage DefaultMetricsConfig DefaultTaskInfo EmptyMetricsConfig MetricsConfig "
        "RecComputeMode RecMetricDef RecMetricEnum RecMetricEnumBase RecTaskInfo SessionMetricDef StateMetricEnum "
        "ThroughputDef validate_batch_size_stages",
    },
    "torchrec.metrics.metrics_namespace": {
        f"{_ROOM}.names": "MetricName MetricNameBase MetricNamespace MetricNamespaceBase MetricPrefix "
        "compose_customized_metric_key compose_metric_key compose_metric_namespace",
    },
    "torchrec.metrics.mse": {
        _SUMS: "ERROR_SUM LABEL_SQUARED_SUM LABEL_SUM MSEMetric MSEMetricComputation WEIGHTED_NUM_SAMPLES "
        "compute_mse compute_r_squared compute_rmse get_mse_states",
    },
    "torchrec.metrics.ndcg": {_ORDER: "NDCGComputation NDCGMetric NUM_SESSIONS REQUIRED_INPUTS SESSION_KEY SUM_NDCG"},
    "torchrec.metrics.ne": {
        _SUMS: "NEMetric NEMetricComputation compute_cross_entropy compute_logloss compute_ne get_ne_states",
    },
    "torchrec.metrics.precision": {
        _SUMS: "PrecisionMetric PrecisionMetricComputation THRESHOLD compute_precision get_precision_states",
    },
    "torchrec.metrics.rec_metric": {
        f"{_ROOM}.rec_metric": "MAX_BUFFER_COUNT MetricComputationReport RecMetric RecMetricComputation "
        "RecMetricException RecMetricList WindowBuffer",
    },
    "torchrec.metrics.recall": {
        _SUMS: "RecallMetric RecallMetricComputation THRESHOLD compute_recall get_recall_states",
    },
    "torchrec.metrics.recall_session": {
        _ORDER: "NUM_FALSE_NEGATIVE NUM_TRUE_POS RecallSessionMetric RecallSessionMetricComputation "
        "ranking_within_session",
    },
    "torchrec.metrics.throughput": {f"{_ROOM}.throughput": "MAX_WINDOW_TS ThroughputMetric"},
    "torchrec.metrics.weighted_avg": {_SUMS: "WeightedAvgMetric WeightedAvgMetricComputation get_mean"},
    "torchrec.metrics.xauc": {
        _SUMS: "ERROR_SUM WEIGHTED_NUM_PAIRS XAUCMetric XAUCMetricComputation compute_xauc get_xauc_states",
    },
}
