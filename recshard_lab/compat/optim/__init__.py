"""Adapters for ``torchrec.optim``."""
