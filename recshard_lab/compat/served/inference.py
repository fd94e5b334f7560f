"""``torchrec.inference``."""

SERVED: dict[str, dict[str, str]] = {}
