"""The last step of a preparation: turns the notes on each shard into the index and dataset.json."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.description import DESCRIPTION, FORMAT, LEFT_OUT, LISTS, MAX_REMARKS, sealed
from paceline.data.files import file_entry, write_array
from paceline.data.index import INDEX
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.raw import RawDataset
from paceline.errors import UserError
from paceline.system.files import replacing, write_json, write_text
from paceline.system.wording import counted

PARTS = ".parts"  # the folder for notes of an unfinished preparation


def assemble(
    source: RawDataset, out: Path, variants: list[Variant], plan: dict[str, Any], allow_empty_classes: bool
) -> None:
    """Write indexes and names from the parts of all shards, then dataset.json."""
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
            message = f"{source.name}: no image of {split} could be read. See {out / PARTS / split} for the reasons."
            raise UserError("no-readable-images", message, split=split)
        labels = [entry["label"] for _, entry in kept]
        lost = sorted({entry["label"] for _, entry in entries} - set(labels))
        if lost and not allow_empty_classes:
            raise _unreadable_classes(source, split, lost, [entry for _, entry in entries if entry["label"] in lost])
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
    remarks.sort(key=lambda remark: not remark["what"].startswith(LEFT_OUT))  # kept if there are too many remarks
    description = {
        "kind": "shards",
        "format": FORMAT,
        "name": source.name,
        "classes": [vars(entry) for entry in source.classes],
        "splits": splits,
        "variants": described,
        "remarks": remarks[:MAX_REMARKS],
        "prepared": plan,
    }
    write_json(out / DESCRIPTION, sealed(description))
    shutil.rmtree(out / PARTS)


def _unreadable_classes(source: RawDataset, split: str, lost: list[int], entries: list[dict[str, Any]]) -> UserError:
    classes = [source.classes[label].name for label in lost]
    names = ", ".join(classes[:5]) + (", ..." if classes[5:] else "")
    files = "\n  ".join(f"{entry['name']}: {entry['remark'].removeprefix(LEFT_OUT)}" for entry in entries[:10])
    return UserError(
        "unreadable-classes",
        f"no {split} image of {counted(len(lost), 'class', 'classes')} could be read ({names}):\n  {files}\n"
        "Replace these files and prepare into an empty folder, or prepare the rest with --allow-empty-classes.",
        classes=classes,
        split=split,
    )


def _row(shard: int, label: int, place: list[int]) -> tuple[int, ...]:
    offset, length, width, height = place
    return offset, length, shard, label, width, height


def _line(name: str) -> str:
    return " ".join(name.splitlines()).encode(errors="replace").decode() + "\n"
