# The names of this package, with their types; `__init__.py` loads each when it is first used.

from .checks import UnknownKeyError as UnknownKeyError
from .interop import ComputeJTDictToKJT as ComputeJTDictToKJT
from .interop import ComputeKJTToJTDict as ComputeKJTToJTDict
from .interop import Multistreamable as Multistreamable
from .interop import Pipelineable as Pipelineable
from .interop import jt_is_equal as jt_is_equal
from .interop import kjt_is_equal as kjt_is_equal
from .jagged_tensor import JaggedTensor as JaggedTensor
from .jagged_tensor import record_stream as record_stream
from .keyed_jagged_tensor import KeyedJaggedTensor as KeyedJaggedTensor
from .keyed_jagged_tensor import validate_keyed_jagged_tensor as validate_keyed_jagged_tensor
from .keyed_tensor import KeyedTensor as KeyedTensor
from .keyed_tensor import regroup_kts as regroup_kts
from .ops import complete_cumsum as complete_cumsum
from .ops import gather_segments as gather_segments
