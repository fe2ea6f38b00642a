"""Serve a trained model: a page that classifies images, and POST /predict."""

import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from paceline.api.arguments import check_count, check_port, check_usage
from paceline.api.in_process import in_this_process
from paceline.api.runs import Run, check_best_or_last, path_of
from paceline.config.imports import trust as trust_modules
from paceline.data.center import decode_center
from paceline.data.prepare.isolated import Isolated
from paceline.distributed.server import port_unavailable
from paceline.distributed.world import World
from paceline.errors import UserError
from paceline.inference.classifier import Classifier
from paceline.inference.open_model import Usage, open_model
from paceline.system.files import say, size_text
from paceline.system.http_server import HttpError, HttpRequest, HttpResponse, HttpServer, Site
from paceline.system.logs import log
from paceline.system.logs import set_up as set_up_log
from paceline.system.multipart import first_file
from paceline.system.untrusted import Unreadable

_DECODERS = 4  # images that are decoded at the same time; each may need gigabytes
_CPU_SECONDS = 20
_MAX_DIGITS = 6  # of the parameter top
_ASSETS = {
    "/": ("serve.html", "text/html"),
    "/serve.css": ("serve.css", "text/css"),
    "/serve.js": ("serve.js", "text/javascript"),
}


class ModelServer:
    """Answers requests with a model. Images are decoded in subprocesses, which a hostile one may crash."""

    def __init__(
        self, classifier: Classifier, top: int = 5, max_upload_mb: int = 20, host: str = "127.0.0.1", name: str = ""
    ):
        self.classifier, self._top = classifier, top
        self._name = name or Path(classifier.origin).name  # clients need not know where the model is stored
        size, seen = classifier.size, classifier.metadata
        settings = (seen.crop_pct, size, size, seen.interpolation)
        self._decode = Isolated(decode_center, *settings, cpu_seconds=_CPU_SECONDS)
        self._decoders = threading.BoundedSemaphore(_DECODERS)
        assets = resources.files("paceline.api") / "assets"
        routes = {
            ("GET", path): _page(HttpResponse((assets / name).read_bytes(), f"{kind}; charset=utf-8"))
            for path, (name, kind) in _ASSETS.items()
        }
        routes |= {("GET", "/health"): self._health, ("POST", "/predict"): self._predict}
        hosts = frozenset(name.lower() for name in (host, socket.gethostname()))
        self.site = Site(routes, max_body=max_upload_mb * 1_000_000, hosts=hosts)

    def _health(self, _: HttpRequest) -> HttpResponse:
        about = {"status": "ok", "model": self._name, "classes": len(self.classifier.classes)}
        return HttpResponse.json(about | {"size": self.classifier.size})

    def _predict(self, request: HttpRequest) -> HttpResponse:
        top = self._top_of(request)
        content = first_file(request.content_type, request.body)
        if content is None:
            raise HttpError(400, "the form has no file")
        try:
            with self._decoders:
                (pixels,), _ = self._decode(content)
        except Unreadable as error:
            if content:
                log.info("refused an image of %s: %s", size_text(len(content)), error)
            raise HttpError(415 if content else 400, f"the image cannot be read: {error}") from None
        except UserError:  # the decoder was killed, or could not be started
            raise HttpError(503, "the server is out of memory or busy; try again later") from None
        size = self.classifier.size
        decoded = np.frombuffer(bytearray(pixels), np.uint8).reshape(1, 3, size, size)
        (topk,) = self.classifier.classify_pixels(decoded, top)
        return HttpResponse.json({"top": [vars(each) for each in topk]})

    def _top_of(self, request: HttpRequest) -> int:
        """Return the number of classes that a request asks for."""
        if unknown := sorted(request.query.keys() - {"top"}):
            raise HttpError(400, f"the parameter {unknown[0]:.40} is unknown; only top is known")
        text = request.query.get("top", str(self._top))
        if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS and int(text)):
            raise HttpError(400, f"top={text:.40} is not an integer from 1 to {10**_MAX_DIGITS - 1}")
        return int(text)

    def close(self) -> None:
        self._decode.__exit__()


def _page(response: HttpResponse) -> Any:
    return lambda _: response


def serve(
    model: str | Path | Run,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    top: int = 5,
    max_upload_mb: int = 20,
    checkpoint: str = "best",
    device: str = "auto",
    precision: str = "",
    tta: str = "",
    crop_pct: float = 0.0,
    temperature: float = 1.0,
    imports: Sequence[str] = (),
    trust: bool = False,
) -> None:
    """Serve a run, a checkpoint or an export at http://HOST:PORT until Ctrl-C: a page, POST /predict, GET /health.

    By default only this machine can reach it; host="0.0.0.0" opens it to the network. Logits are divided by
    `temperature` before softmax. `trust` opens .pt2 files, which can run code.
    """
    check_best_or_last(checkpoint)
    check_usage(device, precision, tta, crop_pct, temperature)
    port = check_port("port", port)
    top, max_upload_mb = check_count("top", top), check_count("max_upload_mb", max_upload_mb)
    trust_modules(imports)
    usage = Usage(checkpoint, precision, tta, crop_pct, trust, tuple(imports), temperature)
    with in_this_process():
        serve_model(path_of(model), usage, (host, port), top, max_upload_mb, device)


def serve_model(
    model: Path, usage: Usage, place: tuple[str, int], top: int, max_upload_mb: int, device: str = "auto"
) -> None:
    """Serve a model until Ctrl-C or SIGTERM."""
    host, port = place
    world = World.from_env(device)
    with world.connected():
        set_up_log()
        classifier = open_model(model, world, usage).classifier
        with closing(ModelServer(classifier, top, max_upload_mb, host, model.resolve().name)) as server:
            _listen(server, host, port)


def _listen(server: ModelServer, host: str, port: int) -> None:
    try:
        listening = HttpServer(host, port, server.site)
    except OSError as error:
        raise port_unavailable(host, port, error, "choose another --port or --host") from None
    shown = f"[{host}]" if ":" in host else host
    with listening, suppress(KeyboardInterrupt):
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        say(f"serving {server.classifier.origin} at http://{shown}:{listening.port} (Ctrl-C ends it)")
        if host not in ("127.0.0.1", "localhost", "::1"):
            say("paceline: warning: other machines can use this server, which has no password.", error=True)
        try:
            listening.serve_forever()
        finally:
            signal.signal(signal.SIGTERM, before)
