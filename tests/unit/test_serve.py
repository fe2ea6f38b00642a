"""The server of a model: answers, limits, and requests that it refuses."""

import errno
import http.client
import io
import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import HANG, command, complaint, environment, raises
from PIL import Image
from sample_images import jpeg
from trained_model import CPU, colored, train_model

import paceline as pl
from paceline.api import serving
from paceline.api.serving import ModelServer
from paceline.data.classes import Class
from paceline.errors import UserError
from paceline.inference.classifier import Classifier, ModelMetadata
from paceline.system import http_server
from paceline.system.http_server import HttpServer
from paceline.system.logs import log
from paceline.system.multipart import first_file

COLORS = tuple(Class(name[0], name) for name in ("red", "green", "blue"))
METADATA = ModelMetadata(COLORS, 16, 1.0, (0.0,) * 3, (1.0,) * 3)


def brightest() -> Classifier:
    """A model that returns the mean of each color."""
    return Classifier("brightest", METADATA, lambda images: 100 * images.mean((2, 3)), torch.device("cpu"))


class Running:
    """A server in a thread."""

    def __init__(self, top: int = 3, **limits: Any):
        self.model = ModelServer(brightest(), top, max_upload_mb=1)
        self.server = HttpServer("127.0.0.1", 0, replace(self.model.site, **limits))
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any, Any]:
        """Return status, parsed answer and headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=HANG)
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        is_json = answer.headers["Content-Type"] == "application/json"
        return answer.status, json.loads(content) if is_json and content else content, answer.headers

    def send(self, content: bytes, end: bool = True) -> bytes:
        """Send bytes as they are, and return the answer."""
        with socket.create_connection(("127.0.0.1", self.server.port), HANG) as client:
            client.sendall(content)
            if end:
                client.shutdown(socket.SHUT_WR)
            return client.makefile("rb").read()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()
        self.model.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    server = Running()
    yield server
    server.close()


@pytest.fixture(scope="module")
def image() -> bytes:
    return jpeg(colored("red", 0))


def test_predicts_raw_bytes_and_forms(running: Running, image: bytes) -> None:
    status, answer, _ = running.ask("POST", "/predict", image)
    assert status == 200
    assert answer["top"][0]["name"] == "red"
    assert sum(each["probability"] for each in answer["top"]) == pytest.approx(1)
    (expected,) = brightest()([image], top=3)
    assert answer["top"] == [vars(each) for each in expected]
    form = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\ntext\r\n'
    form += b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jpg"\r\n\r\n' + image + b"\r\n--x--\r\n"
    again = running.ask("POST", "/predict", form, Content_Type="multipart/form-data; boundary=x")
    assert again[:2] == (200, answer)
    assert first_file('multipart/form-data; boundary="x"', form) == image
    assert first_file("multipart/form-data", form) is None
    assert first_file("image/jpeg", image) == image


def test_a_request_may_ask_for_fewer_classes(running: Running, image: bytes) -> None:
    whole = running.ask("POST", "/predict", image)[1]["top"]
    for top in (1, 2, 3, 9):
        assert running.ask("POST", f"/predict?top={top}", image)[:2] == (200, {"top": whole[:top]})
    for query in ("top=0", "top=-1", "top=x", "top=", "top=1.5", "top=9999999999", "top=%D9%A3", "tops=1", "a&" * 99):
        status, answer, _ = running.ask("POST", f"/predict?{query}", image)
        assert status == 400, query
        assert answer["error"]


def test_refused_images_are_logged_with_the_reason(running: Running, image: bytes, caplog) -> None:
    caplog.set_level("INFO", "paceline")
    assert running.ask("POST", "/predict", image[:-40])[0] == 415
    assert "truncated" in caplog.text
    caplog.clear()
    assert running.ask("POST", "/predict", image)[0] == 200
    assert not caplog.text


def test_page_has_no_external_assets_and_is_protected(running: Running) -> None:
    for path, kind in {"/": "text/html", "/serve.css": "text/css", "/serve.js": "text/javascript"}.items():
        status, content, headers = running.ask("GET", path)
        assert status == 200
        assert headers["Content-Type"].startswith(kind)
        assert b"http:" not in content
        assert b"//" not in content.replace(b"  // ", b"")
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert running.ask("HEAD", path)[:2] == (200, b"")
    health = {"status": "ok", "model": "brightest", "classes": 3, "size": 16}
    assert running.ask("GET", "/health")[1] == health


def _bomb() -> bytes:
    out = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(out, "png")
    return out.getvalue()


def test_content_that_is_not_an_image_is_refused(running: Running, image: bytes) -> None:
    contents = {
        "empty": b"",
        "text": b"no image",
        "truncated": image[:-40],
        "half": image[: len(image) // 2],
        "bomb": _bomb(),
        "script": b"<svg onload=alert(1)>",
    }
    for name, content in contents.items():
        status, answer, _ = running.ask("POST", "/predict", content)
        assert status in (400, 415), name
        assert "cannot be read" in answer["error"], name
    form = running.ask("POST", "/predict", b"--x--", Content_Type="multipart/form-data; boundary=x")
    assert form[0] == 400
    assert running.ask("POST", "/predict", image)[0] == 200


def test_invalid_requests_are_refused(running: Running, image: bytes) -> None:
    for status, method, path in ((404, "GET", "/nowhere"), (405, "GET", "/predict"), (404, "GET", "/../etc/passwd")):
        assert running.ask(method, path)[0] == status
    assert running.ask("PUT", "/predict", image)[0] == 501
    status, answer, _ = running.ask("POST", "/predict", bytes(1_000_001))
    assert (status, answer) == (413, {"error": "the content has more than 1 MB"})
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"
    for status, request in {
        b"400": head + b"Content-Length: 9000\r\n\r\nshort",
        b"411": head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"413": head + b"Content-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n",
    }.items():
        assert running.send(request).split()[1] == status, request
    assert running.send(b"GET http://[/ HTTP/1.1\r\n\r\n").split()[1] == b"400"
    assert running.send(head + b"Content-Length: -5\r\n\r\n").split()[1] == b"400"
    assert running.send(head + b"Content-Length: 1e3\r\n\r\n").split()[1] == b"400"
    assert running.send(head + b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\n12345").split()[1] == b"100"


def test_other_web_sites_cannot_use_it(running: Running, image: bytes) -> None:
    port = running.server.port
    for host in ("127.0.0.1", f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", socket.gethostname()):
        assert running.ask("GET", "/health", Host=host)[0] == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "[::1", ""):
        assert running.ask("GET", "/health", Host=host)[0] == 421, host
    own = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}
    assert running.ask("POST", "/predict", image, **own)[0] == 200
    for origin in ("http://evil.example", "null", f"http://localhost:{port + 1}", "http://[", "http://[::1"):
        assert running.ask("POST", "/predict", image, **(own | {"Origin": origin}))[0] == 403


def test_decoders_that_fail_are_not_the_fault_of_the_client(image: bytes, monkeypatch) -> None:
    running = Running()
    try:
        for code in ("decoder-killed", "decoder-start-failed"):
            monkeypatch.setattr(running.model, "_decode", Mock(side_effect=UserError(code, "Use fewer --workers.")))
            status, answer, _ = running.ask("POST", "/predict", image)
            assert (status, answer) == (503, {"error": "the server is out of memory or busy; try again later"})
        monkeypatch.undo()
        assert running.ask("POST", "/predict", image)[0] == 200
    finally:
        running.close()


@pytest.mark.parametrize("error", [RuntimeError("secret"), OSError(24, "secret"), TimeoutError("secret")])
def test_errors_of_the_model_are_answered_and_logged(monkeypatch, caplog, image: bytes, error: Exception) -> None:
    running = Running(seconds=HANG)
    try:
        monkeypatch.setattr(running.model.classifier, "classify_pixels", Mock(side_effect=error))
        with caplog.at_level("ERROR", logger=log.name):
            answer = running.ask("POST", "/predict", image)
        assert answer[:2] == (500, {"error": f"internal error ({type(error).__name__})"})
        assert "secret" in caplog.text
    finally:
        running.close()


def test_arguments_are_checked_before_the_model_is_opened(tmp_path: Path) -> None:
    arguments = {"device": "tpu", "precision": "fp8", "tta": "rotate", "crop_pct": 1.5, "port": 70000, "top": 0}
    for name, value in arguments.items():
        with raises("invalid-argument") as caught:
            pl.serve(tmp_path, **{name: value})
        assert caught.value.fields["argument"] == name


def test_decoders_end_if_the_port_is_in_use(tmp_path: Path, monkeypatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(ModelServer, "close", lambda _: closed.append(True))
    monkeypatch.setattr(serving, "open_model", lambda *_: SimpleNamespace(classifier=brightest()))
    with socket.create_server(("127.0.0.1", 0)) as taken, raises("port-unavailable"):
        pl.serve(tmp_path, port=taken.getsockname()[1], device="cpu")
    assert closed == [True]


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (OSError(errno.EADDRINUSE, "Address already in use"), "Stop the process that uses it, or choose another"),
        (OSError(errno.EACCES, "Permission denied"), "Ports below 1024 are reserved for root: choose another"),
        (socket.gaierror(-2, "Name or service not known"), "(Name or service not known). Choose another"),
    ],
)
def test_the_fix_for_a_port_follows_from_its_error(tmp_path: Path, monkeypatch, error: OSError, fix: str) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(serving, "open_model", lambda *_: SimpleNamespace(classifier=brightest()))
    with raises("port-unavailable"):
        pl.serve(tmp_path, host="a..b", device="cpu")
    monkeypatch.setattr(serving, "HttpServer", fail)
    with raises("port-unavailable") as caught:
        pl.serve(tmp_path, device="cpu")
    assert fix in str(caught.value)


def test_slow_clients_are_disconnected(image: bytes) -> None:
    running = Running(seconds=0.3)
    try:
        head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n123"
        assert running.send(head, end=False).split()[1] == b"408"
        assert running.send(b"GET / HT", end=False) == b""
    finally:
        running.close()


def test_connections_beyond_the_limit_are_refused(monkeypatch, image: bytes) -> None:
    monkeypatch.setattr(http_server, "_MAX_CONNECTIONS", 2)
    running = Running(seconds=HANG)
    try:
        idle = [socket.create_connection(("127.0.0.1", running.server.port), HANG) for _ in range(2)]
        assert running.ask("GET", "/health")[0] == 503
        for client in idle:
            client.close()
        while (status := running.ask("POST", "/predict", image)[0]) == 503:  # until the server sees that they left
            pass
        assert status == 200
    finally:
        running.close()


def test_command_serves_until_interrupted(tmp_path: Path, here) -> None:
    run = train_model(tmp_path)
    words = ("serve", run, "--port", 0, "--top", 1, *CPU)
    with subprocess.Popen(command(*words), env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        line = process.stdout.readline()
        assert line.startswith(f"serving {run}")
        port = int(line.split()[3].rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
        connection.request("POST", "/predict", jpeg(colored("red", 1)))
        assert len(json.loads(connection.getresponse().read())["top"]) == 1
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
        connection.request("GET", "/health")
        assert json.loads(connection.getresponse().read())["model"] == "colors"
        assert "[port-unavailable]" in complaint(here("serve", run, "--port", port, *CPU))
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG) == 0
