"""Metrics under TorchRec's names: states that are saved, reduced over ranks and measured, and refused settings."""

import pytest
import torch

from recshard_lab.compat.metrics.config import DefaultTaskInfo, MetricsConfig, RecMetricDef, RecMetricEnum
from recshard_lab.compat.metrics.module import RecMetricModule, generate_metric_module
from recshard_lab.compat.metrics.order import AUCMetric
from recshard_lab.compat.metrics.rec_metric import RecMetricComputation, RecMetricException
from recshard_lab.compat.metrics.sums import NEMetric, NEMetricComputation

SAMPLES = {
    "predictions": {"DefaultTask": torch.tensor([0.9, 0.4, 0.6, 0.1])},
    "labels": {"DefaultTask": torch.tensor([1.0, 1.0, 0.0, 0.0])},
    "weights": None,
}


def test_a_loaded_state_continues_the_lifetime() -> None:
    first, second = (NEMetric(1, 0, 4, [DefaultTaskInfo], window_size=8) for _ in range(2))
    for metric in (first, first, second):
        metric.update(**SAMPLES)
    second.load_state_dict(first.state_dict())
    key = "ne-DefaultTask|lifetime_ne"
    assert torch.equal(second.compute()[key], first.compute()[key])


def test_memory_counts_states_and_windows() -> None:
    metric = AUCMetric(1, 0, 4, [DefaultTaskInfo], window_size=8)
    metric.update(**SAMPLES)
    assert sum(metric.get_memory_usage().values()) == 3 * 4 * 4  # three fp32 columns of four samples


def test_a_state_has_a_known_reduction_and_lists_have_no_window() -> None:
    computation = NEMetricComputation(0, 4, 1, 8)
    with pytest.raises(RecMetricException, match="dist_reduce_fx 'median' is unknown"):
        computation._add_state("more", torch.zeros(1), False, dist_reduce_fx="median")
    with pytest.raises(RecMetricException, match="'more' is a list, which has no window"):
        computation._add_state("more", [], True)
    with pytest.raises(TypeError, match="abstract"):
        RecMetricComputation(0, 4, 1, 8)  # type: ignore[abstract]


def test_a_name_without_a_metric_is_named() -> None:
    config = MetricsConfig([DefaultTaskInfo], {RecMetricEnum.SERVING_AE_LOSS: RecMetricDef([DefaultTaskInfo])})
    with pytest.raises(
        KeyError, match=r"metric serving_ae_loss has no class, as in TorchRec 1\.8\. Fix: use one of ne, ne_pos"
    ):
        generate_metric_module(RecMetricModule, config, 4, 1, 0, {}, torch.device("cpu"))
