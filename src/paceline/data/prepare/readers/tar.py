"""A tar of a sorted tree, read as a stream: it may be compressed, and at an https:// or s3:// URL."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from paceline.data.pillow import MAX_BYTES
from paceline.data.prepare.raw import RawImage, SourceImages
from paceline.data.prepare.readers.trees import is_image, sort_tree
from paceline.data.prepare.tars import Member, archive, opened
from paceline.errors import UserError
from paceline.system.logs import log
from paceline.system.remote import redacted
from paceline.system.wording import counted

TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_LABELS = (".cls", ".json", ".txt")


def tar(source: str) -> SourceImages:
    """Return the images of a tar with CLASS/IMAGE or SPLIT/CLASS/IMAGE."""
    place = redacted(source)
    log.info("listing %s", place)
    sizes: dict[str, int] = {}
    names: list[str] = []
    for member in members(source):
        names.append(member.path)
        sizes[member.path] = member.size
    try:
        found = sort_tree(names, place, top_folder=True)
    except UserError as error:
        if error.code == "image-without-class" and any(name.endswith(_LABELS) for name in names):
            fix = f'For WebDataset shards run "paceline prepare webdataset {place}".'
            raise UserError(error.code, f"{error} {fix}", **error.fields) from None
        raise
    if not found:
        problem = f"{place} contains no images ({counted(len(names), 'file')})."
        raise UserError("source-empty", f"{problem} Give a tar with CLASS/IMAGE or SPLIT/CLASS/IMAGE.", path=place)
    return SourceImages(
        [RawImage(name, label, split=split, size=sizes[name]) for name, split, label in found],
        sorted({label for _, _, label in found}),
        stream=partial(_stream, source, [name for name, _, _ in found]),
    )


def members(place: str) -> Iterator[Member]:
    """Yield the files of a tar."""
    with opened(place) as stream:
        yield from archive(stream, redacted(place))


def _stream(source: str, names: Sequence[str], wanted: Sequence[int]) -> Iterator[Callable[[], bytes]]:
    chosen = {names[number] for number in wanted}
    yield from contents(source, (member for member in members(source) if is_image(member.path)), chosen)


def contents(source: str, found: Iterator[Member], chosen: set[str]) -> Iterator[Callable[[], bytes]]:
    """Yield a function that reads each of the chosen members, in their order."""
    left = len(chosen)
    for member in found:
        if member.path in chosen:
            left -= 1
            yield partial(member.read, MAX_BYTES)
            if not left:
                return
    message = f"{redacted(source)} changed while it was read: {counted(left, 'image')} missing. Run the command again."
    raise UserError("source-changed", message, path=redacted(source))
