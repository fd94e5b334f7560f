"""Optimizers that run inside backward, on the rows that a batch touched; and their dense equals.

Read first: `rules`: the formulas, what runs them and what selects them.
"""

from recshard_lab.embedding.optimizers.dense import LAMB as LAMB
from recshard_lab.embedding.optimizers.dense import LarsSGD as LarsSGD
from recshard_lab.embedding.optimizers.dense import PartialRowWiseAdam as PartialRowWiseAdam
from recshard_lab.embedding.optimizers.dense import PartialRowWiseLAMB as PartialRowWiseLAMB
from recshard_lab.embedding.optimizers.dense import RowWiseAdagrad as RowWiseAdagrad
from recshard_lab.embedding.optimizers.dense import spec_from_optimizer as spec_from_optimizer
from recshard_lab.embedding.optimizers.dense import spec_of_parameter as spec_of_parameter
from recshard_lab.embedding.optimizers.rules import EmbOptimType as EmbOptimType
from recshard_lab.embedding.optimizers.rules import OptimizerSpec as OptimizerSpec
from recshard_lab.embedding.optimizers.rules import RowDims as RowDims
from recshard_lab.embedding.optimizers.rules import WeightDecayMode as WeightDecayMode
from recshard_lab.embedding.optimizers.rules import accumulate_dtype as accumulate_dtype
from recshard_lab.embedding.optimizers.rules import add_rows_ as add_rows_
from recshard_lab.embedding.optimizers.rules import optim_type as optim_type
from recshard_lab.embedding.optimizers.rules import step as step
