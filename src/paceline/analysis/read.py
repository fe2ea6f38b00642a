"""Reads a run from a run folder or from another program's log. Needs no torch and writes nothing."""

from pathlib import Path

from paceline.analysis.folder import read_folder
from paceline.analysis.importers import read_foreign
from paceline.analysis.run import LoggedRun, NotARun
from paceline.analysis.sweeps.record import is_sweep
from paceline.errors import UserError
from paceline.system.files import printable
from paceline.system.untrusted import read_regular
from paceline.track.records import RunFolder

LOGBOOK_MARK = "<!-- written by paceline logbook -->"
_MAX_PAGE = 1 << 26
_MAX_NOTES = 100
_SEARCHES = (
    ("find-batch.json", "is-a-batch-search", "a find-batch search, not a run"),
    ("find-lr.json", "is-a-learning-rate-search", "a find-lr search, not a run"),
)


def read(path: Path) -> LoggedRun:
    """Return the run in a run folder, or in another program's log or log folder."""
    run = _read(path)
    more = len(run.notes) - _MAX_NOTES
    run.notes = [printable(note) for note in run.notes[:_MAX_NOTES]] + [f"and {more:,} more notes"] * (more > 0)
    return run


def _read(path: Path) -> LoggedRun:
    folder = RunFolder(path)
    if other := _other_output(folder):
        code, reason = other
        raise NotARun(code, f"{path} is {reason}.", path=path, reason=reason)
    if folder.exists:
        return read_folder(path)
    if not path.exists():
        raise UserError("run-not-found", f"{path} does not exist. Give run folders or other programs' logs.", path=path)
    if not path.is_dir() and not path.is_file():
        reason = "neither a regular file nor a folder"
        raise NotARun("not-a-regular-file", f"{path} is {reason}.", path=path, reason=reason)
    if runs := sorted(recipe.parent.name for recipe in path.glob("*/recipe.yaml")):
        names = f"{', '.join(runs[:5])}{' ...' if runs[5:] else ''}"
        raise UserError("folder-of-runs", f"{path} contains runs ({names}). Give the runs themselves.", path=path)
    try:
        return read_foreign(path)
    except NotARun:
        if folder.metrics.is_file() or folder.environment.is_file():
            message = f"{path} is an incomplete run folder: recipe.yaml is missing. Copy the run folder again."
            raise UserError("run-incomplete", message, path=path) from None
        raise


def _other_output(folder: RunFolder) -> tuple[str, str] | None:
    """Return an error code and a description if another command of paceline wrote this path."""
    path = folder.path
    for result, code, reason in _SEARCHES:
        searched = path.name.startswith(result.replace(".json", "-")) or (path / result).is_file()
        if searched and path.is_dir() and not folder.environment.exists():
            return code, reason
    if is_sweep(path):
        return "is-a-sweep", "a sweep, not a run"
    if any(_contains(path / page, LOGBOOK_MARK) for page in ("index.md", "README.md")):
        return "is-a-logbook", "a logbook, not a run"
    if path.suffix == ".html" and path.is_file():
        return "is-a-web-page", "a web page, not a run"
    return None


def _contains(path: Path, text: str) -> bool:
    try:
        return text.encode() in read_regular(path, _MAX_PAGE)
    except OSError:
        return False
