"""Failed downloads name their reason and the fix. The hub is a server on this machine."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import timm
import torch
from conftest import raises
from huggingface_hub.errors import LocalEntryNotFoundError

from paceline.config.io import load_recipe
from paceline.config.model import Model
from paceline.models.factory import create
from paceline.models.preprocessing import resolve


class _Hub(ThreadingHTTPServer):
    """Answers with one status and error code, or serves the files of a folder."""

    daemon_threads = True
    status, code = 404, "RepoNotFound"
    folder: Path | None = None


class _Handler(BaseHTTPRequestHandler):
    server: _Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        file = self.server.folder / self.path.rpartition("/")[2] if self.server.folder else None
        if file is not None and file.is_file():
            content = file.read_bytes()
            self.send_response(200)
            self.send_header("ETag", f'"{file.name}"')
            self.send_header("X-Repo-Commit", "0" * 40)
        else:
            content = b"{}"
            self.send_response(self.server.status)
            self.send_header("X-Error-Code", self.server.code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path: Path) -> Iterator[_Hub]:
    from huggingface_hub import constants

    server = _Hub(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield server
    server.shutdown()
    server.server_close()


MODEL = Model(name="test_resnet", weights="pretrained")


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (403, "GatedRepo", "gated"),
        (401, "GatedRepo", "gated"),
        (404, "RepoNotFound", "not-found"),
        (401, "RepoNotFound", "not-found"),
        (404, "EntryNotFound", "not-found"),
        (403, "", "http"),
    ],
)
def test_answers_of_the_hub_have_a_fix(hub: _Hub, status: int, code: str, reason: str) -> None:
    hub.status, hub.code = status, code
    with raises("pretrained-weights-unavailable") as caught:
        create(MODEL, 10, 3)
    assert caught.value.fields == {"model": "test_resnet", "reason": reason}
    assert "hf download timm/test_resnet.r160_in1k --local-dir DIR" in str(caught.value)
    assert "--model.weights DIR" in str(caught.value)


def test_a_hub_that_does_not_answer_in_time(hub: _Hub, monkeypatch) -> None:
    """Its client would retry for minutes."""

    def silent(*_: object, **__: object) -> None:
        try:
            raise httpx.ReadTimeout("timed out")
        except httpx.ReadTimeout as error:
            raise LocalEntryNotFoundError("cannot find the file in the cache") from error

    monkeypatch.setattr("timm.models._hub.hf_hub_download", silent)
    with raises("pretrained-weights-unavailable") as caught:
        create(MODEL, 10, 3)
    assert caught.value.fields["reason"] == "timeout"


def test_offline_without_a_cached_file(hub: _Hub, monkeypatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with raises("pretrained-weights-unavailable") as caught:
        create(MODEL, 10, 3)
    assert caught.value.fields["reason"] == "offline"
    assert "HF_HUB_OFFLINE is set" in str(caught.value)


def test_a_hub_whose_name_does_not_resolve_changes_nothing_for_later(hub: _Hub, monkeypatch) -> None:
    from huggingface_hub import constants

    def unknown(*_: object, **__: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("socket.getaddrinfo", unknown)
    for call in (
        lambda: create(MODEL, 10, 3),
        lambda: resolve(load_recipe("finetune-full", ["--model.name", "hf-hub:someone/mine"])),
    ):
        with raises("pretrained-weights-unavailable") as caught:
            call()
        assert caught.value.fields["reason"] == "unreachable"
        assert constants.HF_HUB_OFFLINE is False


def test_a_full_disk(hub: _Hub, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("timm.models._hub.hf_hub_download", full)
    with raises("pretrained-weights-unavailable") as caught:
        create(MODEL, 10, 3)
    assert caught.value.fields["reason"] == "disk-full"


def test_a_name_that_the_hub_cannot_have(hub: _Hub) -> None:
    with raises("pretrained-weights-unavailable") as caught:
        create(Model(name="hf-hub:a//b", weights="pretrained"), 10, 3)
    assert caught.value.fields["reason"] == "invalid-name"


def test_a_model_of_the_hub_brings_its_preprocessing(hub: _Hub, tmp_path: Path) -> None:
    donor = timm.create_model("test_resnet", num_classes=10)
    timm.models.save_for_hf(donor, tmp_path / "files", safe_serialization=True)
    path = tmp_path / "files" / "config.json"
    config = json.loads(path.read_text())
    config["pretrained_cfg"] |= {"mean": [0.1, 0.2, 0.3], "input_size": [3, 96, 96], "crop_pct": 1.0}
    path.write_text(json.dumps(config))
    hub.folder = tmp_path / "files"
    recipe = load_recipe("finetune-full", ["--model.name", "hf-hub:someone/mine"])
    resolved, _ = resolve(recipe)
    assert (resolved.data.mean, resolved.data.size, resolved.evaluate.crop_pct) == ((0.1, 0.2, 0.3), 96, 1.0)
    model = create(resolved.model, 10, 3)
    assert torch.equal(model.conv1[0].weight, donor.conv1[0].weight)


def test_a_model_without_pretrained_weights() -> None:
    name = next(name for name in timm.list_models() if not timm.get_pretrained_cfg(name).has_weights)
    with raises("no-pretrained-weights"):
        create(Model(name=name, weights="pretrained"), 10, 3)
