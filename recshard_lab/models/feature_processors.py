"""Feature processors: what is made of ids before they are looked up, with weights that are learned.

The one there is gives each id a weight by its place in its bag: the first click of a history counts otherwise than the
tenth. Weights start as ones, which changes nothing.

    ids of a bag          [7, 3, 9]
    learned, by place     [w0, w1, w2, w3, ...]          pooled = w0 row7 + w1 row3 + w2 row9

Names, arguments and state dicts as in TorchRec. A processor is dense: every rank has it whole, and its gradient comes
home from wherever the rows lie.

Shape letters: N ids, L longest bag.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor


class FeatureProcessor(nn.Module, ABC):
    """Makes one feature's weights: a JaggedTensor in, the same ids with weights out."""

    @abstractmethod
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Ids ``[N]`` -> the same with weights ``[N]``."""


class FeatureProcessorsCollection(nn.Module, ABC):
    """Makes the weights of several features: a KeyedJaggedTensor in, the same ids with weights out."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Ids ``[N]`` -> the same with weights ``[N]``."""


class _Ones(nn.ParameterDict):
    """Weights by name, which can be set to ones again once they have left ``meta``."""

    def reset_parameters(self) -> None:
        for weight in self.values():
            if not weight.is_meta:
                nn.init.ones_(weight)


