"""``torchrec.metrics``."""

_ROOM = "compat.metrics"
_ORDER, _SUMS, _MEANS = f"{_ROOM}.order", f"{_ROOM}.sums", f"{_ROOM}.means"
_CLASSES, _CURVES, _ENTROPIES = f"{_ROOM}.classes", f"{_ROOM}.curves", f"{_ROOM}.entropies"

SERVED: dict[str, dict[str, str]] = {
    "torchrec.metrics": {},
    "torchrec.metrics.accuracy": {
        _SUMS: "AccuracyMetric AccuracyMetricComputation THRESHOLD compute_accuracy get_accuracy_states",
    },
    "torchrec.metrics.auc": {
        _ORDER: "AUCMetric AUCMetricComputation GROUPING_KEYS LABELS PREDICTIONS REQUIRED_INPUTS WEIGHTS compute_auc "
        "compute_auc_per_group",
    },
    "torchrec.metrics.auprc": {
        _CURVES: "AUPRCMetric AUPRCMetricComputation compute_auprc compute_auprc_per_group",
        _ORDER: "GROUPING_KEYS LABELS PREDICTIONS REQUIRED_INPUTS WEIGHTS",
    },
    "torchrec.metrics.average": {
        _MEANS: "AverageMetric AverageMetricComputation",
        _SUMS: "LABEL_SUM PREDICTION_SUM WEIGHTED_NUM_SAMPLES",
    },
    "torchrec.metrics.cali_free_ne": {
        _ENTROPIES: "CaliFreeNEMetric CaliFreeNEMetricComputation",
        _SUMS: "compute_cross_entropy",
    },
    "torchrec.metrics.calibration": {
        _SUMS: "CALIBRATION_DENOM CALIBRATION_NUM CalibrationMetric CalibrationMetricComputation compute_calibration "
        "get_calibration_states",
    },
    "torchrec.metrics.calibration_with_recalibration": {
        _ENTROPIES: "RecalibratedCalibrationMetric RecalibratedCalibrationMetricComputation",
        _SUMS: "CALIBRATION_DENOM CALIBRATION_NUM",
    },
    "torchrec.metrics.ctr": {
        _SUMS: "CTRMetric CTRMetricComputation CTR_DENOM CTR_NUM compute_ctr get_ctr_states",
    },
    "torchrec.metrics.gauc": {
        _ORDER: "GAUCMetric GAUCMetricComputation compute_gauc_3d compute_window_auc get_auc_states to_3d",
    },
    "torchrec.metrics.hindsight_target_pr": {
        _CLASSES: "HindsightTargetPRMetric HindsightTargetPRMetricComputation TARGET_PRECISION THRESHOLD_GRANULARITY",
        _SUMS: "compute_precision compute_recall",
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
    "torchrec.metrics.multi_label_precision": {
        _CLASSES: "MultiLabelPrecisionMetric MultiLabelPrecisionMetricComputation"
    },
    "torchrec.metrics.multiclass_recall": {_CLASSES: "MulticlassRecallMetric MulticlassRecallMetricComputation"},
    "torchrec.metrics.ndcg": {_ORDER: "NDCGComputation NDCGMetric NUM_SESSIONS REQUIRED_INPUTS SESSION_KEY SUM_NDCG"},
    "torchrec.metrics.ne": {
        _SUMS: "NEMetric NEMetricComputation compute_cross_entropy compute_logloss compute_ne get_ne_states",
    },
    "torchrec.metrics.ne_positive": {_ENTROPIES: "NEPositiveMetric NEPositiveMetricComputation"},
    "torchrec.metrics.ne_with_recalibration": {_ENTROPIES: "RecalibratedNEMetric RecalibratedNEMetricComputation"},
    "torchrec.metrics.nmse": {
        _MEANS: "CONST_PRED_ERROR_SUM NMSEMetric NMSEMetricComputation",
        _SUMS: "ERROR_SUM WEIGHTED_NUM_SAMPLES",
    },
    "torchrec.metrics.num_missing_labels": {_MEANS: "NumMissingLabelsMetric NumMissingLabelsMetricComputation"},
    "torchrec.metrics.num_positive_samples": {_MEANS: "NumPositiveSamplesMetric NumPositiveSamplesMetricComputation"},
    "torchrec.metrics.output": {_MEANS: "OutputMetric OutputMetricComputation"},
    "torchrec.metrics.precision": {
        _SUMS: "PrecisionMetric PrecisionMetricComputation THRESHOLD compute_precision get_precision_states",
    },
    "torchrec.metrics.precision_session": {
        _ORDER: "NUM_FALSE_POS NUM_TRUE_POS PrecisionSessionMetric PrecisionSessionMetricComputation"
    },
    "torchrec.metrics.rauc": {
        _CURVES: "RAUCMetric RAUCMetricComputation compute_rauc compute_rauc_per_group",
        _ORDER: "GROUPING_KEYS LABELS PREDICTIONS REQUIRED_INPUTS WEIGHTS",
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
    "torchrec.metrics.scalar": {_MEANS: "ScalarMetric ScalarMetricComputation"},
    "torchrec.metrics.segmented_ne": {
        _ENTROPIES: "GroupingKeyConfig SegmentedNEMetric SegmentedNEMetricComputation",
        _SUMS: "compute_cross_entropy compute_logloss",
    },
    "torchrec.metrics.serving_calibration": {
        _ENTROPIES: "NUM_EXAMPLES ServingCalibrationMetric ServingCalibrationMetricComputation",
        _SUMS: "CALIBRATION_DENOM CALIBRATION_NUM",
    },
    "torchrec.metrics.serving_ne": {_ENTROPIES: "NUM_EXAMPLES ServingNEMetric ServingNEMetricComputation"},
    "torchrec.metrics.sum_weights": {_MEANS: "SumWeightsMetric SumWeightsMetricComputation"},
    "torchrec.metrics.tensor_weighted_avg": {
        _MEANS: "TensorWeightedAvgMetric TensorWeightedAvgMetricComputation",
        _SUMS: "get_mean",
    },
    "torchrec.metrics.throughput": {f"{_ROOM}.throughput": "MAX_WINDOW_TS ThroughputMetric"},
    "torchrec.metrics.tower_qps": {
        f"{_ROOM}.tower_qps": "NUM_EXAMPLES TIME_LAPSE TowerQPSMetric TowerQPSMetricComputation WARMUP_EXAMPLES "
        "WARMUP_STEPS"
    },
    "torchrec.metrics.unweighted_ne": {
        _ENTROPIES: "UnweightedNEMetric UnweightedNEMetricComputation",
        _SUMS: "compute_cross_entropy compute_ne",
    },
    "torchrec.metrics.weighted_avg": {_SUMS: "WeightedAvgMetric WeightedAvgMetricComputation get_mean"},
    "torchrec.metrics.weighted_sum_predictions": {
        _MEANS: "WeightedSumPredictionsMetric WeightedSumPredictionsMetricComputation"
    },
    "torchrec.metrics.xauc": {
        _SUMS: "ERROR_SUM WEIGHTED_NUM_PAIRS XAUCMetric XAUCMetricComputation compute_xauc get_xauc_states",
    },
}
