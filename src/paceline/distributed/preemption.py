"""Spot machines are told two minutes before they are taken; one that asks in time saves and leaves in order."""

import http.client
import json
import os
import signal
import sys
import threading
import time
import urllib.request

SPOT = "PACELINE_SPOT"
"""Set in the environment of agents on such machines."""
_SERVICE = "http://169.254.169.254/latest"
_EVERY = 5.0
_ACTIONS = ("terminate", "stop", "hibernate")


class _StayHere(urllib.request.HTTPRedirectHandler):
    """The service is this machine's own: no proxy and no other address answers for it."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _StayHere())


def heed() -> None:
    """Ask in the background, and stop this process as a user would when the notice comes."""
    threading.Thread(target=_watch, name="spot notice", daemon=True).start()


def _watch() -> None:
    while not (notice := _ask()):
        time.sleep(_EVERY)
    print(f"this machine will be taken away ({notice}): saving and leaving", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def _ask() -> str:
    """The notice, if there is one; a service that does not answer has none."""
    try:
        token = _get("/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        told = json.loads(_get("/meta-data/spot/instance-action", "GET", {"X-aws-ec2-metadata-token": token}))
        action = told.get("action") if isinstance(told, dict) else None
        return action if action in _ACTIONS else ""
    except (OSError, ValueError, RecursionError, http.client.HTTPException):
        return ""


def _get(path: str, method: str, headers: dict[str, str]) -> str:
    request = urllib.request.Request(_SERVICE + path, method=method, headers=headers)
    with _OPENER.open(request, timeout=2) as answer:
        text: str = answer.read(1000).decode(errors="replace").strip()
        return text
