"""Dumps of tables: everything, or the rows that changed since an earlier dump.

In walking order: `files` (what a dump's folder contains), `write`, `read`, `collection` (one process), and for ranks
`distributed.state.dumps`.
"""

from recshard_lab.embedding.dynamic.dumps.files import Dumped as Dumped
from recshard_lab.embedding.dynamic.dumps.files import DumpError as DumpError
from recshard_lab.embedding.dynamic.dumps.files import Restored as Restored
