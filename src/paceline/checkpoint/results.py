"""Copies the run folder to an object store during training, and downloads it to resume.

A background thread uploads, retries until it succeeds, and verifies what the store has; training never waits for it.
A checkpoint is valid in the store only with its commit marker, which is uploaded last.
"""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.checkpoint import store
from paceline.checkpoint.verified import COMMIT
from paceline.errors import UserError
from paceline.system.files import make_folder, replacing
from paceline.system.host import BackgroundThread
from paceline.system.logs import log
from paceline.system.progress_bar import transfer_bar
from paceline.system.remote import ObjectStore, join, last_name, redacted, save

_EVERY = 10.0  # seconds between passes
_CLOSE_TIMEOUT = 600.0
_RETRIES = 3  # per request; the next pass tries again
_MAX_ENVIRONMENT = 1 << 26  # bytes of environment.json
_BEST = "checkpoints/best"


def _open(place: str) -> ObjectStore:
    try:
        return ObjectStore(place, _RETRIES)
    except UserError:
        raise
    except Exception as error:  # obstore's exceptions have no other common base
        message = f"{redacted(place)} is not a valid object store URL ({brief(error)}). Use s3://BUCKET/PREFIX."
        raise UserError("results-url-invalid", message, url=redacted(place)) from None


class Results:
    """Uploads the run folder: all of it from rank 0, only the subfolder `only` from the first rank of other nodes."""

    def __init__(self, folder: Path, place: str, best_metric: str, only: str = "", every: float = _EVERY):
        self._folder, self._metric, self._only = folder, best_metric, only
        self._place = join(place, folder.name)
        self._store = _open(self._place)
        self._there: dict[str, tuple[int, float]] = {}
        """Size and modification time of uploaded files, by name."""
        self._best, self._failed_since = "", 0.0
        if not only:
            self._begin()
        self._stop, self._every = threading.Event(), every
        self._thread = BackgroundThread(self._work, "results")
        self._thread.start()

    def _begin(self) -> None:
        """Read what an earlier start of this run has uploaded, and refuse the results of another run.

        A store that cannot be used is an error before the first checkpoint, and a warning after it.
        """
        begun = next(store.committed(self._folder / "checkpoints"), None) is not None
        try:
            found, there = self._store.files(), b""
            if "environment.json" in found:
                with self._store.opened("environment.json") as stream:
                    there = stream.read(_MAX_ENVIRONMENT)
            if not found:
                self._store.upload("recipe.yaml", self._folder / "recipe.yaml")
        except Exception as error:  # obstore's exceptions have no other common base
            if begun:
                log.warning("uploads to %s are delayed: %s", redacted(self._place), brief(error))
                return
            raise UserError(
                "results-not-writable",
                f"results cannot be written to {redacted(self._place)} ({brief(error)}). Check the URL and the AWS_* "
                "variables, which launched jobs get with --pass.",
                url=redacted(self._place),
            ) from None
        if there and _first_start(there) != _first_start((self._folder / "environment.json").read_bytes()):
            raise UserError(
                "results-of-another-run",
                f"{redacted(self._place)} contains another run. Choose another --name or --results, or resume that run "
                f"with --resume {redacted(self._place)}.",
                url=redacted(self._place),
            )
        self._there = {name: (-1, 0.0) for name in found if name.startswith("checkpoints/step-")}
        complete = {name.split("/")[1] for name in found if name.endswith(f"/{COMMIT}")}
        here = {path.name for path in store.committed(self._folder / "checkpoints")}
        # checkpoints that are incomplete in the store are uploaded again
        for name in [name for name in self._there if name.split("/")[1] in here - complete]:
            del self._there[name]

    def _work(self) -> None:
        while not self._stop.wait(self._every):
            self._try()

    def _try(self) -> bool:
        """Upload what has changed and return whether everything is in the store now."""
        try:
            self._upload()
        except FileNotFoundError:  # an old checkpoint was deleted during the pass
            return False
        except Exception as error:  # any error of the store or the network: retry later
            if not self._failed_since:
                log.warning("uploads to %s are delayed: %s", redacted(self._place), brief(error))
            self._failed_since = self._failed_since or time.monotonic()
            return False
        if self._failed_since:
            delay = time.monotonic() - self._failed_since
            log.info("uploads to %s continue after %.0f s", redacted(self._place), delay)
            self._failed_since = 0.0
        return True

    def _upload(self) -> None:
        checkpoints = [path.name for path in store.committed(self._folder / "checkpoints")] if not self._only else []
        for path in self._changed(checkpoints):
            name = path.relative_to(self._folder).as_posix()
            state = path.stat()
            self._store.upload(name, path)
            self._there[name] = (state.st_size, state.st_mtime)
        if not self._only:
            self._copy_best()
            self._remove_old(set(checkpoints))

    def _changed(self, checkpoints: list[str]) -> Iterator[Path]:
        """Yield changed files. Records come first, so that a checkpoint in the store always has those of its steps."""
        for path in sorted((self._folder / self._only).rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if path.is_symlink() or not path.is_file() or name.startswith("checkpoints/") or path.name.startswith("."):
                continue
            state = path.stat()
            if self._there.get(name) != (state.st_size, state.st_mtime):
                yield path
        for name in checkpoints:
            folder = self._folder / "checkpoints" / name
            for path in store.files_of(folder):
                if path.relative_to(self._folder).as_posix() not in self._there:
                    yield path

    def _copy_best(self) -> None:
        """Copy the best checkpoint to a fixed name."""
        best = store.best(self._folder / "checkpoints", self._metric)
        if best is None or best.folder.name == self._best:
            return
        for path in store.files_of(best.folder):
            self._store.copy(f"checkpoints/{best.folder.name}/{path.name}", f"{_BEST}/{path.name}")
        self._best = best.folder.name

    def _remove_old(self, checkpoints: set[str]) -> None:
        old = [
            name for name in self._there if name.startswith("checkpoints/") and name.split("/")[1] not in checkpoints
        ]
        for name in sorted(old, key=lambda name: not name.endswith(COMMIT)):  # the marker first
            if name in self._there:
                self._store.delete(name)
                del self._there[name]

    def close(self) -> None:
        """Upload the rest after the run, with a time limit."""
        self._stop.set()
        self._thread.join()
        deadline, pause = time.monotonic() + _CLOSE_TIMEOUT, 1.0
        while not self._try():
            if time.monotonic() + pause > deadline:
                log.warning("the upload to %s failed; the results are in %s", redacted(self._place), self._folder)
                return
            time.sleep(pause)
            pause = min(30.0, 2 * pause)


def brief(error: Exception) -> str:
    """Return a shortened error message; the cause is often at its end."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:120]} ... {text[-160:]}"


def _first_start(environment: bytes) -> object:
    """Return the first start of a run, which identifies it."""
    try:
        return json.loads(environment)["starts"][0]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None


def download(place: str, runs: Path) -> Path:
    """Download a run folder from an object store to resume it, and return its path."""
    source = _open(place)
    target = runs / last_name(place)
    try:
        found = source.files()
    except Exception as error:  # obstore's exceptions have no other common base
        raise UserError(
            "results-unreadable",
            f"{redacted(place)} cannot be read ({brief(error)}). Check the URL and the AWS_* variables.",
            url=redacted(place),
        ) from None
    if "recipe.yaml" not in found:
        message = f"{redacted(place)} does not contain a run: recipe.yaml is missing. Check the URL."
        raise UserError("results-not-a-run", message, url=redacted(place))
    there = {name.split("/")[1] for name in found if name.endswith(f"/{COMMIT}")}
    newest = next(store.committed(target / "checkpoints"), None)
    if newest and newest.name >= max(there - {"best"}, default=""):
        return target  # the local copy is as new
    for name in found:
        if ".." in Path(name).parts or not (target / name).is_relative_to(target):
            message = f"{redacted(place)}: {name!r} is outside the run folder. Remove it from the store."
            raise UserError("results-path-unsafe", message, path=name)
    missing = [name for name, size in found.items() if _is_missing(target / name, name, size)]
    with transfer_bar() as bar:
        task = bar.add_task(f"downloading {target.name}", total=sum(found[name] for name in missing))
        for name in sorted(missing, key=lambda name: name.endswith(COMMIT)):  # the markers last
            make_folder((target / name).parent)
            with source.opened(name) as stream, replacing(target / name) as file:
                save(stream, file, advance=lambda count: bar.advance(task, count))
    return target


def _is_missing(path: Path, name: str, size: int) -> bool:
    if name.startswith(_BEST):
        return False
    is_local = path.is_file() and path.stat().st_size == size
    return not is_local or path.suffix in (".json", ".yaml")  # which may keep their size when they are rewritten
