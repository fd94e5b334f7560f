"""Recommendation models as published. Their code does not depend on sharding.

In walking order::

    layers.py               dense building blocks
    crossnet.py             cross networks: layers that multiply features
    feature_processors.py   learned weights of ids, applied before the lookup
    dlrm.py                 DLRM
    deepfm.py               DeepFM
    two_tower.py            two towers for retrieval
    sasrec.py               SASRec: the next item of a sequence
    registry.py             models by name, with their settings and losses
"""

from ..lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
