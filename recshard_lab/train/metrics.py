"""How good click predictions are. n samples; scores are logits unless it says otherwise."""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from recshard_lab.arguments import checks_arguments


def _checked(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if scores.is_meta or labels.is_meta:
        raise ValueError("scores and labels on the meta device have no values")
    scores, labels = scores.detach().flatten(), labels.detach().flatten()
    if len(scores) != len(labels) or not len(scores):
        raise ValueError(f"need as many scores as labels, at least one; got {len(scores)} and {len(labels)}")
    if not bool(torch.isfinite(scores).all()):
        bad = int((~torch.isfinite(scores)).nonzero()[0])
        raise ValueError(f"score number {bad} is {float(scores[bad])}: the model diverged")
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise ValueError("labels must be 0 or 1")
    return scores.double(), labels.double()


@checks_arguments
def auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve: the chance that a click scores above a non-click, ties counting half.

    Args:
        scores: ``[n]`` or ``[n, 1]``, any numbers; only their order counts.
        labels: ``[n]``, 0 or 1.

    Raises:
        ValueError: sizes that differ, scores that are not finite, labels of one class only.

    >>> auc(torch.tensor([0.9, 0.4, 0.6, 0.1]), torch.tensor([1, 1, 0, 0]))
    0.75
    """
    from torchmetrics.functional.classification import binary_auroc

    scores, labels = _checked(scores, labels)
    if not 0 < float(labels.sum()) < len(labels):
        raise ValueError(f"AUC needs clicks and non-clicks, all {len(labels)} labels are {int(labels[0])}")
    # torchmetrics squashes scores outside [0, 1] through a sigmoid, which ties large ones: hand it their ranks
    place = torch.unique(scores, return_inverse=True)[1]
    return float(binary_auroc(place.double() / max(1, int(place.max())), labels.int(), validate_args=False))


@checks_arguments
def log_loss(scores: Tensor, labels: Tensor) -> float:
    """Mean cross entropy of logits ``[n]`` against labels ``[n]``, in nats.

    >>> round(log_loss(torch.zeros(2), torch.tensor([0., 1.])), 4)
    0.6931
    """
    return float(binary_cross_entropy_with_logits(*_checked(scores, labels)))


@checks_arguments
def normalized_entropy(scores: Tensor, labels: Tensor) -> float:
    """Log loss over that of always predicting the click rate: below 1 is better than knowing only the rate.

    He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at Facebook", section 3.

    >>> round(normalized_entropy(torch.zeros(4), torch.tensor([0., 1., 0., 1.])), 6)
    1.0
    """
    loss = log_loss(scores, labels)
    rate = labels.double().mean()
    if not 0.0 < float(rate) < 1.0:
        raise ValueError("normalized entropy needs clicks and non-clicks")
    return loss / float(-(rate * rate.log() + (1 - rate) * (1 - rate).log()))
