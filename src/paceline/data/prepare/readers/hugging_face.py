"""Hugging Face datasets, from the Hub or saved in a folder. Images are read as files: JPEGs stay as they are."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from paceline.data.assign import in_order
from paceline.data.pillow import MAX_BYTES
from paceline.data.prepare.raw import UNKNOWN_SIZE, RawImage, SourceImages
from paceline.data.splits import named_splits, split_named
from paceline.errors import UserError
from paceline.system.logs import log
from paceline.system.packages import needs_package
from paceline.system.untrusted import read_regular
from paceline.system.wording import counted

_LABELS = ("label", "labels", "class", "category", "target")
_BATCH = 4096  # rows listed at a time
_UNLABELED = -1


def is_saved_dataset(path: Path) -> bool:
    """Whether `Dataset.save_to_disk` wrote a folder."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def hugging_face(source: str, image_column: str = "", label_column: str = "") -> SourceImages:
    """Return the images of hf:NAME or hf:NAME:CONFIG, or of a folder that `save_to_disk` wrote."""
    entries: list[RawImage] = []
    names: dict[str, None] = {}
    loaded = _loaded(source)
    known = named_splits(loaded, source).values()
    others = [name for name in loaded if name and name not in known]
    for name, rows in loaded.items():
        if name in others and len(loaded) > 1:
            continue
        table = _Table(source, name, rows, *_columns(source, name, rows, image_column, label_column))
        names |= dict.fromkeys(table.names)
        entries += table.images()
    if others and len(loaded) > 1:
        log.warning("%s: the splits %s are not used; train, validation and test are", source, ", ".join(others))
    used = {entry.label for entry in entries}
    if absent := [name for name in names if name not in used]:
        classes = counted(len(absent), "class", "classes")
        log.warning("%s: left out %s without images: %s", source, classes, ", ".join(absent[:5]))
    return SourceImages(entries, [name for name in names if name in used] or in_order(used))


def _loaded(source: str) -> dict[str, Any]:
    """Return the dataset of each split; the name is empty if it has no splits."""
    with needs_package("datasets", source, extra="hf"):
        import datasets
    name, _, config = source.removeprefix("hf:").partition(":")
    try:
        if source.startswith("hf:"):
            found = datasets.load_dataset(name, config or None)
        else:
            found = datasets.load_from_disk(source)
    except Exception as error:  # of the Hub, the network, pyarrow, and scripts that are no longer supported
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        fix = "Use a folder that `Dataset.save_to_disk` wrote."
        if source.startswith("hf:"):
            fix = (
                "Check the name (hf:NAME or hf:NAME:CONFIG) and the network; private datasets need HF_TOKEN. Without a "
                f'network, run datasets.load_dataset("{name}").save_to_disk("DIR") on another machine, copy the folder '
                'and run "paceline prepare DIR".'
            )
        raise UserError("hf-unreadable", f"{source} cannot be loaded ({reason}). {fix}", source=source) from None
    return dict(found) if isinstance(found, dict) else {"": found}


def _columns(source: str, split: str, rows: Any, image: str, label: str) -> tuple[str, str]:
    """Return the columns of images and labels: those given, else the only ones that can be meant."""
    from datasets import ClassLabel, Image, Value

    features: Mapping[str, Any] = rows.features
    place = f"{source}{f' ({split})' if split else ''}"
    if not image:
        image = _only(place, features, "image", [name for name, kind in features.items() if isinstance(kind, Image)])
    if not label:
        found = [name for name, kind in features.items() if isinstance(kind, ClassLabel)]
        plain = [name for name, kind in features.items() if isinstance(kind, Value) and name.lower() in _LABELS]
        label = _only(place, features, "label", found or plain)
    for kind, name in (("image", image), ("label", label)):
        if name not in features:
            message = f"{place} has no column {name!r}, but {', '.join(features)}. Fix --{kind}-column."
            raise UserError("hf-column-missing", message, source=source, column=name)
    allowed = features[label].dtype if isinstance(features[label], ClassLabel | Value) else ""
    if not (allowed.startswith(("int", "uint")) or allowed in ("string", "large_string")):
        message = (
            f"{place}: the column {label} holds {features[label]}, not class names or numbers. Use --label-column."
        )
        raise UserError("hf-column-invalid", message, source=source, column=label)
    return image, label


