"""Explains why weights cannot be downloaded from the Hugging Face Hub, and what to do."""

import errno
import os
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from paceline.config.model import Model
from paceline.errors import UserError

SOURCES = ("hf-hub:", "local-dir:")
"""Prefixes of model names that timm knows."""


@contextmanager
def cached_if_unreachable() -> Iterator[None]:
    """Use only cached files if the Hub's name does not resolve: its client would retry for a minute."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _resolves(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def read_config(config: Model) -> dict[str, Any]:
    """Return config.json of a model named hf-hub:USER/MODEL. Raises if it cannot be downloaded."""
    from timm.models import load_model_config_from_hf

    with cached_if_unreachable():
        try:
            published, architecture, arguments = load_model_config_from_hf(config.name.removeprefix(SOURCES[0]))
        except Exception as error:
            raise failure(error, config) from None
    return {"architecture": architecture, "pretrained_cfg": published, "model_args": arguments}


def _resolves(address: str) -> bool:
    if urllib.request.getproxies():
        return True  # the proxy resolves names
    try:
        socket.getaddrinfo(urlsplit(address).hostname, 443)
    except OSError:
        return False
    return True


def is_failure(error: Exception) -> bool:
    """Whether an error comes from a download, rather than from the arguments of a model."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    known = (HfHubHTTPError, HFValidationError)
    return isinstance(error, known) or not isinstance(error, TypeError | AssertionError | ValueError | RuntimeError)


def failure(error: Exception, config: Model) -> UserError:
    """Return an error with the reason of a failed download and the fix."""
    repository = _repository(config.name)
    reason, what = _reason(error, repository)
    fetch = f'run "hf download {repository} --local-dir DIR"' if repository else "download them to a folder DIR"
    return UserError(
        "pretrained-weights-unavailable",
        f"model.name={config.name}: the pretrained weights cannot be downloaded: {what}. Or copy them: "
        f"{fetch} on a machine with access, copy DIR to this one, and set --model.weights DIR.",
        model=config.name,
        reason=reason,
    )


def _repository(name: str) -> str:
    """Return the id of a model on the Hub; empty if it is elsewhere."""
    import timm

    if name.startswith(SOURCES[0]):
        return name.removeprefix(SOURCES[0])
    found = None if name.startswith(SOURCES) else timm.get_pretrained_cfg(name)
    return str(getattr(found, "hf_hub_id", "") or "")


def _reason(error: Exception, repository: str) -> tuple[str, str]:
    """Return a code and a sentence for the most specific of an error and its causes."""
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    chain = list(_causes(error))

    def find(*kinds: type[BaseException]) -> Any:
        return next((each for each in chain if isinstance(each, kinds)), None)

    full = next((e for e in chain if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT)), None)
    if full:
        return "disk-full", f"{constants.HF_HUB_CACHE} has no space left. Free some, or set HF_HOME to another disk"
    if find(PermissionError):
        return "cache-not-writable", f"{constants.HF_HUB_CACHE} cannot be written. Set HF_HOME to another folder"
    if find(hub.GatedRepoError):
        return "gated", (
            f"access to {repository} is restricted. Accept its terms on the Hugging Face Hub, then set HF_TOKEN or run "
            '"hf auth login"'
        )
    if find(hub.RepositoryNotFoundError):
        return "not-found", f"{repository} does not exist, or is private. Check the name, or set HF_TOKEN"
    if find(hub.RevisionNotFoundError):
        return "not-found", f"{repository} has no such revision. Check what follows @"
    if find(hub.RemoteEntryNotFoundError):
        return "not-found", f"{repository} has no weights that timm reads. Choose another model"
    if find(hub.HFValidationError):
        return "invalid-name", f"{repository!r} is not a name on the Hub ({_line(error)}). Write hf-hub:USER/MODEL"
    if any(kind.__name__ == "TimeoutException" for each in chain for kind in type(each).__mro__) or find(TimeoutError):
        return "timeout", "the Hub does not respond in time. Try again, or increase HF_HUB_DOWNLOAD_TIMEOUT"
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "on", "yes", "true"):
        return "offline", f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} does not have them. Unset it"
    response = getattr(find(hub.HfHubHTTPError), "response", None)
    if response is not None:
        return "http", f"the Hub responds with HTTP status {response.status_code}. Try again later"
    if find(hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return "unreachable", (
            f"{constants.ENDPOINT} cannot be reached, and {constants.HF_HUB_CACHE} does not have them. Check the "
            "network"
        )
    return "unknown", f"{_line(error)}. Try again"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
