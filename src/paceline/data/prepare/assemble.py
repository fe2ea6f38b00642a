"""The last step of a preparation: what was noted for each shard becomes the index and the description."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.description import DESCRIPTION, FORMAT, LISTS, MOST_REMARKS, sealed
from paceline.data.files import file_entry, write_array
from paceline.data.index import INDEX
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.sources import Source
from paceline.errors import UserError
from paceline.system.files import replacing, write_json, write_text

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
    for split in source.splits:
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((out / PARTS / split).glob("*.json"))]
        entries = [(number, entry) for number, part in enumerate(parts) for entry in part["entries"]]
        remarked = [entry for _, entry in entries if "remark" in entry]
        remarks += [{"split": split, "file": entry["name"], "what": entry["remark"]} for entry in remarked]
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
            "remarks": len(remarked),
            "per_class": np.bincount(labels, minlength=len(source.classes)).tolist(),
        }
        names = "".join(_line(entry["name"]) for _, entry in kept)
        for position, variant in enumerate(variants):
            rows = [_row(number, entry["label"], entry["places"][position]) for number, entry in kept]
            folder = out / variant.name / split
            with replacing(folder / "index.npy") as file:
                write_array(file, np.array(rows, INDEX))
            write_text(folder / "names.txt", names)
            shards = [part["shards"][position] for part in parts]
            described[variant.name]["splits"][split] = {
                "bytes": sum(shard["bytes"] for shard in shards),
                "shards": shards,
                "lists": [file_entry(folder / name) for name in LISTS],
            }
    remarks.sort(key=lambda remark: not remark["what"].startswith(LEFT_OUT))  # listed first, should there be too many
    description = {
        "kind": "shards",
        "format": FORMAT,
        "name": source.name,
        "classes": [vars(entry) for entry in source.classes],
        "splits": splits,
        "variants": described,
        "remarks": remarks[:MOST_REMARKS],
        "prepared": plan,
    }
    write_json(out / DESCRIPTION, sealed(description))
    shutil.rmtree(out / PARTS)


def _lost(source: Source, split: str, lost: list[int], entries: list[dict[str, Any]]) -> str:
    names = ", ".join(source.classes[label].name for label in lost[:5]) + (", ..." if lost[5:] else "")
    files = "\n  ".join(f"{entry['name']}: {entry['remark'].removeprefix(LEFT_OUT)}" for entry in entries[:10])
    return (
        f"not one {split} image of {len(lost)} class{'es' * (len(lost) > 1)} could be read ({names}):\n  {files}\n"
        "replace these files and prepare again into an empty folder, or prepare the rest with --allow-empty-classes"
    )


def _row(shard: int, label: int, place: list[int]) -> tuple[int, ...]:
    offset, length, width, height = place
    return offset, length, shard, label, width, height


def _line(name: str) -> str:
    return " ".join(name.splitlines()).encode(errors="replace").decode() + "\n"
