"""The storage of a study: a journal file or a database. Its errors say what is wrong and how to fix it.

The journal is the default: a line per change, which works on shared file systems. Its lock is the kernel's, which
releases it however its holder ends, and whoever takes it removes a line that a killed process left incomplete.
"""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.system.files import FolderLock
from paceline.system.packages import needs_package
from paceline.system.remote import redacted

LOCK_SECONDS = 60.0
"""How long to wait for another process that holds a lock of the study."""
_JOURNAL, _DATABASE = "study.journal", "study.db"


def import_optuna() -> Any:
    """Return the module optuna, silenced; UserError if it is not installed."""
    with needs_package("optuna", "paceline sweep", extra="sweep"):
        import optuna
    import warnings

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def describe_storage(place: str, folder: Path) -> str:
    """Return the file or URL of a storage, for messages."""
    files = {"journal": _JOURNAL, "sqlite": _DATABASE}
    return str(folder / files[place]) if place in files else redacted(place)


def open_storage(place: str, folder: Path) -> Any:
    """Return Optuna's storage: `journal` and `sqlite` are files in the folder, other places are URLs of databases."""
    optuna = import_optuna()
    shown = describe_storage(place, folder)
    if place == "journal":
        return _open_journal(optuna, Path(shown))
    url = f"sqlite:///{folder / _DATABASE}" if place == "sqlite" else place
    if "://" not in url:
        message = f"--storage {place}: give journal, sqlite, or the URL of a database, e.g. postgresql://HOST/NAME."
        raise UserError("invalid-storage", message, storage=place)
    if ":" in url.partition("://")[2].partition("/")[0].rpartition("@")[0]:
        message = (
            f"--storage {shown} contains a password, which other users could see. Remove it from the URL, and store it "
            "where the driver finds it, e.g. ~/.pgpass for PostgreSQL or ~/.my.cnf for MySQL."
        )
        raise UserError("password-in-url", message, url=shown)
    waits = {"connect_args": {"timeout": LOCK_SECONDS}} if url.startswith("sqlite") else {}
    with storage_errors(shown):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs={**waits, "pool_pre_ping": True})
        except ImportError as error:
            message = (
                f"--storage {shown} needs the driver of its database, which is not installed. Install it with pip."
            )
            raise UserError("missing-package", message, package=getattr(error, "name", None)) from None


@contextmanager
def storage_errors(shown: str) -> Iterator[None]:
    """Turn the errors of a storage into errors that the user can fix."""
    optuna = import_optuna()
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError, json.JSONDecodeError) as error:
        raise _explained(error, shown) from None


def _explained(error: Exception, shown: str) -> UserError:
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) and len(chain) < 10:
        chain.append(cause)  # type: ignore[arg-type]
    text = " ".join(" ".join(str(part).split()) for part in chain)
    reason = " ".join(str(getattr(chain[-1], "orig", None) or chain[-1]).split())[:300].rstrip(".")
    if "locked" in text:
        message = f"{shown} is locked by another process. Wait until that process ends, and run the same command again."
        return UserError("storage-locked", message, path=shown)
    if "disk is full" in text:
        message = f"{shown}: the disk is full. Free some space, and run the same command again; no trial is lost."
        return UserError("disk-full", message, path=shown)
    if "is not a database" in text or "malformed" in text or isinstance(error, json.JSONDecodeError):
        return _corrupt(shown, reason)
    message = f"the storage {shown} cannot be used: {reason}. Check that it exists and that you have write access."
    return UserError("storage-failed", message, path=shown)


def _corrupt(shown: str, reason: str) -> UserError:
    message = (
        f"{shown} is corrupt ({reason}). Restore it from a backup, or start another sweep with --name. "
        "The run folders of the trials are intact."
    )
    return UserError("storage-corrupt", message, path=shown)


def _open_journal(optuna: Any, path: Path) -> Any:
    if path.exists() and not path.is_file():
        raise _corrupt(str(path), "it is not a file")
    if path.exists():
        _check_journal(path)
    backend = optuna.storages.journal.JournalFileBackend(str(path), lock_obj=_JournalLock(path))
    try:
        return optuna.storages.JournalStorage(backend)
    except OSError:
        raise
    except Exception as error:  # records that contradict each other fail in many ways
        raise _corrupt(str(path), f"{type(error).__name__}: {error}") from None


def _check_journal(path: Path) -> None:
    """Refuse a journal with a corrupt line, before anything is appended to it. The last line may be incomplete."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                json.loads(line)["op_code"]
            except (ValueError, KeyError, TypeError):
                if line.endswith(b"\n"):
                    raise _corrupt(str(path), f"line {number} is not a record of a study") from None


class _JournalLock:
    """Optuna acquires it to append to the journal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = threading.local()

    def acquire(self) -> bool:
        self._held.lock = FolderLock(self._path.parent, grace=LOCK_SECONDS, name=f".{self._path.name}.lock")
        _remove_incomplete_line(self._path)
        return True

    def release(self) -> None:
        self._held.lock.release()


def _remove_incomplete_line(path: Path) -> None:
    """Remove an incomplete last line, which a process that was killed, or a full disk, left: it never took effect."""
    with path.open("r+b") as file:
        end = position = file.seek(0, os.SEEK_END)
        while position:
            begin = max(0, position - 4096)
            file.seek(begin)
            newline = file.read(position - begin).rfind(b"\n")
            if newline >= 0:
                position = begin + newline + 1
                break
            position = begin
        if position < end:
            file.truncate(position)
