"""``torchrec.fx`` and others for tracing."""

SERVED: dict[str, dict[str, str]] = {}
