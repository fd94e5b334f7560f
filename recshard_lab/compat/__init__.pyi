# The names of this package, with their types; `__init__.py` loads each when it is first used.

from .coverage_table import ModuleCoverage as ModuleCoverage
from .coverage_table import coverage as coverage
from .coverage_table import report as report
from .difference_list import Difference as Difference
from .difference_list import Differences as Differences
from .difference_list import differences as differences
from .plans import from_torchrec as from_torchrec
from .plans import to_torchrec as to_torchrec
from .torchrec import install as install
from .torchrec import installed as installed
from .torchrec import translated as translated
from .torchrec import uninstall as uninstall
