"""``recshard serve``: parses the options. `serving.server` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recshard_lab.cli.options import size_option

_BATCHES, _LIMITS, _PROCESS = "Batches", "Limits", "Processes"


def serve(
    path: Annotated[Path, typer.Argument(help="A bundle, or a folder of bundles: the newest by name is served.")],
    host: Annotated[str, typer.Option(help="Address to listen on. Default: only this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on. 0: a free one.")] = 8500,
    workers: Annotated[int, typer.Option(help="Processes. A killed one is restarted.", rich_help_panel=_PROCESS)] = 1,
    max_batch: Annotated[int, typer.Option(help="Samples of one call of the model.", rich_help_panel=_BATCHES)] = 256,
    delay_ms: Annotated[
        float, typer.Option(help="How long a request waits for others.", rich_help_panel=_BATCHES)
    ] = 0.0,
    queue: Annotated[int, typer.Option(help="Requests that may wait. More get 503.", rich_help_panel=_LIMITS)] = 1024,
    timeout_s: Annotated[float, typer.Option(help="Deadline of one request: 504.", rich_help_panel=_LIMITS)] = 10.0,
    read_timeout_s: Annotated[
        float, typer.Option(help="Time to send one request: 408.", rich_help_panel=_LIMITS)
    ] = 10.0,
    max_body_mb: Annotated[float, size_option("MB", "Size of one body: 413.", _LIMITS)] = 8.0,
    max_buffered_mb: Annotated[float, size_option("MB", "Size of all bodies in memory: 503.", _LIMITS)] = 256.0,
    max_samples: Annotated[int, typer.Option(help="Samples of one request: 413.", rich_help_panel=_LIMITS)] = 4096,
    max_ids: Annotated[int, typer.Option(help="Ids of one request: 413.", rich_help_panel=_LIMITS)] = 1_000_000,
    max_connections: Annotated[
        int, typer.Option(help="Open connections of a process: 503.", rich_help_panel=_LIMITS)
    ] = 1024,
    model_threads: Annotated[int, typer.Option(help="Threads that call the model.", rich_help_panel=_PROCESS)] = 1,
    torch_threads: Annotated[int, typer.Option(help="Threads of one torch operator.", rich_help_panel=_PROCESS)] = 1,
    drain_s: Annotated[
        float, typer.Option(help="Time between SIGTERM and the end of listening.", rich_help_panel=_PROCESS)
    ] = 0.5,
    watch_s: Annotated[
        float, typer.Option(help="Time between two looks for a new version. 0: never.", rich_help_panel=_PROCESS)
    ] = 5.0,
    token_file: Annotated[
        Path | None, typer.Option(help="File with a bearer token. Default: the variable RECSHARD_SERVE_TOKEN.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="info logs each request, warning only refusals and errors.")] = "info",
) -> None:
    """Serve an exported model over HTTP: JSON, tensors, dynamic batching, metrics and a web page."""
    from recshard_lab.serving.server.config import ServerConfig

    config = ServerConfig(
        str(path),
        host=host,
        port=port,
        workers=workers,
        max_batch=max_batch,
        delay_ms=delay_ms,
        queue=queue,
        timeout_s=timeout_s,
        read_timeout_s=read_timeout_s,
        max_body_mb=max_body_mb,
        max_buffered_mb=max_buffered_mb,
        max_samples=max_samples,
        max_ids=max_ids,
        max_connections=max_connections,
        model_threads=model_threads,
        torch_threads=torch_threads,
        drain_s=drain_s,
        watch_s=watch_s,
        token_file=None if token_file is None else str(token_file),
        log_level=log_level,
    )
    from recshard_lab.serving.server.versions import find_versions

    find_versions(path)
    config.token()
    from recshard_lab.serving.server.process import listen, run_process
    from recshard_lab.serving.server.workers import supervise

    sock = listen(config)
    raise typer.Exit(supervise(config, sock) if workers > 1 else run_process(config, sock))