def _only(place: str, features: Mapping[str, Any], kind: str, found: list[str]) -> str:
    if len(found) == 1:
        return found[0]
    problem = f"several {kind} columns: {', '.join(found)}" if found else f"no {kind} column, but {', '.join(features)}"
    message = f"{place} has {problem}. Name one with --{kind}-column."
    raise UserError("hf-column-ambiguous" if found else "hf-column-missing", message, column=kind)


@dataclass(frozen=True)
class _Table:
    """One split. Rows are read in Arrow's format, in which images are not decoded."""

    source: str
    split: str
    rows: Any
    image: str
    label: str

    @property
    def names(self) -> list[str]:
        """The names of the classes, if the column knows them."""
        return list(getattr(self.rows.features[self.label], "names", None) or ())

    def images(self) -> list[RawImage]:
        labels, found = self.names, []
        images = self.rows.select_columns([self.image]).with_format("arrow")
        unlabeled = 0
        for number, (label, size, path) in enumerate(self._listed()):
            if label is None or label == _UNLABELED:
                unlabeled += 1
                continue
            name = f"{self.split or 'images'}/{number:06d}" + (f"-{Path(path).name}" if path else "")
            file = self._file(path) if path and size <= 0 else None
            text = self._class(label, labels, number)
            found.append(RawImage(name, text, partial(_content, images, number, file), split_named(self.split), size))
        if unlabeled and found:
            problem = f"{counted(unlabeled, 'image')} without a label"
            message = f"{self.source}: {self.split or 'it'} has {problem}. Remove such images first."
            raise UserError("image-without-class", message, source=self.source, split=self.split)
        if unlabeled:
            log.warning("%s: the images of %s have no labels; they are not used", self.source, self.split)
        return found

    def _class(self, label: Any, names: list[str], number: int) -> str:
        text = ""
        if isinstance(label, str) or label >= 0:  # Python would count a negative one from the end
            text = str(label) if not names else names[label] if label < len(names) else ""
        if not text.strip():
            known = f"0 to {len(names) - 1}" if names else "a name or a number from 0"
            message = (
                f"{self.source}: row {number} of {self.split or 'it'} has the label {label!r:.40}. It must be {known}; "
                f"{_UNLABELED} means that it is missing."
            )
            raise UserError("hf-label-invalid", message, source=self.source, row=number)
        return text if names else text.strip()

    @cached_property
    def _roots(self) -> list[Path]:
        """The folder of the dataset, if it has one, and the caches of datasets."""
        from datasets import config
        from huggingface_hub.constants import HF_HUB_CACHE

        folder = Path(self.source.removeprefix("hf:"))
        caches = (config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, HF_HUB_CACHE)
        return [Path(place).resolve() for place in ((folder,) if folder.is_dir() else ()) + caches]

    def _file(self, path: str) -> Path:
        """Return a file that a row names. An untrusted table could name any image of this machine."""
        file = (self._roots[0] / path).resolve()
        if not any(file.is_relative_to(root) for root in self._roots):
            message = (
                f"{self.source}: a row names {path}, which is neither in the dataset's folder nor in the cache of "
                "datasets. Save it with its images: Dataset.save_to_disk embeds them."
            )
            raise UserError("hf-path-outside", message, source=self.source, path=path)
        return file

    def _listed(self) -> Iterator[tuple[Any, int, str | None]]:
        """Yield label, size in bytes and path of every image."""
        from pyarrow import compute, types

        table = self.rows.select_columns([self.image, self.label]).with_format("arrow")
        for begin in range(0, len(self.rows), _BATCH):
            part = table[begin : begin + _BATCH]
            images = part.column(self.image)
            paths: list[str | None] = [None] * len(part)
            if types.is_struct(images.type):
                paths = compute.struct_field(images, "path").to_pylist()
                images = compute.struct_field(images, "bytes")
            if not (types.is_binary(images.type) or types.is_large_binary(images.type)):
                message = f"{self.source}: the column {self.image} holds {images.type}, not images. Use --image-column."
                raise UserError("hf-column-invalid", message, source=self.source, column=self.image)
            sizes = compute.fill_null(compute.binary_length(images), UNKNOWN_SIZE).to_pylist()
            yield from zip(part.column(self.label).to_pylist(), sizes, paths, strict=True)


def _content(images: Any, number: int, file: Path | None) -> bytes:
    """Return the image file in a row. Its bytes are in the table, or in a file that the table names."""
    value = images[number].column(0)[0].as_py()
    if isinstance(value, dict):
        value = value["bytes"] or (read_regular(file, MAX_BYTES) if file else None)
    if value is None:
        raise OSError("the row has no image")
    return bytes(value)
