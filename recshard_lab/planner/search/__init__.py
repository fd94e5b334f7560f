"""The search: chooses one placement per table.

Read `options.py` (the proposals of one table), `candidates.py` (the ranks that each may go to), `problem.py` and
`state.py` (plans in progress), `greedy.py` (the search), `moves.py` and `anneal.py` (its steps), `bounds.py` (lower
bounds; of few tables `enumeration.py`), then `exact.py` (a MILP).
"""
