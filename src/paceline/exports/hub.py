"""Uploads a timm-hub folder to the Hugging Face Hub."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from paceline.errors import UserError
from paceline.exports.timm_hub import check_is_timm
from paceline.exports.write import Exporter
from paceline.system.files import say, size_text

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_CLIENTS = ("httpx", "httpcore", "requests", "urllib3")  # whose exceptions mean a failed connection
_LOG_IN = 'Run "hf auth login", or set HF_TOKEN to a token with write access.'


def push(exporter: Exporter, name: str, public: bool, force: bool) -> str:
    """Upload the timm-hub folder of a checkpoint as the repository USER/NAME, and return a summary.

    A new repository is private unless `public`. An existing one is changed only with `force`.
    """
    if not _NAME.fullmatch(name):
        raise UserError("hub-name-invalid", f"--to hf:{name} is not a repository. Use hf:USER/NAME.", name=name)
    from huggingface_hub import HfApi, get_token

    if not get_token():
        raise UserError("hub-token-missing", f"an upload to hf:{name} needs a token. {_LOG_IN}")
    check_is_timm(exporter.metadata["model"]["name"])
    api = HfApi(library_name="paceline")
    with _named_failures(name, api.endpoint):
        exists = api.repo_exists(name)
        is_public = not api.model_info(name).private if exists else public
    if exists and not force:
        message = f"{api.endpoint}/{name} exists. Give --force to upload to it, or choose another name."
        raise UserError("output-exists", message, name=name)
    if is_public != public:
        fix = "Give --public as well" if is_public else "Leave --public out, or change it in the settings of the Hub"
        kind = "public" if is_public else "private"
        message = f"{api.endpoint}/{name} exists and is {kind}. {fix}."
        raise UserError("hub-visibility-differs", message, name=name, public=is_public)
    with TemporaryDirectory() as folder:
        exporter.write_folder(Path(folder), f"hf-hub:{name}")
        _upload(api, name, Path(folder), public, exists, f"step {exporter.metadata['step']}")
    return f"{api.endpoint}/{name}: uploaded; load it with timm.create_model('hf-hub:{name}', pretrained=True)"


def _upload(api: "HfApi", name: str, folder: Path, public: bool, exists: bool, what: str) -> None:
    kind = "existing" if exists else "new"
    files = ", ".join(f"{path.name} ({size_text(path.stat().st_size)})" for path in sorted(folder.iterdir()))
    say(f"uploading to the {kind} {'public' if public else 'private'} repository {api.endpoint}/{name}: {files}", True)
    with _named_failures(name, api.endpoint):
        if not exists:
            api.create_repo(name, private=not public)
    created = "" if exists else " The repository was created, so give --force next time."
    with _named_failures(name, api.endpoint, created):
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"Upload {what} with Paceline")


@contextmanager
def _named_failures(name: str, endpoint: str, more: str = "") -> Iterator[None]:
    """Turn an error of the Hub or of the network into one that says what to do."""
    try:
        yield
    except Exception as error:  # of huggingface_hub and of the HTTP client below it, which differs between versions
        raise _explained(error, name, endpoint, more) from None


def _explained(error: Exception, name: str, endpoint: str, more: str) -> UserError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = " ".join(str(error).split())[:200]
    if status == 401:
        return UserError("hub-token-invalid", f"hf:{name}: {endpoint} refuses the token. {_LOG_IN}{more}", name=name)
    if status == 403:
        message = f"hf:{name}: the token may not write to this repository. Check USER. {_LOG_IN}{more}"
        return UserError("hub-access-denied", message, name=name)
    if status is None and (isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _CLIENTS):
        message = f"hf:{name}: {endpoint} cannot be reached ({reason}). Check the network and HF_ENDPOINT.{more}"
        return UserError("hub-unreachable", message, name=name)
    message = f"hf:{name}: {endpoint} did not accept the upload ({reason}). Check the name and the Hub's status.{more}"
    return UserError("hub-refused", message, name=name, status=status)
