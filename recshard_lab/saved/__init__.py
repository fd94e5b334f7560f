"""Files of models, read without ranks. No file is trusted: reading never runs its code.

Files, in reading order::

    files.py      when a checkpoint folder is complete, and its errors
    reader.py     torch.distributed.checkpoint's reader, which executes nothing
    tensors.py    rectangles of a saved tensor
    sources.py    pretrained tables in any supported format
    model.py      SavedModel: the weights of a whole model, by rows

It imports nothing of ours, so that every room may read a file.
"""

from ..lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
