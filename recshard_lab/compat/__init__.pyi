# The names of this package, with their types; `__init__.py` loads each when it is first used.

from .checkpoints import state_dict_from_torchrec as state_dict_from_torchrec
from .checkpoints import state_dict_to_torchrec as state_dict_to_torchrec
from .checkpoints import torchrec_parameter_names as torchrec_parameter_names
from .coverage_table import ModuleCoverage as ModuleCoverage
from .coverage_table import coverage as coverage
from .coverage_table import report as report
from .difference_list import Difference as Difference
from .difference_list import Differences as Differences
from .difference_list import differences as differences
from .plans import from_torchrec as from_torchrec
from .plans import to_torchrec as to_torchrec
from .port import Finding as Finding
from .port import PortReport as PortReport
from .port import read_script as read_script
from .torchrec import install as install
from .torchrec import installed as installed
from .torchrec import translated as translated
from .torchrec import uninstall as uninstall
