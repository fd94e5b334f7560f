"""``torchrec.modules.feature_processor``, the older processors, and the helpers of ``feature_processor_``.

Shape letters: N ids, L longest bag.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from recshard_lab.models import PositionWeightedModuleCollection
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor


class BaseFeatureProcessor(nn.Module):
    """Base of processors that take and return features by name. Override ``forward``.

    >>> class Twice(BaseFeatureProcessor):
    ...     def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    ...         return {name: JaggedTensor(2 * own.values(), lengths=own.lengths()) for name, own in features.items()}
    >>> Twice()({"f": JaggedTensor(torch.tensor([3]), lengths=torch.tensor([1]))})["f"].values()
    tensor([6])
    """

    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Features by name -> features by name."""
        raise NotImplementedError(f"{type(self).__name__} has no forward. Fix: override forward(features)")


class BaseGroupedFeatureProcessor(nn.Module):
    """Base of processors that take and return a KeyedJaggedTensor. Override ``forward``.

    >>> isinstance(PositionWeightedProcessor({"f": 2}), BaseGroupedFeatureProcessor)
    True
    """

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Features -> features."""
        raise NotImplementedError(f"{type(self).__name__} has no forward. Fix: override forward(features)")


class _PositionWeights(nn.Module):
    """The weights of both processors."""

    def __init__(self, max_feature_lengths: Mapping[str, int], device: torch.device | None = None) -> None:
        super().__init__()
        made = PositionWeightedModuleCollection(max_feature_lengths, device)
        self.max_feature_lengths, self.position_weights = made.max_feature_lengths, made.position_weights


class PositionWeightedModule(_PositionWeights, BaseFeatureProcessor):
    """One learned weight for each place in a bag, for features by name. Features without weights do not change.

    Args:
        max_feature_lengths: feature -> L.
        device: of the weights.

    Raises:
        ValueError: no feature, or a length below 1.

    >>> bags = {"f": JaggedTensor(torch.tensor([7, 3, 9]), lengths=torch.tensor([2, 1]))}
    >>> PositionWeightedModule({"f": 2})(bags)["f"].weights().tolist()
    [1.0, 1.0, 1.0]
    """

    def reset_parameters(self) -> None:
        """Sets all weights to one."""
        self.position_weights.reset_parameters()

    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Features by name -> the same, with weights ``[N]`` where there are learned ones.

        Raises:
            KeyError: a feature with learned weights is missing.
        """
        weighted = {}
        for name, weight in self.position_weights.items():
            own = features[name]
            places = offsets_to_range_traceble(own.offsets(), own.values())
            weighted[name] = JaggedTensor(own.values(), lengths=own.lengths(), weights=weight[places])
        return position_weighted_module_update_features(features, weighted)


class PositionWeightedProcessor(_PositionWeights, BaseGroupedFeatureProcessor):
    """One learned weight for each place in a bag. The result has only the features with learned weights.

    Args:
        max_feature_lengths: feature -> L.
        device: of the weights.

    Raises:
        ValueError: no feature, or a length below 1.

    >>> kjt = KeyedJaggedTensor(["f", "g"], torch.tensor([7, 3, 9]), lengths=torch.tensor([2, 1]))
    >>> PositionWeightedProcessor({"f": 2})(kjt).keys()
    ['f']
    """

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Ids -> the ids of features with learned weights, weighted. A batch without such features does not change."""
        bags = {key: own for key, own in features.to_dict().items() if key in self.position_weights}
        if not bags:
            return features
        weights = [
            self.position_weights[key][offsets_to_range_traceble(own.offsets(), own.values())]
            for key, own in bags.items()
        ]
        return KeyedJaggedTensor(
            list(bags),
            torch.cat([own.values() for own in bags.values()]),
            torch.cat(weights),
            torch.cat([own.lengths() for own in bags.values()]),
        )


def offsets_to_range_traceble(offsets: Tensor, values: Tensor) -> Tensor:
    """Each value's place in its bag ``[N]``.

    >>> offsets_to_range_traceble(torch.tensor([0, 2, 2, 5]), torch.zeros(5)).tolist()
    [0, 1, 0, 1, 2]
    """
    count = values.shape[0]
    lengths = offsets[1:] - offsets[:-1]
    starts = torch.repeat_interleave(offsets[:-1], lengths, output_size=count)
    return torch.arange(count, device=values.device) - starts


def position_weighted_module_update_features(
    features: dict[str, JaggedTensor], weighted_features: dict[str, JaggedTensor]
) -> dict[str, JaggedTensor]:
    """Replaces features by their weighted ones, in place. Returns `features`.

    >>> old, new = (JaggedTensor(torch.tensor([n]), lengths=torch.tensor([1])) for n in (1, 2))
    >>> position_weighted_module_update_features({"f": old}, {"f": new})["f"].values()
    tensor([2])
    """
    features.update(weighted_features)
    return features


def get_weights_list(
    cat_seq: Tensor, features: KeyedJaggedTensor, position_weights: Mapping[str, nn.Parameter]
) -> Tensor:
    """The weight of each id ``[N]``: that of its place, or 1 for features without learned weights.

    Args:
        cat_seq: each id's place in its bag ``[N]``.
        features: the ids.
        position_weights: feature -> learned weights ``[L]``.

    >>> kjt = KeyedJaggedTensor(["f", "g"], torch.tensor([7, 3, 9]), lengths=torch.tensor([2, 1]))
    >>> get_weights_list(torch.tensor([0, 1, 0]), kjt, {"f": nn.Parameter(torch.tensor([5.0, 6.0]))}).tolist()
    [5.0, 6.0, 1.0]
    """
    parts = []
    for key, places in zip(features.keys(), cat_seq.split(features.length_per_key()), strict=True):
        weight = position_weights.get(key)
        parts.append(torch.ones(len(places), device=cat_seq.device) if weight is None else weight[places])
    return torch.cat(parts)


def get_stride_per_key_per_rank(kjt: KeyedJaggedTensor) -> list[list[int]] | None:
    """The batch sizes of each key of a variable batch; None for other batches.

    >>> get_stride_per_key_per_rank(KeyedJaggedTensor(["f"], torch.tensor([7]), lengths=torch.tensor([1])))
    """
    return kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else None
