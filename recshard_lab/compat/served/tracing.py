"""``torchrec.fx`` and others for tracing."""

SERVED: dict[str, dict[str, str]] = {
    "torchrec.fx": {"compat.tracer": "Tracer symbolic_trace"},
    "torchrec.fx.tracer": {"compat.tracer": "Tracer is_fx_tracing symbolic_trace"},
    "torchrec.fx.utils": {"compat.tracer": "assert_fx_safe fx_marker is_marker_node"},
}
