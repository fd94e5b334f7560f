"""Feature processors: learned weights of ids, applied before the lookup.

`PositionWeightedModule` gives each id a weight by its place in its bag: the first click of a history may count more
than the tenth. Weights start as ones, which changes nothing.

    ids of a bag          [7, 3, 9]
    learned, by place     [w0, w1, w2, w3, ...]          pooled = w0 row7 + w1 row3 + w2 row9

Names, arguments and state dicts are those of TorchRec. A processor is dense: every rank has a replica. Its gradient
comes from the ranks that store the rows.

Shape letters: N ids, L longest bag.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.fx import wrap

from recshard_lab.arguments import device_named, names_wrong_arguments
from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor


class FeatureProcessor(nn.Module, ABC):
    """Computes the weights of one feature: takes a JaggedTensor, returns the same ids with weights."""

    @abstractmethod
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Ids ``[N]`` -> the same with weights ``[N]``."""


class FeatureProcessorsCollection(nn.Module, ABC):
    """Computes the weights of several features: takes a KeyedJaggedTensor, returns the same ids with weights."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Ids ``[N]`` -> the same with weights ``[N]``."""


class _ReadsPlaces(nn.Module):
    """A processor whose places may be computed ahead."""

    _pre_processed = False

    def pre_process_input(self, features: JaggedTensor | KeyedJaggedTensor) -> None:
        """Writes each id's place in its bag into its weight. Later forwards read places from the weights.

        Args:
            features: ids with weights ``[N]``, which are overwritten.
        """
        lengths, weights = features.lengths().reshape(-1), features.weights()
        with torch.no_grad():
            weights.copy_(_places(lengths, weights.shape[0], weights.shape[0], ""))
        self._pre_processed = True


class _Ones(nn.ParameterDict):
    """Weights by name. `reset_parameters` sets them to ones after they were moved from ``meta``."""

    def reset_parameters(self) -> None:
        for weight in self.values():
            if not weight.is_meta:
                nn.init.ones_(weight)


