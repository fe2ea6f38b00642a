"""Spot machines are told two minutes before they are taken; one that asks in time saves and leaves in order."""

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
        return _get("/meta-data/spot/instance-action", "GET", {"X-aws-ec2-metadata-token": token})
    except (OSError, ValueError):
        return ""


def _get(path: str, method: str, headers: dict[str, str]) -> str:
    request = urllib.request.Request(_SERVICE + path, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=2) as answer:
        text: str = answer.read(1000).decode(errors="replace").strip()
        return text
