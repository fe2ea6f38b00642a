"""Hostile clients and images of `paceline serve`: every one gets an error, and the next picture is classified."""

import http.client
import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import HANG
from hostile import bombs, disguised, mutated, pictures
from sample_images import jpeg, sample_image

from paceline.api.serving import ModelServer
from paceline.data.classes import Class
from paceline.inference.classifier import Classifier, ModelMetadata
from paceline.system.http_server import HttpServer

_PARTS = b"\r\n--x" * 180_000


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server with a model that knows two classes."""
    classes = (Class("a", "a"), Class("b", "b"))
    metadata = ModelMetadata(classes, 16, 0.875, (0.0,) * 3, (1.0,) * 3)
    model = ModelServer(
        Classifier("model", metadata, lambda images: images.mean((2, 3))[:, :2], torch.device("cpu")), max_upload_mb=5
    )
    server = HttpServer("127.0.0.1", 0, model.site)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.port
    server.shutdown()
    thread.join()
    server.server_close()
    model.close()


def _post(port: int, content: bytes, kind: str = "image/jpeg") -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
    connection.request("POST", "/predict", content, {"Content-Type": kind})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def _works(port: int) -> bool:
    return _post(port, jpeg(sample_image(40, 30)))[0] == 200


def test_hostile_images_get_an_answer(port: int, survived, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    contents = [*bombs().values(), *disguised(canary).values()]
    contents += [content for picture in pictures().values() for content in mutated(picture, 12, seed=3)]
    contents = [content for content in contents if len(content) <= 5_000_000]
    for content in contents:
        status, answer = _post(port, content)
        assert ("top" in answer) if status == 200 else (status in (400, 415) and answer["error"])
    assert _works(port)
    assert not canary.exists()
    survived("hostile images, served", len(contents))


def test_garbage_instead_of_http(port: int, survived) -> None:
    rng = random.Random(0)
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"
    requests = [
        *(rng.randbytes(rng.choice((1, 50, 5000, 200_000))) for _ in range(30)),
        b"GET " + b"/a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % number for number in range(5000)) + b"\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
        head + b"Content-Length: 5\r\nContent-Length: 500000\r\n\r\n12345",
        head + b"Content-Length: 18446744073709551616\r\n\r\n",
        head + b"Content-Length: \xb2\r\n\r\n",
        head + b"Content-Type: multipart/form-data; boundary=" + b"x" * 5000 + b"\r\nContent-Length: 2\r\n\r\n--",
        head + b"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 900000\r\n\r\n" + _PARTS,
    ]
    for request in requests:
        with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), HANG) as client:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            answer = client.makefile("rb").read()
            status = int(answer.split()[1]) if answer else 400
            assert 400 <= status < 500 or status in (501, 505), request[:80]
            assert b"Traceback" not in answer
    assert _works(port)
    survived("garbage instead of requests, served", len(requests))


def test_hundreds_of_idle_connections(port: int, survived) -> None:
    idle = []
    for _ in range(300):
        with suppress(OSError):
            idle.append(socket.create_connection(("127.0.0.1", port), 5))
            idle[-1].sendall(b"POST /pre")
    for client in idle:
        client.close()
    while True:  # closed connections are noticed one after the other
        with suppress(ConnectionError, ValueError, http.client.HTTPException):
            if _works(port):
                break
    survived("idle connections, served", len(idle))