@names_wrong_arguments
class PositionWeightedModule(_ReadsPlaces, FeatureProcessor):
    """One learned weight for each place in a bag.

    Args:
        max_feature_length: L, the longest bag.
        device: of the weights.

    Raises:
        ValueError: a length below 1.

    >>> bags = JaggedTensor(torch.tensor([7, 3, 9]), lengths=torch.tensor([2, 0, 1]))
    >>> PositionWeightedModule(4)(bags).weights().tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(self, max_feature_length: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.position_weight = nn.Parameter(torch.empty(_length(max_feature_length), device=device_named(device)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets all weights to one, which changes nothing."""
        if not self.position_weight.is_meta:
            nn.init.ones_(self.position_weight)

    @names_wrong_arguments
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Ids ``[N]`` -> the same with weights ``[N]``.

        Raises:
            ValueError: a bag longer than L.
        """
        count = features.values().shape[0]
        if self._pre_processed:
            places = _places_in(features.weights(), self.position_weight.shape[0], "")
        else:
            places = _places(features.lengths(), count, self.position_weight.shape[0], "")
        weights = self.position_weight.index_select(0, places)
        return JaggedTensor._unchecked(features.values(), weights, features.lengths())


@names_wrong_arguments
class PositionWeightedModuleCollection(_ReadsPlaces, FeatureProcessorsCollection):
    """A `PositionWeightedModule` per feature. Ids of other features have weight 1.

    Args:
        max_feature_lengths: feature -> L.
        device: of the weights.

    Raises:
        ValueError: no feature, or a length below 1.

    >>> kjt = KeyedJaggedTensor(["f", "g"], torch.tensor([7, 3, 9]), lengths=torch.tensor([2, 1]))
    >>> PositionWeightedModuleCollection({"f": 4})(kjt).weights().tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(self, max_feature_lengths: Mapping[str, int], device: torch.device | str | None = None) -> None:
        super().__init__()
        device = device_named(device)
        if not max_feature_lengths:
            raise ValueError("max_feature_lengths is empty. Fix: pass {feature: length of its longest bag}")
        self.max_feature_lengths = {name: _length(longest, name) for name, longest in max_feature_lengths.items()}
        self.position_weights = _Ones(
            {
                name: nn.Parameter(torch.empty(longest, device=device))
                for name, longest in self.max_feature_lengths.items()
            }
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets all weights to one, which changes nothing."""
        self.position_weights.reset_parameters()

    @names_wrong_arguments
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Ids ``[N]`` -> the same with weights ``[N]``.

        Raises:
            ValueError: a feature is missing, or has a bag longer than its L.
        """
        weights = {key: self.position_weights[key] for key in self.max_feature_lengths}
        places = features.weights() if self._pre_processed else None
        return with_weights(features, _weights_by_place(features, weights, self.max_feature_lengths, places))

    def copy(self, device: torch.device | str) -> PositionWeightedModuleCollection:
        """This module, moved to a device. TorchRec's name of ``to``."""
        return self.to(device)


class PositionWeightedProcessor(PositionWeightedModuleCollection):
    """TorchRec's older name of `PositionWeightedModuleCollection`."""


class FeatureProcessorDictWrapper(FeatureProcessorsCollection):
    """One processor per feature. Ids of features without a processor have weight 1.

    Args:
        feature_processors: feature -> its processor.
    """

    def __init__(self, feature_processors: nn.ModuleDict) -> None:
        super().__init__()
        self._feature_processors = feature_processors

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Ids ``[N]`` -> the same with weights ``[N]``."""
        return apply_feature_processors_to_kjt(features, self._feature_processors)


def apply_feature_processors_to_kjt(
    features: KeyedJaggedTensor, feature_processors: Mapping[str, nn.Module] | nn.ModuleDict
) -> KeyedJaggedTensor:
    """The same bags with the weights ``[N]`` of one processor per feature. Ids of other features have weight 1.

    Args:
        features: the batch.
        feature_processors: feature -> its processor.

    >>> kjt = KeyedJaggedTensor(["f", "g"], torch.tensor([7, 3, 9]), lengths=torch.tensor([2, 1]))
    >>> apply_feature_processors_to_kjt(kjt, {"f": PositionWeightedModule(2)}).weights().tolist()
    [1.0, 1.0, 1.0]
    """
    weights = {key: processor(features[key]).weights() for key, processor in feature_processors.items()}
    return with_weights(features, _joined(features, weights))


@names_wrong_arguments
class FeatureProcessedEmbeddingBagCollection(nn.Module):
    """Feature processors, then an `EmbeddingBagCollection` that looks up their weighted ids.

    Sharding finds the collection at ``_embedding_bag_collection``.

    Args:
        embedding_bag_collection: built with ``is_weighted=True``.
        feature_processors: feature -> processor, or a collection of them.

    Raises:
        ValueError: the collection does not take weights, or a processor's feature is not one of its features.

    >>> from recshard_lab.embedding import EmbeddingBagConfig
    >>> table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    >>> ebc = EmbeddingBagCollection([table], is_weighted=True)
    >>> model = FeatureProcessedEmbeddingBagCollection(ebc, {"f": PositionWeightedModule(3)})
    >>> model(KeyedJaggedTensor(["f"], torch.tensor([7, 3]), lengths=torch.tensor([2]))).values().shape
    torch.Size([1, 4])
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        feature_processors: Mapping[str, FeatureProcessor] | FeatureProcessorsCollection,
    ) -> None:
        super().__init__()
        if not embedding_bag_collection.is_weighted():
            raise ValueError("the collection ignores weights. Fix: build it with is_weighted=True")
        tables = embedding_bag_collection.embedding_bag_configs()
        read = {feature for table in tables for feature in table.feature_names}
        self._embedding_bag_collection = embedding_bag_collection
        self._feature_processors: FeatureProcessorsCollection | nn.ModuleDict
        if isinstance(feature_processors, FeatureProcessorsCollection):
            self._feature_processors = feature_processors
        else:
            strange = sorted(set(feature_processors) - read)
            if strange:
                raise ValueError(
                    f"no table has the features {strange} of processors. Fix: use features of {sorted(read)}"
                )
            self._feature_processors = nn.ModuleDict(dict(feature_processors))

    @names_wrong_arguments
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """ids of B samples -> pooled rows ``[B, sum of D]``, each row times its weight"""
        processors = self._feature_processors
        if isinstance(processors, nn.ModuleDict):
            weighted = apply_feature_processors_to_kjt(features, processors)
        else:
            weighted = processors(features)
        pooled: KeyedTensor = self._embedding_bag_collection(weighted)
        return pooled

    def split(self) -> tuple[FeatureProcessorsCollection, EmbeddingBagCollection]:
        """The processors and the tables; both share their weights with this module."""
        processors = self._feature_processors
        if isinstance(processors, nn.ModuleDict):
            processors = FeatureProcessorDictWrapper(processors)
        return processors, self._embedding_bag_collection

    def is_weighted(self) -> bool:
        """True: the tables use the processors' weights."""
        return True

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables. Models accept this module in place of a collection."""
        return self._embedding_bag_collection.embedding_bag_configs()


@wrap  # one node in an fx graph
def _joined(features: KeyedJaggedTensor, weights: dict[str, Tensor]) -> Tensor:
    """``[N]``: the weights of each feature in the order of the batch; 1 for features without weights."""
    counts = zip(features.keys(), features.length_per_key(), strict=True)
    return torch.cat(
        [weights[k] if k in weights else torch.ones(count, device=features.device()) for k, count in counts]
    )


@wrap
def _weights_by_place(
    features: KeyedJaggedTensor, weights: dict[str, Tensor], longest: dict[str, int], places: Tensor | None = None
) -> Tensor:
    """``[N]``: the weight of each id's place in its bag; 1 for ids of features without weights.

    Args:
        features: the batch.
        weights: feature -> learned weights ``[L]``.
        longest: feature -> L.
        places: ``[N]``: each id's place. Default: computed from the lengths.
    """
    missing = sorted(set(weights) - set(features.keys()))
    if missing:
        raise ValueError(
            f"features {missing} have a processor and are not in the batch, which has {features.keys()}. Fix: add "
            f"them to the batch"
        )
    counts, bags = features.length_per_key(), features.lengths_offset_per_key()
    lengths = features.lengths().reshape(-1)
    known = [None] * len(counts) if places is None else places.split(counts)
    parts = []
    for number, key in enumerate(features.keys()):
        if key in weights:
            at = known[number]
            if at is None:
                own = _places(lengths[bags[number] : bags[number + 1]], counts[number], longest[key], key)
            else:
                own = _places_in(at, longest[key], key)
            parts.append(weights[key].index_select(0, own))
        else:
            parts.append(torch.ones(counts[number], device=features.device()))
    return torch.cat(parts)


@wrap
def with_weights(features: KeyedJaggedTensor, weights: Tensor) -> KeyedJaggedTensor:
    """The same bags with weights ``[N]``."""
    weighted = features._apply(lambda tensor: tensor)
    weighted._weights = weights
    return weighted


def _length(longest: int, feature: str = "") -> int:
    if isinstance(longest, bool) or not isinstance(longest, int) or not 1 <= longest < 1 << 40:
        of = f" of feature {feature!r}" if feature else ""
        raise ValueError(f"the longest bag{of} must be an integer from 1, got {longest!r}")
    return longest


@wrap
def _places_in(weights: Tensor, longest: int, feature: str) -> Tensor:
    """``[N]``: places that `pre_process_input` has written."""
    places = weights.long()
    if not torch.compiler.is_compiling() and places.numel() and not 0 <= int(places.max()) < longest:
        of = f"feature {feature!r}: " if feature else ""
        raise ValueError(
            f"{of}the batch's weights contain place {int(places.max())}, and the processor has weights for {longest} "
            f"places. Fix: call pre_process_input(batch) first, and build the processor for longer bags"
        )
    return places


@wrap
def _places(lengths: Tensor, count: int, longest: int, feature: str) -> Tensor:
    """``[N]``: each id's place in its bag, from 0; ``count`` is N."""
    if not torch.compiler.is_compiling() and lengths.numel() and int(lengths.max()) > longest:
        bag = int((lengths > longest).nonzero()[0])
        of = f"feature {feature!r}: " if feature else ""
        raise ValueError(
            f"{of}bag {bag} has {int(lengths[bag])} ids, and the processor has weights for {longest} places. Fix: "
            f"build the processor for {int(lengths[bag])} places, or shorten the bag"
        )
    starts = lengths.cumsum(0) - lengths
    place = torch.arange(count, device=lengths.device)
    return place - torch.repeat_interleave(starts, lengths, output_size=count)
