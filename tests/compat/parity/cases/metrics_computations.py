"""The functions behind the metrics."""

from typing import Any

import torch
from torchrec.metrics.auc import AUCMetricComputation
from torchrec.metrics.ne import (
    NEMetricComputation,
)

from tests.compat.parity.case import case

M = "torchrec.metrics"
PREDICTIONS = torch.tensor([[0.9, 0.4, 0.6, 0.1, 0.0, 1.0], [0.5, 0.5, 0.2, 0.8, 1.0, 0.0]])
LABELS = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]])
WEIGHTS = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.5, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])


def reports(computation: Any, **more: Any) -> Any:
    """The reports of a computation of two tasks after two steps."""
    for predictions in (PREDICTIONS, PREDICTIONS.flip(0)):
        computation.update(predictions=predictions, labels=LABELS, weights=WEIGHTS, **more)
    found = [(str(one.name), str(one.metric_prefix), one.value, one.description) for one in computation.compute()]
    return sorted(found, key=lambda report: report[:2])


SETTINGS = {"my_rank": 0, "batch_size": 6, "n_tasks": 2, "window_size": 6}


@case(f"{M}.ne.NEMetricComputation")
def computation_of_normalized_entropy() -> Any:
    return [reports(NEMetricComputation(**SETTINGS)), reports(NEMetricComputation(**SETTINGS, include_logloss=True))]


@case(f"{M}.auc.AUCMetricComputation")
def computation_of_an_area() -> Any:
    groups = {"grouping_keys": torch.tensor([0, 0, 1, 1, 1, 0])}
    return [
        reports(AUCMetricComputation(**SETTINGS)),
        reports(AUCMetricComputation(**{**SETTINGS, "window_size": 12}, grouped_auc=True), required_inputs=groups)[0],
    ]
