"""Jagged batches: which ids each sample has of each feature, and what is looked up for them.

In walking order::

    ops.py                   offsets from lengths, and segments in another order
    jagged_tensor.py         JaggedTensor: the bags of one feature
    keyed_jagged_tensor.py   KeyedJaggedTensor: the bags of several features for one batch of samples
    keyed_tensor.py          KeyedTensor: pooled rows, with columns by feature
    checks.py                checks of batches, whose errors name the feature and the sample
    text.py                  batches as text
    interop.py               TorchRec's interfaces of batches in a pipeline
    trees.py                 torch.fx traces code that builds these objects
"""

from ..lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
