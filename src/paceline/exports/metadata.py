"""The metadata of an export: classes, preprocessing, model, recipe, data and metrics, the same in all formats.

.safetensors   JSON under the key "paceline" of the header; a timm-hub folder has it in its model.safetensors
.onnx          JSON under the key "paceline" of metadata_props, and some of it under readable keys
.pt2           the extra file "paceline.json"
"""

import copy
import json
import lzma
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import paceline
from paceline.checkpoint import schema
from paceline.checkpoint.verified import CheckpointInfo
from paceline.errors import UserError
from paceline.models.folders import LOCAL, WEIGHTS_FILE
from paceline.system.packages import needs_package
from paceline.system.remote import last_name
from paceline.system.untrusted import check_regular
from paceline.track.records import RunFolder

KEY = "paceline"
FORMAT = 1
PT2_FILE = f"{KEY}.json"
_METRICS = ("top1", "top5", "loss", "samples")
_MAX_METADATA = 1 << 26
_CORRUPT_ZIP = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, RuntimeError, EOFError)


def metadata_of(checkpoint: CheckpointInfo, parts: dict[str, Any], raw: bool) -> dict[str, Any]:
    """Return the metadata of an export of a checkpoint. `raw`: of the trained weights instead of the EMA weights."""
    progress, averaged = parts["progress"], bool(parts["ema"])
    is_measured = not (averaged and raw)  # only the EMA weights are evaluated, if there are any
    return {
        "format": FORMAT,
        "paceline": paceline.__version__,
        "weights": "ema" if averaged and not raw else "model",
        "metrics": _metrics(checkpoint) if is_measured else {},
        **{name: value for name, value in progress.items() if name not in ("scaler", "evaluations")},
        "recipe": _without_paths(progress["recipe"]),
    }


def _metrics(checkpoint: CheckpointInfo) -> dict[str, dict[str, float]]:
    """Return the metrics of a checkpoint by split; those of the test split are in the records of its run."""
    found = {"val": checkpoint.metrics} if checkpoint.metrics else {}
    run = RunFolder.of_checkpoint(checkpoint.folder)
    for record in run.records() if run else ():
        if record["kind"] == "test" and record["step"] == checkpoint.step:
            found["test"] = {name: record[name] for name in _METRICS if record.get(name) is not None}
    return found


def _without_paths(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with the last parts of its paths only, which tell others nothing but names on this machine."""
    tree = copy.deepcopy(recipe)
    for section, field in (("data", "path"), ("model", "weights")):
        if isinstance(path := tree.get(section, {}).get(field), str) and path:
            tree[section][field] = last_name(path.rstrip("/"))
    name = tree.get("model", {}).get("name")
    if isinstance(name, str) and name.startswith(LOCAL):
        tree["model"]["name"] = LOCAL + last_name(name.removeprefix(LOCAL).rstrip("/"))
    return tree


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the validated metadata of an export: a .safetensors, .onnx or .pt2 file, or a timm-hub folder.

    The file is untrusted: nothing in it is run, and no weights are read.
    """
    try:
        file = path / WEIGHTS_FILE if path.is_dir() else path
        check_regular(file)
        if (read := _READERS.get(file.suffix.lower())) is None:
            raise ValueError(f"files of exports end in {', '.join(_READERS)}")
        if (text := read(file)) is None:
            raise _without_metadata(path)
        metadata = json.loads(text)
        schema.check_metadata(metadata)
    except FileNotFoundError:
        fix = "Give a run, a checkpoint, or a file or folder that `paceline export` wrote."
        raise UserError("export-not-found", f"{file} does not exist. {fix}", path=path) from None
    except (OSError, ValueError, KeyError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {str(error)[:160]}"
        message = f"{path} was not written by `paceline export`, or is corrupt ({reason}). Export the run again."
        raise UserError("export-metadata-invalid", message, path=path) from None
    return metadata


def _without_metadata(path: Path) -> UserError:
    """Return the error for a valid file that others wrote, e.g. weights of timm."""
    fix = "Use a file that `paceline export` wrote, or a run."
    if path.suffix.lower() in ("", ".safetensors"):
        fix += f" To train from these weights: paceline train RECIPE --model.name NAME --model.weights {path}"
    message = f"{path} was not written by `paceline export`: it does not name classes and preprocessing. {fix}"
    return UserError("export-without-metadata", message, path=path)


def _from_safetensors(path: Path) -> str | None:
    import safetensors

    try:
        with safetensors.safe_open(path, "numpy") as file:
            return (file.metadata() or {}).get(KEY)
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from None


def _from_pt2(path: Path) -> bytes | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(f"/extra/{PT2_FILE}") or name == PT2_FILE]
            if not names:
                return None
            [name] = names
            if archive.getinfo(name).file_size > _MAX_METADATA:
                raise ValueError(f"{name} is too large")
            return archive.read(name)
    except _CORRUPT_ZIP as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _from_onnx(path: Path) -> str | None:
    onnx = import_onnx("onnx")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's errors have no public base
        raise ValueError(str(error)) from None
    return {entry.key: entry.value for entry in model.metadata_props}.get(KEY)


_READERS: dict[str, Any] = {".safetensors": _from_safetensors, ".pt2": _from_pt2, ".onnx": _from_onnx}


def import_onnx(name: str) -> Any:
    """Return one of the packages of the extra `onnx`."""
    from importlib import import_module

    with needs_package(name, "an ONNX file", extra="onnx"):
        return import_module(name)
