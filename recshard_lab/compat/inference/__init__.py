"""``torchrec.inference``: predict modules, quantizing and sharding a model, state dicts; see `modules`."""
