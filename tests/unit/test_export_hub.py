"""Uploads to a stand-in for the Hugging Face Hub on this machine, which speaks the part of its protocol that we use."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import raises
from huggingface_hub import constants
from safetensors.torch import load

import paceline as pl
from paceline.engine.trained_model import load_model

RECIPE: dict[str, Any] = {
    "device": "cpu",
    "precision": "fp32",
    "model.name": "test_resnet",
    "model.options": {},
    "train.duration": "2ba",
    "log.tensorboard": False,
}


class _Hub(ThreadingHTTPServer):
    """Keeps repositories in memory. `refuse` is a status to answer with instead."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, Any]] = {}
        self.refuse: dict[str, int] = {}
        self.tokens: set[str] = set()


class _Handler(BaseHTTPRequestHandler):
    server: _Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, value: Any, status: int = 200, code: str = "") -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refused(self) -> bool:
        self.server.tokens.add(self.headers.get("Authorization", ""))
        for part, status in self.server.refuse.items():
            if part in self.path:
                self._answer({"error": "refused"}, status)
                return True
        return False

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").partition("?")[0].removesuffix("/revision/main")
        if self._refused():
            return
        if name not in self.server.repositories:
            self._answer({"error": "Repository not found"}, 404, "RepoNotFound")
            return
        self._answer({"id": name, "private": self.server.repositories[name]["private"], "sha": "0" * 40})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self._refused():
            return
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}" if wanted.get("organization") else wanted["name"]
            # its client has said it in either way
            private = wanted.get("private") or wanted.get("visibility") == "private"
            self.server.repositories[name] = {"private": private}
            self._answer({"url": f"{constants.ENDPOINT}/{name}", "id": name})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            self._answer({"files": modes})
        elif "/commit/" in self.path:
            name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.repositories[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer(
                {"commitUrl": f"{constants.ENDPOINT}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40, "success": True}
            )
        else:  # the check of the model card
            self._answer({"errors": [], "warnings": []})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Hub]:
    server = _Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run = pl.train("digits", RECIPE, name="trained", runs=tmp_path_factory.mktemp("hub"), in_process=True)
    torch.set_num_threads(threads)
    return run.path


def test_upload_is_private_and_complete(trained: Path, hub: _Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert "hf-hub:me/digits" in pl.export(trained, "hf:me/digits", license="mit")
    uploaded = hub.repositories["me/digits"]
    assert uploaded["private"] is True
    assert "Bearer hf_of_a_test" in hub.tokens
    weights, expected = load(uploaded["model.safetensors"]), load_model(trained).state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert json.loads(uploaded["config.json"])["architecture"] == "test_resnet"
    assert 'timm.create_model("hf-hub:me/digits"' in uploaded["README.md"].decode()
    shown = capsys.readouterr().err
    assert "private" in shown
    assert "model.safetensors (" in shown


def test_existing_repository_is_changed_only_with_force(trained: Path, hub: _Hub) -> None:
    hub.repositories["me/digits"] = {"private": False}
    with raises("output-exists"):
        pl.export(trained, "hf:me/digits", public=True)
    with raises("hub-visibility-differs"):
        pl.export(trained, "hf:me/digits", force=True)
    assert hub.repositories["me/digits"] == {"private": False}
    pl.export(trained, "hf:me/digits", force=True, public=True)
    assert "model.safetensors" in hub.repositories["me/digits"]


@pytest.mark.parametrize(
    ("part", "status", "code"),
    [
        ("/api/repos/create", 401, "hub-token-invalid"),
        ("/api/repos/create", 403, "hub-access-denied"),
        ("/commit/", 403, "hub-access-denied"),
        ("/commit/", 400, "hub-refused"),
    ],
)
def test_refusals_of_the_hub_are_explained(trained: Path, hub: _Hub, part: str, status: int, code: str) -> None:
    hub.refuse = {part: status}
    with raises(code) as caught:
        pl.export(trained, "hf:me/digits")
    assert ("--force" in str(caught.value)) == (part == "/commit/")


def test_uploads_without_token_network_or_name_are_refused(
    trained: Path, hub: _Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("digits", "me/", "me/digits/more", "../digits"):
        with raises("hub-name-invalid"):
            pl.export(trained, f"hf:{name}")
    with raises("conflicting-options"):
        pl.export(trained, "hf:me/digits", format="onnx")
    with raises("conflicting-options"):
        pl.export(trained, tmp_path / "model.onnx", public=True)
    hub.shutdown()
    hub.server_close()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # its client would retry for a while
    with raises("hub-unreachable"):
        pl.export(trained, "hf:me/digits")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with raises("hub-token-missing"):
        pl.export(trained, "hf:me/digits")
