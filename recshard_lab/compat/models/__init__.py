"""Adapters for ``torchrec.models``: parameters have TorchRec's names, in its order."""
