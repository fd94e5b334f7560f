"""A model and a server that run while the notebook looks at them.

- `on_ranks.py`, `live_model.py`: functions on the ranks, and the notebook's side
- `watch.py`, `samples.py`: counters on the ranks, and how the notebook reads them
- `row_cache.py`: a simulated cache
- `ranks_gone.py`: ranks that ended
- `serving.py`: the server of a notebook
"""
