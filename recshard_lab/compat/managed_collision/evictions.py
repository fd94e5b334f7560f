"""``torchrec.modules.hash_mc_evictions``: until when ids keep their rows, in hours since 1970.

`HashZchManagedCollisionModule` computes the same itself; these are for modules of yours.

Shape letters: N ids.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from recshard_lab.embedding import HashZchEvictionConfig, HashZchEvictionPolicyName
from recshard_lab.sparse import JaggedTensor

_HOUR = 3600


def _now() -> int:
    return int(time.time() / _HOUR)


class HashZchEvictionScorer:
    """The base of scorers; has no scores.

    Args:
        config: the settings.
    """

    def __init__(self, config: HashZchEvictionConfig) -> None:
        self._config = config

    def gen_score(self, feature: JaggedTensor, device: torch.device) -> Tensor:
        """The hour until which each id keeps its row, int32 ``[N]``.

        Args:
            feature: the ids. Its weights, if any, are the number of ids of each feature of the table.
            device: of the result.
        """
        return torch.empty(0, device=device)

    def gen_threshold(self) -> int:
        """The current hour: ids with lower scores lose their rows. -1 without scores."""
        return -1


class HashZchSingleTtlScorer(HashZchEvictionScorer):
    """The same hours for all ids."""

    def gen_score(self, feature: JaggedTensor, device: torch.device) -> Tensor:
        """The current hour plus ``single_ttl``.

        Raises:
            AssertionError: ``single_ttl`` is missing.
        """
        if self._config.single_ttl is None or self._config.single_ttl <= 0:
            raise AssertionError("eviction by one time needs HashZchEvictionConfig(single_ttl=)")
        score = _now() + self._config.single_ttl
        return torch.full_like(feature.values(), score, dtype=torch.int32, device=device)

    def gen_threshold(self) -> int:
        """The current hour."""
        return _now()


class HashZchPerFeatureTtlScorer(HashZchEvictionScorer):
    """Hours of each feature.

    Raises:
        AssertionError: not one time for each feature.
    """

    def __init__(self, config: HashZchEvictionConfig) -> None:
        super().__init__(config)
        times = config.per_feature_ttl
        if times is None or len(times) != len(config.features):
            raise AssertionError("eviction by feature needs one time for each feature, in per_feature_ttl")
        self._times = torch.tensor(times, dtype=torch.int32)

    def gen_score(self, feature: JaggedTensor, device: torch.device) -> Tensor:
        """The current hour plus the hours of the feature of each id.

        Raises:
            AssertionError: ids whose features are unknown, or times that are not above 0.
        """
        counts = feature.weights_or_none()
        if counts is None:
            raise AssertionError("the ids of each feature are not counted. Fix: put their numbers into the weights")
        hours = self._times.to(device).repeat_interleave(counts.to(device).long())
        return hours + torch.tensor(_now(), dtype=torch.int32, device=device)

    def gen_threshold(self) -> int:
        """The current hour."""
        return _now()


def get_kernel_from_policy(policy_name: HashZchEvictionPolicyName | None) -> int:
    """TorchRec's number of the kernel of a policy: 1 for the least recently used, 0 for times and without a policy."""
    return 1 if policy_name is HashZchEvictionPolicyName.LRU_EVICTION else 0


def get_eviction_scorer(policy_name: HashZchEvictionPolicyName, config: HashZchEvictionConfig) -> HashZchEvictionScorer:
    """The scorer of a policy: by feature, or one time.

    Raises:
        AssertionError: as of the scorer.
    """
    by_feature = policy_name is HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION
    return HashZchPerFeatureTtlScorer(config) if by_feature else HashZchSingleTtlScorer(config)


class HashZchThresholdEvictionModule(nn.Module):
    """Scores and threshold of a policy.

    Args:
        policy_name: the policy.
        config: its settings.

    >>> config = HashZchEvictionConfig(features=["f"], single_ttl=24)
    >>> module = HashZchThresholdEvictionModule(HashZchEvictionPolicyName.SINGLE_TTL_EVICTION, config)
    >>> ids = JaggedTensor(torch.tensor([5, 6]), lengths=torch.tensor([2]))
    >>> scores, threshold = module(ids, torch.device("cpu"))
    >>> (scores - threshold).tolist()
    [24, 24]
    """

    def __init__(self, policy_name: HashZchEvictionPolicyName, config: HashZchEvictionConfig) -> None:
        super().__init__()
        self._scorer = get_eviction_scorer(policy_name, config)

    def forward(self, feature: JaggedTensor, device: torch.device) -> tuple[Tensor, int]:
        """The scores of ids, int32 ``[N]``, and the current hour."""
        return self._scorer.gen_score(feature, device), self._scorer.gen_threshold()


class HashZchOptEvictionModule(nn.Module):
    """A policy without scores.

    Args:
        policy_name: the policy.
    """

    def __init__(self, policy_name: HashZchEvictionPolicyName) -> None:
        super().__init__()
        self._policy_name = policy_name

    def forward(self, feature: JaggedTensor, device: torch.device) -> tuple[None, int]:
        """None and -1."""
        return None, -1


def get_eviction_module(policy_name: HashZchEvictionPolicyName, config: HashZchEvictionConfig | None) -> nn.Module:
    """The module of a policy.

    Raises:
        AssertionError: the settings are missing, or as of the scorer.
    """
    if config is None:
        raise AssertionError(f"policy {policy_name.value} needs a HashZchEvictionConfig")
    return HashZchThresholdEvictionModule(policy_name, config)


class HashZchEvictionModule(nn.Module):
    """Scores and threshold of a policy, on one device.

    Args:
        policy_name: the policy.
        device: of the scores.
        config: the settings of the policy.

    Raises:
        AssertionError: as of `get_eviction_module`.
    """

    def __init__(
        self, policy_name: HashZchEvictionPolicyName, device: torch.device, config: HashZchEvictionConfig | None
    ) -> None:
        super().__init__()
        self._device = device
        self._eviction_module = get_eviction_module(policy_name, config)

    def forward(self, feature: JaggedTensor) -> tuple[Tensor | None, int]:
        """The scores of ids, int32 ``[N]``, and the current hour."""
        found: tuple[Tensor | None, int] = self._eviction_module(feature, self._device)
        return found
