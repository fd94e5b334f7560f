# The names of this package, with their types; `__init__.py` loads each when it is first used.

from .files import CheckpointError as CheckpointError
from .model import SavedModel as SavedModel
from .sources import Source as Source
