"""Optimizers by parameter name: combined, warmed up, clipped, saved; and those that can run inside backward.

In walking order::

    keyed.py      optimizers whose state is named after the parameters
    combined.py   several keyed optimizers as one, and one inside another
    warmup.py     learning rates in stages
    clipping.py   gradients clipped before a step

The rules that run inside backward are in `recshard_lab.embedding.optimizers`.
"""

from torch.optim import SGD as SGD
from torch.optim import Adagrad as Adagrad
from torch.optim import Adam as Adam

from recshard_lab.embedding.fused import apply_optimizer_in_backward as apply_optimizer_in_backward
from recshard_lab.embedding.fused import in_backward_optimizer_filter as in_backward_optimizer_filter
from recshard_lab.embedding.optimizers import LAMB as LAMB
from recshard_lab.embedding.optimizers import LarsSGD as LarsSGD
from recshard_lab.embedding.optimizers import PartialRowWiseAdam as PartialRowWiseAdam
from recshard_lab.embedding.optimizers import PartialRowWiseLAMB as PartialRowWiseLAMB
from recshard_lab.embedding.optimizers import RowWiseAdagrad as RowWiseAdagrad
from recshard_lab.optim.clipping import GradientClipping as GradientClipping
from recshard_lab.optim.clipping import GradientClippingOptimizer as GradientClippingOptimizer
from recshard_lab.optim.combined import CombinedOptimizer as CombinedOptimizer
from recshard_lab.optim.combined import OptimizerWrapper as OptimizerWrapper
from recshard_lab.optim.keyed import EmptyFusedOptimizer as EmptyFusedOptimizer
from recshard_lab.optim.keyed import FusedCollectionOptimizer as FusedCollectionOptimizer
from recshard_lab.optim.keyed import FusedOptimizer as FusedOptimizer
from recshard_lab.optim.keyed import FusedOptimizerModule as FusedOptimizerModule
from recshard_lab.optim.keyed import KeyedOptimizer as KeyedOptimizer
from recshard_lab.optim.keyed import KeyedOptimizerWrapper as KeyedOptimizerWrapper
from recshard_lab.optim.warmup import WarmupOptimizer as WarmupOptimizer
from recshard_lab.optim.warmup import WarmupPolicy as WarmupPolicy
from recshard_lab.optim.warmup import WarmupStage as WarmupStage
