"""A server process and its sockets: every path, every refusal, and what the process is left with."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from recshard_lab.serving.server import Client, ServeError, Server, ServerConfig, serve
from recshard_lab.serving.server.config import TOKEN_VARIABLE
from recshard_lab.serving.server.connections import MAX_HEAD_BYTES
from tests.patience import wait_until
from tests.serving.server.stub import LOADER, batch, request, write
from tests.serving.server.traffic import connect, post, raw, read_answer

GOOD = json.dumps(request()).encode()
EMPTY = {"dense": {"age": [0] * 51, "price": [0] * 51}, "sparse": {"movie": [[]] * 51, "user": [[]] * 51}}
MANY = json.dumps(EMPTY).encode()


def log_lines(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log_path.read_text().splitlines()]


@pytest.mark.gate
def test_both_formats_are_answered_on_one_connection(server: Server) -> None:
    with server.client() as client:
        assert client.predict(**request(5, 7)) == {"probability": [12.0]}
        two = batch(5, samples=2)
        assert client.predict_batch(two)["probability"].tolist() == [5, 5]
        assert client.predict(
            dense={"age": [1, 2], "price": [0, 0.5]}, sparse={"movie": [[1], []], "user": [[], [3]]}
        ) == {"probability": [2.0, 5.5]}
        json_of_tensors = {"Content-Type": "application/json", "Accept": "application/x-safetensors"}
        assert client.request("POST", "/v1/predict", GOOD, json_of_tensors)[8:9] == b"{"


@pytest.mark.parametrize(
    ("content", "status", "reason"),
    [
        (post(b"{"), 400, "malformed_json"),
        (post(b"[" * 40_000), 400, "malformed_json"),
        (post(b"x" * 64, "application/x-safetensors"), 400, "malformed_safetensors"),
        (post(GOOD, ""), 415, "unsupported_content_type"),
        (post(GOOD, "text/html"), 415, "unsupported_content_type"),
        (post(GOOD, "application/json", "Content-Encoding: gzip"), 415, "unsupported_encoding"),
        (post(GOOD, "application/json", "X-Timeout-Ms: soon"), 400, "invalid_header"),
        (post(GOOD.replace(b"5", b"1000")), 422, "invalid_input"),
        (post(GOOD.replace(b"5", b"13")), 500, "model_failed"),
        (post(b" " * 60_000), 413, "body_too_large"),
        (post(MANY), 413, "too_many_samples"),
        (post(GOOD, path="/v1/nothing"), 404, "not_found"),
        (post(GOOD, path="/healthz"), 405, "method_not_allowed"),
        (b"GET /v1/predict HTTP/1.1\r\nHost: test\r\n\r\n", 405, "method_not_allowed"),
        (post(b"", path="/v1/reload"), 401, "token_required"),
        (b"nonsense\r\n\r\n", 400, "malformed_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9, 400, "malformed_http"),
        (b"POST /v1/predict HTTP/1.1\r\nHost: t\r\nContent-Length: -1\r\n\r\n", 400, "malformed_http"),
        (b"POST /\xff\xfe HTTP/1.1\r\nHost: t\r\n\r\n", 400, "malformed_http"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * (4 * MAX_HEAD_BYTES) + b"\r\n\r\n", 431, "headers_too_large"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_refusal_has_a_status_and_the_same_shape(
    server: Server, content: bytes, status: int, reason: str
) -> None:
    got, headers, body = raw(server.address, content)
    assert (got, headers["content-type"]) == (status, "application/json")
    error = json.loads(body)["error"]
    assert set(error) == {"status", "reason", "message", "field", "position", "request_id"}
    assert (error["status"], error["reason"]) == (status, reason)
    assert "Fix: " in error["message"]
    assert error["request_id"] == headers.get("x-request-id")
    assert server.client().predict(**request()) == {"probability": [12.0]}


def test_a_chunked_body_is_read_and_bounded(server: Server) -> None:
    head = (
        b"POST /v1/predict HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    assert raw(server.address, head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD))[0] == 200
    endless = b"".join(b"2000\r\n" + b" " * 0x2000 + b"\r\n" for _ in range(8))
    assert raw(server.address, head + endless + b"0\r\n\r\n")[0] == 413


def test_a_declared_body_that_is_far_too_large_is_refused_before_it_is_sent(server: Server) -> None:
    for more in ("Content-Length: 99999999999", "Content-Length: 60000\r\nExpect: 100-continue"):
        content = f"POST /v1/predict HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n{more}\r\n\r\n"
        status, headers, _ = raw(server.address, content.encode())
        assert (status, headers["connection"]) == (413, "close")


@pytest.mark.parametrize("sent", [b"", b"POST /v1/predict HT", post(GOOD)[:-5]], ids=["nothing", "head", "body"])
def test_a_slow_request_is_refused_and_its_connection_closed(server: Server, sent: bytes) -> None:
    with connect(server.address) as sock:
        sock.sendall(sent)
        status, _, body = read_answer(sock)
        assert status == 408
        assert json.loads(body)["error"]["reason"] == "slow_request"
        assert sock.recv(1) == b""


def test_what_the_model_expects_is_told_with_an_example_that_works(server: Server) -> None:
    with server.client() as client:
        model = client.model()
        assert model["version"] == "v1"
        assert model["inputs"]["sparse"][0] == {"name": "movie", "rows": 1000, "weighted": False}
        assert set(client.predict(**model["example"])) == set(model["outputs"])
        schema = json.loads(client.request("GET", "/openapi.json"))
        parts = schema["components"]["schemas"]
        jsonschema.validate(model["example"], parts["Request"])
        jsonschema.validate(json.loads(raw(server.address, post(b"{"))[2]), parts["Error"])
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(request(1000), parts["Request"])
        assert json.loads(client.request("GET", "/healthz")) == {"status": "alive"}
        assert json.loads(client.request("GET", "/readyz")) == {"status": "ready", "version": "v1"}


def test_metrics_count_answers_by_status_and_leave_nothing_behind(server: Server) -> None:
    with server.client() as client:
        before = client.metrics()
        for _ in range(3):
            client.predict(**request())
        raw(server.address, post(b"{"))
        after = client.metrics()
    for status, count in (("200", 3), ("400", 1)):
        name = f'recshard_requests_total{{status="{status}"}}'
        assert after[name] - before.get(name, 0) == count
    assert after["recshard_request_seconds_count"] - before["recshard_request_seconds_count"] == 3
    assert (after["recshard_queue_requests"], after["recshard_buffered_bytes"]) == (0, 0)
    assert after['recshard_version{version="v1"}'] == 1


def test_the_log_is_json_lines_with_request_ids_and_without_bodies(server: Server) -> None:
    secret = b'{"dense": "private-words"}'
    _, headers, _ = raw(server.address, post(secret, "application/json", "X-Request-ID: mine-1"))
    assert headers["x-request-id"] == "mine-1"
    _, headers, _ = raw(server.address, post(secret, "application/json", "X-Request-ID: bad id {}"))
    assert " " not in headers["x-request-id"]
    wait_until(lambda: any(line.get("id") == "mine-1" for line in log_lines(server)))
    line = next(line for line in log_lines(server) if line.get("id") == "mine-1")
    assert (line["status"], line["reason"], line["bytes"]) == (422, "invalid_input", len(secret))
    assert "private-words" not in server.log_path.read_text()


@pytest.mark.gate
@pytest.mark.usefixtures("real_start")
def test_a_token_guards_all_but_health_and_page(folder: Path) -> None:
    with serve(folder, token="s3cret", loader=LOADER, watch_s=0, drain_s=0) as server:
        for token in (None, "", "s3cre", "s3crets", "S3CRET"):
            client = Client(server.address, token)
            for call in (lambda c=client: c.predict(**request()), client.metrics, client.model, client.reload):
                with pytest.raises(ServeError) as caught:
                    call()
                assert caught.value.status == 401
            client.close()
        with server.client() as client:
            assert client.predict(**request()) == {"probability": [12.0]}
            assert client.reload() == "v1"
        for path in ("/", "/healthz", "/readyz"):
            assert raw(server.address, f"GET {path} HTTP/1.1\r\nHost: t\r\n\r\n".encode())[0] == 200
        assert raw(server.address, b"GET /metrics HTTP/1.1\r\nHost: t\r\n\r\n")[1]["www-authenticate"] == "Bearer"
        assert "s3cret" not in " ".join(psutil.Process(server.pid).cmdline()) + server.log_path.read_text()


def test_connections_are_bounded_and_so_are_all_bodies_together(folder: Path) -> None:
    options = {"max_connections": 20, "max_body_mb": 1.0, "max_buffered_mb": 2.0}
    with serve(folder, loader=LOADER, watch_s=0, drain_s=0, **options) as server:
        held = [connect(server.address) for _ in range(3)]
        with server.client() as client:
            for number, sock in enumerate(held[:2]):  # the last byte is missing
                sock.sendall(post(b" " * 900_000)[:-1])
                sent = 899_999 * (number + 1)
                wait_until(lambda sent=sent: client.metrics()["recshard_buffered_bytes"] == sent)
            held[2].sendall(post(b" " * 900_000)[:-1])  # three do not fit
            assert read_answer(held[2])[0] == 503
        for sock in held:
            sock.close()
        wait_until(lambda: server.client().metrics()["recshard_buffered_bytes"] == 0)
        held = [connect(server.address) for _ in range(20)]
        status, headers, body = raw(server.address, post(GOOD))
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["reason"] == "too_many_connections"
        for sock in held:
            sock.close()
        wait_until(lambda: raw(server.address, post(GOOD))[0] == 200)


@pytest.mark.gate
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(tmp_path: Path, number: signal.Signals) -> None:
    write(tmp_path, "v1", sleep_s=0.4)
    with serve(tmp_path, loader=LOADER, watch_s=0, drain_s=0.3) as server, connect(server.address) as sock:
        sock.sendall(post(GOOD))
        wait_until(lambda: server.client().metrics()["recshard_connections"] >= 1)
        os.kill(server.pid, number)
        wait_until(lambda: raw(server.address, b"GET /readyz HTTP/1.1\r\nHost: t\r\n\r\n")[0] == 503)
        status, headers, _ = raw(server.address, post(GOOD))  # still answered, on a connection that ends
        assert (status, headers["connection"]) == (200, "close")
        assert read_answer(sock)[0] == 200
        log = server.log_path
        wait_until(lambda: not server.is_running())
        events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
        assert [event for event in events if event in ("draining", "stopped")] == ["draining", "stopped"]
        assert server.stop() == 0


@pytest.mark.nightly
def test_a_server_ends_with_the_process_that_started_it(folder: Path) -> None:
    code = (
        "import os, sys\n"
        "from recshard_lab.serving.server import serve\n"
        f"server = serve({str(folder)!r}, loader={LOADER!r}, watch_s=0, drain_s=0)\n"
        "print(server.pid, server.log_path, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pid, log = done.stdout.split()
    wait_until(lambda: not psutil.pid_exists(int(pid)))
    Path(log).unlink()


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    folder = write(tmp_path / "good", "v1")
    with pytest.raises(RuntimeError, match="contains no bundle"):
        serve(tmp_path, loader=LOADER)
    write(tmp_path / "all", "v1", broken=True)
    with pytest.raises(RuntimeError, match="this version is broken"):
        serve(tmp_path / "all", loader=LOADER)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="Fix: pass another --port"):
        serve(folder, taken.getsockname()[1], loader=LOADER)


def test_options_are_checked_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for options, words in (
        ({"workers": 0}, "workers=0 is less than 1"),
        ({"port": 70_000}, "port=70000 is more than 65535"),
        ({"timeout_s": float("nan")}, "timeout_s=nan is less"),
        ({"max_buffered_mb": 1.0}, "max_buffered_mb=1.0 is less than max_body_mb"),
        ({"log_level": "loud"}, "log_level='loud' is not a level"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            ServerConfig("m", **options)
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ValueError, match="is empty: every request would pass"):
        ServerConfig("m", token_file=str(tmp_path / "token")).token()
    (tmp_path / "token").write_text("abc\n")
    assert ServerConfig("m", token_file=str(tmp_path / "token")).token() == "abc"
    monkeypatch.setenv(TOKEN_VARIABLE, "xyz")
    assert ServerConfig("m").token() == "xyz"
    assert "xyz" not in ServerConfig("m").as_json()
    loopback = [ServerConfig("m", host=host).is_loopback for host in ("::1", "127.0.0.2", "localhost", "0.0.0.0")]
    assert loopback == [True, True, True, False]
