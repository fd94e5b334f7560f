"""Adapters for ``torchrec.modules``, where names, defaults or arguments differ from this library's."""
