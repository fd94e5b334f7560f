"""Recipes: all settings of a training run besides its data and its plan.

How MOVIELENS_100K was chosen: the split's *training* part was split again (7/8 to train on, 1/8 to validate; for the
split by time the latest part), and widths, learning rates, batch size, initial weights, pooling, weight decay, epochs
and averaging were compared by the validation AUC, averaged over two to ten draws, each with its own initial weights.
Averaging the weights and a smaller top MLP improved it most: 0.7745 on four draws, against 0.7702 for the last weights
of a (256, 256) top MLP at half the learning rates. A fifth epoch validates no better on random splits and worse on
those by time. Then the dense learning rate was halved to 0.002, for steadiness: relative changes of 1e-6 in the initial
weights (rounding does as much under another plan) moved the test AUC by up to 3.4e-4 before and 2.3e-4 after.
Seed 0 is a default, not a choice. The test parts, by the seed of the initial weights:

    seed               0       1       2       3       4
    random split  0.7799  0.7788  0.7760  0.7797  0.7782    mean 0.7785
    split by time 0.7031  0.7047  0.7022  0.7048  0.7035    mean 0.7036
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from recshard_lab.data import RatingsDataset
from recshard_lab.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    PoolingType,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
)
from recshard_lab.models import DLRM
from recshard_lab.train.averaging import WeightAverage
from recshard_lab.train.loop import Step, TrainResult, train_epochs


@dataclass(frozen=True)
class Recipe:
    """A DLRM and its training, the same under every plan and on any number of ranks.

    Args:
        embedding_dim: D of every table.
        over_arch_layer_sizes: of the top MLP.
        init_max: tables start uniform in (-init_max, init_max).
        table_learning_rate: of the tables' row-wise Adagrad, fused into backward.
        dense_learning_rate: of Adam, for everything else.
        epochs: passes over the training data.
        batch_size: of all ranks together.
        average_decay: of the `WeightAverage` over the steps, whose weights the model has after training. None: the last
            step's weights.
        seed: of the initial weights and the order of samples.

    >>> from recshard_lab.data import SyntheticRatings
    >>> data = SyntheticRatings(1000, num_users=50, num_movies=80)
    >>> recipe = Recipe(over_arch_layer_sizes=(8, 1), epochs=2, batch_size=256)
    >>> len(recipe.train(recipe.model(data), data).losses)
    8
    """

    embedding_dim: int = 16
    over_arch_layer_sizes: tuple[int, ...] = (128, 64, 1)
    init_max: float = 0.02
    table_learning_rate: float = 0.1
    dense_learning_rate: float = 0.002
    epochs: int = 4
    batch_size: int = 512
    average_decay: float | None = 0.995
    seed: int = 0

    def tables(self, dataset: RatingsDataset) -> list[EmbeddingBagConfig]:
        """One table per feature, named after it. Bags are averaged: many genres weigh as much as one."""
        return [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=dataset.features[name],
                embedding_dim=self.embedding_dim,
                feature_names=[name],
                pooling=PoolingType.MEAN,
                weight_init_min=-self.init_max,
                weight_init_max=self.init_max,
            )
            for name in dataset.feature_names
        ]

    def model(self, dataset: RatingsDataset) -> DLRM:
        """The unsharded model, its tables marked for row-wise Adagrad in backward. Every call returns equal weights."""
        dense = dataset.num_dense_features
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = DLRM(
                EmbeddingBagCollection(self.tables(dataset)),
                dense_in_features=dense,
                dense_arch_layer_sizes=[64, self.embedding_dim] if dense else [],
                over_arch_layer_sizes=self.over_arch_layer_sizes,
            )
        apply_optimizer_in_backward(
            RowWiseAdagrad, model.embedding_bag_collection.parameters(), {"lr": self.table_learning_rate}
        )
        return model

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Adam for the parameters that backward does not update, of the unsharded or the sharded model."""
        return torch.optim.Adam(dense_parameters(model), lr=self.dense_learning_rate)

    def train(
        self, model: nn.Module, dataset: RatingsDataset, on_step: Callable[[Step], object] | None = None
    ) -> TrainResult:
        """Trains the model, sharded or not, as the recipe says.

        During training, `on_step` sees the weights of the optimizers. At the end, the averages replace them.
        """
        average = None if self.average_decay is None else WeightAverage(model, self.average_decay)

        def after_step(step: Step) -> None:
            if average is not None:
                average.update()
            if on_step is not None:
                on_step(step)

        result = train_epochs(
            model,
            dataset,
            self.dense_optimizer(model),
            epochs=self.epochs,
            batch_size=self.batch_size,
            seed=self.seed,
            on_step=after_step,
        )
        if average is not None:
            average.copy_to_model()
        return result


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that an ordinary optimizer updates: those without an optimizer in backward."""
    of_sharded: Callable[[], list[nn.Parameter]] | None = getattr(model, "dense_parameters", None)
    if of_sharded is not None:
        return of_sharded()
    return [p for p in model.parameters() if not getattr(p, "_optimizer_classes", None)]


MOVIELENS_100K = Recipe()
