# The names of this package, with their types; `__init__.py` loads each when it is first used.

from .plans import from_torchrec as from_torchrec
from .plans import to_torchrec as to_torchrec
from .torchrec import install as install
from .torchrec import installed as installed
from .torchrec import uninstall as uninstall
