"""The log: a pipe whose reader is slow or gone does not block the server, and secrets are not in it."""

import fcntl
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recshard_lab.serving.server import Client, ServerConfig, log, serve
from recshard_lab.serving.server.process import address_of, listen
from recshard_lab.serving.server.spawn import start_with_lifeline
from tests.serving.server.stub import LOADER, request
from tests.serving.server.traffic import connect, post, raw, read_answer

TOKEN = "s3cret-of-a-client"
USER = 98_765_432_101_234


@contextmanager
def stderr_on_a_pipe() -> Iterator[int]:
    """The reading end of a pipe of 4,096 bytes that is stderr."""
    theirs, ours = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(theirs, False)
    with pytest.MonkeyPatch.context() as patch, os.fdopen(ours, "w") as stderr:
        patch.setattr(sys, "stderr", stderr)
        yield theirs
    os.close(theirs)


def test_lines_that_do_not_fit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "BUFFER", 6000)
    with stderr_on_a_pipe() as pipe:
        lines = log.Log("info")
        for number in range(300):
            lines.info("request", number=number)
        found = os.read(pipe, 4096)
        for number in range(300, 304):
            lines.info("request", number=number)
            found += os.read(pipe, 4096)
        lines.close()
        found += os.read(pipe, 4096)
    events = [json.loads(line) for line in found.splitlines()]
    kept = [event["number"] for event in events if event["event"] == "request"]
    (dropped,) = [event["lines"] for event in events if event["event"] == "lines_dropped"]
    assert kept == sorted(kept)
    assert 50 < len(kept) < 300
    assert len(kept) + dropped == 304
    assert kept[-1] == 303


@pytest.mark.gate
@pytest.mark.usefixtures("real_start")
def test_a_log_that_is_not_read_blocks_no_request_and_no_end(folder: Path) -> None:
    config = ServerConfig(str(folder), port=0, loader=LOADER, watch_s=0, drain_s=0)
    theirs, ours = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(theirs, "rb") as reader, os.fdopen(ours, "wb") as stderr, listen(config) as sock:
        address = address_of(sock)
        process, lifeline = start_with_lifeline(config, sock, in_group=False, stderr=stderr)
        try:
            stderr.close()
            while not Client(address).is_ready():
                assert process.poll() is None
            body = post(json.dumps(request()).encode())
            with connect(address) as one:
                for _ in range(100):  # 14 kB of lines
                    one.sendall(body)
                    assert read_answer(one)[0] == 200
                reader.close()
                for _ in range(20):
                    one.sendall(body)
                    assert read_answer(one)[0] == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            os.close(lifeline)
            process.kill()
            process.wait()


@pytest.mark.gate
def test_tokens_and_inputs_are_not_in_the_log(folder: Path) -> None:
    with serve(folder, token=TOKEN, loader=LOADER, watch_s=0, drain_s=0) as server:
        body = json.dumps(request(user=USER)).encode()
        for header in (TOKEN, "wr0ng-secret"):
            given = f"Authorization: Bearer {header}"
            raw(server.address, post(body, "application/json", given))
            raw(server.address, post(body[:-5], "application/json", given))
            raw(server.address, post(body, "application/json", given, path=f"/v1/unknown?token={header}"))
            raw(server.address, post(body, "application/json", given, "Bad header"))
        failing = json.dumps(request(movie=13, user=USER)).encode()
        assert raw(server.address, post(failing, "application/json", f"Authorization: Bearer {TOKEN}"))[0] == 500
        metrics = server.client().request("GET", "/metrics").decode()
        lines = server.log_path.read_text()
    assert lines.count('"event":"request"') >= 8
    for secret in (TOKEN, "wr0ng-secret", str(USER)):
        assert secret not in lines + metrics
