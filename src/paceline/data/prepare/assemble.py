"""The last step of a preparation: what was noted for each shard becomes the index and the description."""

import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from paceline.base.files import replacing, sha256, write_json, write_text
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.sources import Source
from paceline.data.shards import DESCRIPTION, FORMAT, INDEX, LISTS
from paceline.errors import UserError

PARTS = ".parts"  # where a preparation under way keeps its notes
LEFT_OUT = "left out: "
"""How the remark on a file begins that nothing could be made of."""


def assemble(
    source: Source, out: Path, variants: list[Variant], plan: dict[str, Any], allow_empty_classes: bool
) -> None:
    """Turn the parts of all shards into indexes and names, and write dataset.json last."""
    remarks: list[dict[str, str]] = []
    splits: dict[str, Any] = {}
    described: dict[str, Any] = {variant.name: {**vars(variant), "splits": {}} for variant in variants}
    fingerprint = hashlib.sha256(json.dumps([vars(entry) for entry in source.classes]).encode())
    for split in source.splits:
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((out / PARTS / split).glob("*.json"))]
        entries = [(number, entry) for number, part in enumerate(parts) for entry in part["entries"]]
        remarks += [
            {"split": split, "file": entry["name"], "what": entry["remark"]}
            for _, entry in entries
            if "remark" in entry
        ]
        kept = [(number, entry) for number, entry in entries if "places" in entry]
        if not kept:
            raise UserError(f"{source.name}: not one image of {split} could be read; see {out / PARTS / split}")
        labels = [entry["label"] for _, entry in kept]
        lost = sorted({entry["label"] for _, entry in entries} - set(labels))
        if lost and not allow_empty_classes:
            raise UserError(_lost(source, split, lost, [entry for _, entry in entries if entry["label"] in lost]))
        splits[split] = {
            "samples": len(kept),
            "left_out": len(entries) - len(kept),
            "per_class": np.bincount(labels, minlength=len(source.classes)).tolist(),
        }
        names = "".join(_line(entry["name"]) for _, entry in kept)
        for position, variant in enumerate(variants):
            rows = [_row(number, entry["label"], entry["places"][position]) for number, entry in kept]
            folder = out / variant.name / split
            write_array(folder / "index.npy", np.array(rows, INDEX))
            write_text(folder / "names.txt", names)
            shards = [part["shards"][position] for part in parts]
            described[variant.name]["splits"][split] = {
                "bytes": sum(shard["bytes"] for shard in shards),
                "shards": shards,
                "lists": [_file(folder / name) for name in LISTS],
            }
            for file in [*described[variant.name]["splits"][split]["lists"], *shards]:
                fingerprint.update(file["sha256"].encode())
    description = {
        "kind": "shards",
        "format": FORMAT,
        "name": source.name,
        "fingerprint": fingerprint.hexdigest()[:16],
        "classes": [vars(entry) for entry in source.classes],
        "splits": splits,
        "variants": described,
        "remarks": remarks,
        "prepared": plan,
    }
    write_json(out / DESCRIPTION, description)
    shutil.rmtree(out / PARTS)


def write_array(path: Path, array: np.ndarray) -> None:
    """As .npy; numpy would write to a file past Python, and not tell what is wrong with a full disk."""
    content = io.BytesIO()
    np.save(content, array)
    with replacing(path) as file:
        file.write(content.getbuffer())


def _lost(source: Source, split: str, lost: list[int], entries: list[dict[str, Any]]) -> str:
    names = ", ".join(source.classes[label].name for label in lost[:5]) + (", ..." if lost[5:] else "")
    files = "\n  ".join(f"{entry['name']}: {entry['remark'].removeprefix(LEFT_OUT)}" for entry in entries[:10])
    return (
        f"not one {split} image of {len(lost)} class{'es' * (len(lost) > 1)} could be read ({names}):\n  {files}\n"
        "replace these files and prepare again into an empty folder, or prepare the rest with --allow-empty-classes"
    )


def _file(path: Path) -> dict[str, Any]:
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def _row(shard: int, label: int, place: list[int]) -> tuple[int, ...]:
    offset, length, width, height = place
    return offset, length, shard, label, width, height


def _line(name: str) -> str:
    return " ".join(name.splitlines()).encode(errors="replace").decode() + "\n"
