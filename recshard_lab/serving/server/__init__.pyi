# The names of this package, with their types; `__init__.py` loads each when it is first used.

from .client import Client as Client
from .client import ServeError as ServeError
from .config import ServerConfig as ServerConfig
from .load_test import LoadTest as LoadTest
from .load_test import load_test as load_test
from .running import Server as Server
from .running import serve as serve
