"""The files of the modules that a recipe imports: what is hashed, and what is copied to other nodes."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.config.imports import find_top_level
from paceline.errors import UserError

_CODE = (".py", ".pyi")
_DATA = (".json", ".yaml", ".yml", ".toml", ".txt", ".csv", ".typed")
_SECRET = re.compile(r"secret|credential|passw|token(?!i)|(?<![a-z])keys?(?![a-z])|id_(rsa|dsa|ecdsa|ed25519)", re.I)
_MAX_LISTED = 5  # files in a message


def sources(modules: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the file and SHA-256 of each imported module; for a package, the hash covers all files that count."""
    return {name: {"file": str(source_of(name)), "sha256": _digest_of_all(file_hashes([name]))} for name in modules}


def _digest_of_all(hashes: Mapping[str, str]) -> str:
    lines = "".join(f"{digest}  {name}\n" for name, digest in hashes.items())  # as `sha256sum` prints them
    return hashlib.sha256(lines.encode()).hexdigest()


def file_hashes(modules: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of the files of modules, those that are copied to nodes, by path from PYTHONPATH."""
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in _files(modules)}


def changed_files(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the files that differ between two results of `file_hashes`, for messages; empty if none does."""
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return ", ".join(changed[:_MAX_LISTED]) + (f" and {rest} more" if (rest := len(changed) - _MAX_LISTED) > 0 else "")


def source_of(module: str) -> Path:
    """Return the file of a top-level module, or the folder or zip file of the package that contains a module."""
    spec = find_top_level(module)
    folders = spec.submodule_search_locations  # a package without __init__.py has no origin
    place = getattr(spec.loader, "archive", None) or (next(iter(folders)) if folders else spec.origin)
    if not place or not Path(place).exists():
        raise UserError("import-without-source", f"module {module!r} has no source file.", module=module)
    return Path(place)


def files_of(modules: Sequence[str]) -> dict[str, str]:
    """Return the files of the top-level packages of modules that are copied to nodes, by path from PYTHONPATH."""
    files = {}
    for name, path in _files(modules):
        try:
            files[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            message = f"{path} is not a text file and cannot be copied to the nodes. Install the package there."
            raise UserError("extension-not-text", message, path=path) from None
    return files


def _files(modules: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files of the top-level packages of modules, in order, with their paths from PYTHONPATH."""
    for root in dict.fromkeys(map(source_of, modules)):
        paths = _below(root, (root.resolve(),)) if root.is_dir() else [root]
        yield from ((path.relative_to(root.parent).as_posix(), path) for path in paths)


def _below(folder: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the files of a package. Links that leave it are not followed: they may lead to anything on this host."""
    for path in sorted(folder.iterdir()):
        target = path.resolve()
        if path.name.startswith((".", "__pycache__")) or not target.is_relative_to(above[0]):
            continue
        if path.is_dir():
            if target not in above:  # a link to a folder above would not end
                yield from _below(path, (*above, target))
        elif path.is_file() and _counts(target.relative_to(above[0])):
            yield path


def _counts(path: Path) -> bool:
    """Return whether a file of a package is code, or data that is plainly part of it; by its name, behind any link."""
    if any(part.startswith(".") for part in path.parts):
        return False
    return path.suffix in _CODE or (path.suffix in _DATA and not _SECRET.search(str(path)))
