"""Scores of test samples from a sharded model, all ranks' samples together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recshard_lab.comm import ShardingEnv, all_reduce
from recshard_lab.data import Batch, BatchLoader, SampleSource
from recshard_lab.data.ratings import rank_slice
from recshard_lab.data.source import SamplePart
from recshard_lab.train.job.config import EvaluationSection
from recshard_lab.train.metrics import auc, calibration, log_loss, normalized_entropy
from recshard_lab.train.pipelines import EvalPipelineSparseDist


@torch.no_grad()
def score_samples(
    model: nn.Module,
    forward: Callable[[Batch], Any],
    optimizer: torch.optim.Optimizer,
    source: SampleSource,
    batch_size: int,
    env: ShardingEnv,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels ``[n]`` of every sample, in the source's order, on every rank. All ranks must call it.

    Args:
        forward: a batch -> ``(loss, (logits [b], labels [b], loss, samples of all ranks))`` of the model.
        optimizer: of its dense part; it is not called.
    """
    training = model.training
    model.eval()
    both = torch.zeros(2, len(source), device=device)  # every rank writes its samples; the sum is exact
    done = 0
    batches = iter(BatchLoader(source, batch_size, env.rank, env.world_size))
    # an unreadable sample of one rank raises on all ranks
    with EvalPipelineSparseDist(model, optimizer, device, custom_model_fwd=forward) as pipeline:
        for _ in range(-(-len(source) // batch_size)):
            logits, labels, _, size = pipeline.progress(batches)
            begin, end = rank_slice(size, env.rank, env.world_size)
            both[:, done + begin : done + end] = torch.stack([logits.float(), labels])
            done += size
    model.train(training)
    found = all_reduce(both, env, "train/scores").cpu()
    return found[0], found[1]


def evaluated(
    model: nn.Module,
    forward: Callable[[Batch], Any],
    optimizer: torch.optim.Optimizer,
    source: SampleSource,
    section: EvaluationSection,
    env: ShardingEnv,
    device: torch.device,
) -> dict[str, float]:
    """AUC, log loss, normalised entropy and calibration of a source's (first) samples; NaN if undefined.

    Raises:
        ValueError: a score that is not finite: the model diverged.
        StageError: samples that a rank cannot read.
    """
    if section.max_samples is not None and section.max_samples < len(source):
        source = SamplePart(source, 0, section.max_samples)
    if not len(source):
        return {}
    scores, labels = score_samples(model, forward, optimizer, source, section.batch_size, env, device)
    found = {"samples": float(len(labels)), "log_loss": log_loss(scores, labels)}
    both = 0 < float(labels.sum()) < len(labels)
    found["auc"] = auc(scores, labels) if both else math.nan
    found["normalized_entropy"] = normalized_entropy(scores, labels) if both else math.nan
    found["calibration"] = calibration(scores, labels) if both else math.nan
    return found
