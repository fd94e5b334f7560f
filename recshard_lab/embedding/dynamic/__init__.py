"""Tables whose rows are created when an id occurs first, and reused when the id's score is low.

In walking order: `config` says what a table is, `index` finds the slot of an id and decides which id loses its slot
(`index_loops` on CPU, `index_rounds` in torch operators), `admission` decides which ids get a row, and computes it,
`table` keeps the rows, `outside_stores` keeps rows without a slot in slower memories, `collections` looks batches up
and trains, `row_files` writes tables to folders, and `vocabulary` copies them to static tables.
"""

from ...lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
