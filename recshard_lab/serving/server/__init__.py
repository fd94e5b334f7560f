"""The server: ``recshard serve``, `serve` and `Client`.

In walking order: `config` (options), `errors` (refusals), `bodies` (bytes to batches), `versions` (the model and its
swap), `batcher` (the queue), `app` (paths), `connections` (limits of HTTP), `process` (one process), `workers`
(several), `spawn` and `running` (a server from Python), `client`.

Importing this room loads no web framework; a server does.
"""

from ...lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
