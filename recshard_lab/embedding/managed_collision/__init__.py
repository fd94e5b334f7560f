"""Tables of fixed size for ids of any value: a module in front of the lookup gives rows to ids. TorchRec's names.

In walking order: `policies` ranks ids, `modules` keeps which id owns each row, `zero_collision` gives rows as long as
there are any, `collections` does this before a lookup and makes a row new when its owner changes. `kernel` does both
on the ranks of a sharded collection.
"""

from ...lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
