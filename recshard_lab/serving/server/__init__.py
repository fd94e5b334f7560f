"""The server: ``recshard serve``, `serve` and `Client`.

In walking order: `config` (options), `errors` (refusals), `bodies` (bytes to batches), `versions` (the model and its
swap), `batcher` (the queue), `app` (paths), `connections` (limits of HTTP), `process` (one process), `workers`
(several), `spawn` and `running` (a server from Python), `client`.

Importing this room loads no web framework; a server does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recshard_lab.serving.server.client import Client as Client
    from recshard_lab.serving.server.client import ServeError as ServeError
    from recshard_lab.serving.server.config import ServerConfig as ServerConfig
    from recshard_lab.serving.server.running import Server as Server
    from recshard_lab.serving.server.running import serve as serve

__all__ = ["Client", "ServeError", "Server", "ServerConfig", "serve"]

_MODULE_OF = {
    "Client": "client",
    "ServeError": "client",
    "Server": "running",
    "ServerConfig": "config",
    "serve": "running",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