@names_wrong_arguments
class PositionWeightedModule(FeatureProcessor):
    """One learned weight for each place in a bag.

    Args:
        max_feature_length: L; no bag may be longer.
        device: where the weights live.

    Raises:
        ValueError: a length below 1.

    >>> bags = JaggedTensor(torch.tensor([7, 3, 9]), lengths=torch.tensor([2, 0, 1]))
    >>> PositionWeightedModule(4)(bags).weights().tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(self, max_feature_length: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.position_weight = nn.Parameter(torch.empty(_length(max_feature_length), device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones, which change nothing."""
        if not self.position_weight.is_meta:
            nn.init.ones_(self.position_weight)

    @names_wrong_arguments
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Ids ``[N]`` -> the same with weights ``[N]``.

        Raises:
            ValueError: a bag longer than L.
        """
        count = features.values().shape[0]
        places = _places(features.lengths(), count, len(self.position_weight), "")
        weights = self.position_weight.index_select(0, places)
        return JaggedTensor._unchecked(features.values(), weights, features.lengths())


@names_wrong_arguments
class PositionWeightedModuleCollection(FeatureProcessorsCollection):
    """`PositionWeightedModule` for each of some features; ids of others have weight 1.

    Args:
        max_feature_lengths: feature -> L.
        device: where the weights live.

    Raises:
        ValueError: no feature, or a length below 1.

    >>> kjt = KeyedJaggedTensor(["f", "g"], torch.tensor([7, 3, 9]), lengths=torch.tensor([2, 1]))
    >>> PositionWeightedModuleCollection({"f": 4})(kjt).weights().tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(self, max_feature_lengths: Mapping[str, int], device: torch.device | str | None = None) -> None:
        super().__init__()
        if not max_feature_lengths:
            raise ValueError("max_feature_lengths is empty: name a feature and its longest bag")
        self.max_feature_lengths = {name: _length(longest, name) for name, longest in max_feature_lengths.items()}
        self.position_weights = _Ones(
            {
                name: nn.Parameter(torch.empty(longest, device=device))
                for name, longest in self.max_feature_lengths.items()
            }
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones, which change nothing."""
        self.position_weights.reset_parameters()

    @names_wrong_arguments
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Ids ``[N]`` -> the same with weights ``[N]``.

        Raises:
            ValueError: a feature is missing, or has a bag longer than its L.
        """
        missing = sorted(set(self.max_feature_lengths) - set(features.keys()))
        if missing:
            raise ValueError(f"features {missing} have a processor and are not in the batch: {features.keys()}")
        ends, bags = features.offset_per_key(), features.lengths_offset_per_key()
        lengths = features.lengths().reshape(-1)
        parts = []
        for number, key in enumerate(features.keys()):
            if key in self.max_feature_lengths:
                own = lengths[bags[number] : bags[number + 1]]
                count = ends[number + 1] - ends[number]
                places = _places(own, count, self.max_feature_lengths[key], key)
                parts.append(self.position_weights[key].index_select(0, places))
            else:
                parts.append(torch.ones(ends[number + 1] - ends[number], device=features.device()))
        return with_weights(features, torch.cat(parts))


class PositionWeightedProcessor(PositionWeightedModuleCollection):
    """TorchRec's older name of the same."""


class FeatureProcessorDictWrapper(FeatureProcessorsCollection):
    """One processor a feature; ids of features without one have weight 1.

    Args:
        feature_processors: feature -> its processor.
    """

    def __init__(self, feature_processors: nn.ModuleDict) -> None:
        super().__init__()
        self._feature_processors = feature_processors

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        parts = []
        for key, bags in features.to_dict().items():
            if key in self._feature_processors:
                parts.append(self._feature_processors[key](bags).weights())
            else:
                parts.append(torch.ones(bags.values().shape[0], device=features.device()))
        return with_weights(features, torch.cat(parts))


@names_wrong_arguments
class FeatureProcessedEmbeddingBagCollection(nn.Module):
    """An `EmbeddingBagCollection` behind feature processors.

    Sharding finds the collection inside, at ``_embedding_bag_collection``.

    Args:
        embedding_bag_collection: built with ``is_weighted=True``.
        feature_processors: feature -> processor, or a collection of them.

    Raises:
        ValueError: a collection that does not read weights, or processors of features that it does not read.

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
            raise ValueError("feature processors make weights: build the collection with is_weighted=True")
        tables = embedding_bag_collection.embedding_bag_configs()
        read = {feature for table in tables for feature in table.feature_names}
        self._embedding_bag_collection = embedding_bag_collection
        self._feature_processors: FeatureProcessorsCollection
        if isinstance(feature_processors, FeatureProcessorsCollection):
            self._feature_processors = feature_processors
        else:
            strange = sorted(set(feature_processors) - read)
            if strange:
                raise ValueError(f"there are processors for {strange}, and the tables read {sorted(read)}")
            self._feature_processors = FeatureProcessorDictWrapper(nn.ModuleDict(dict(feature_processors)))

    @names_wrong_arguments
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """ids of B samples -> pooled rows ``[B, sum of D]``, each row times its weight"""
        pooled: KeyedTensor = self._embedding_bag_collection(self._feature_processors(features))
        return pooled

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables: models that take a collection take this in its place."""
        return self._embedding_bag_collection.embedding_bag_configs()


def with_weights(features: KeyedJaggedTensor, weights: Tensor) -> KeyedJaggedTensor:
    """The same bags with these weights ``[N]``."""
    variable, inverse = features.variable_stride_per_key(), features.inverse_indices_or_none()
    return KeyedJaggedTensor._unchecked(
        features.keys(),
        features.values(),
        weights,
        features.lengths(),
        stride=features.stride(),
        length_per_key=features.length_per_key(),
        strides=features.stride_per_key_per_rank() if variable else None,
        inverse=None if inverse is None else inverse[1],
        inverse_keys=None if inverse is None else inverse[0],
    )


def _length(longest: int, feature: str = "") -> int:
    if isinstance(longest, bool) or not isinstance(longest, int) or not 1 <= longest < 1 << 40:
        of = f" of feature {feature!r}" if feature else ""
        raise ValueError(f"the longest bag{of} must be an integer from 1, got {longest!r}")
    return longest


def _places(lengths: Tensor, count: int, longest: int, feature: str) -> Tensor:
    """``[N]``: each id's place in its bag, from 0; ``count`` is N."""
    if not torch.compiler.is_compiling() and lengths.numel() and int(lengths.max()) > longest:
        bag = int((lengths > longest).nonzero()[0])
        of = f"feature {feature!r}: " if feature else ""
        raise ValueError(
            f"{of}bag {bag} has {int(lengths[bag])} ids, and there are weights for {longest} places: cut the bag, or "
            f"build the processor for longer ones"
        )
    starts = lengths.cumsum(0) - lengths
    place = torch.arange(count, device=lengths.device)
    return place - torch.repeat_interleave(starts, lengths, output_size=count)
