"""EC2 announces a spot interruption two minutes ahead; a node that polls for the notice checkpoints and exits."""

import http.client
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from contextlib import suppress

SPOT = "PACELINE_SPOT"
"""Set in the environment of agents on spot instances."""
_SERVICE = "http://169.254.169.254/latest"
_INTERVAL = 5.0
_ACTIONS = ("terminate", "stop", "hibernate")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The metadata service is link-local: neither proxies nor redirects may answer for it."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())


def watch() -> None:
    """Poll for the notice in the background, and send SIGTERM to this process when it comes."""
    threading.Thread(target=_poll, name="spot notice", daemon=True).start()


def _poll() -> None:
    while not (notice := _ask()):
        time.sleep(_INTERVAL)
    with suppress(OSError, ValueError):  # stderr may be closed
        print(f"EC2 spot interruption notice ({notice}): checkpointing and exiting", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def _ask() -> str:
    """Return the announced action, or "" if there is no notice or the service does not respond."""
    try:
        token = _get("/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        notice = json.loads(_get("/meta-data/spot/instance-action", "GET", {"X-aws-ec2-metadata-token": token}))
        action = notice.get("action") if isinstance(notice, dict) else None
        return action if action in _ACTIONS else ""
    except (OSError, ValueError, RecursionError, http.client.HTTPException):
        return ""


def _get(path: str, method: str, headers: dict[str, str]) -> str:
    request = urllib.request.Request(_SERVICE + path, method=method, headers=headers)
    with _OPENER.open(request, timeout=2) as answer:
        text: str = answer.read(1000).decode(errors="replace").strip()
        return text
