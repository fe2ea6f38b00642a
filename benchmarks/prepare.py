"""`paceline prepare` against unpacking the archive and resizing every file with Pillow.

    python benchmarks/prepare.py --images TAR [--rounds 5]

Images per CPU second on one core, from a warm page cache to files on disk. The variants alternate round by round.
Reports medians; ratios are within a round.
"""

import argparse
import os
import statistics
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from loader import processor_seconds
from PIL import Image

from paceline.data.classes import Class
from paceline.data.pillow import MAX_BYTES
from paceline.data.prepare import pack, raw, tars
from paceline.data.prepare.convert import Variant
from paceline.system.logs import console


def unpack_and_resize(archive: Path, work: Path, side: int) -> None:
    subprocess.run(["tar", "xf", str(archive.resolve())], cwd=work, check=True)
    for path in _jpegs(work):
        image = Image.open(path).convert("RGB")
        image.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=None)
        image.save(path, "jpeg", quality=90)


def ours(archive: Path, work: Path, variant: Variant) -> None:
    def samples() -> Iterator[raw.Sample]:
        with tars.opened(str(archive)) as stream:
            for number, member in enumerate(tars.archive(stream, str(archive))):
                yield raw.Sample(number % 2, member.name, member.size, partial(member.read, MAX_BYTES))

    classes = [Class("a", "a"), Class("b", "b")]
    source = raw.RawDataset("benchmark", classes, {"train": samples}, {"train": None}, {"train": None}, parallel=False)
    pack.prepare(source, work / "out", [variant], workers=1)


def _jpegs(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, metavar="TAR", help="a tar of JPEG images")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    console.quiet = True
    with tarfile.open(options.images) as archive:
        num_images = sum(member.isfile() for member in archive)
    baseline = "tar xf, then Pillow, max 400"
    contestants: dict[str, Callable[[Path], None]] = {
        baseline: lambda work: unpack_and_resize(options.images, work, 400),
        "paceline, original size": lambda work: ours(options.images, work, Variant()),
        "paceline, max 400": lambda work: ours(options.images, work, Variant(max_side=400)),
    }
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, run in contestants.items():
            with tempfile.TemporaryDirectory() as folder:
                begin = processor_seconds()
                run(Path(folder))
                speeds[name].append(num_images / (processor_seconds() - begin))
    print(f"{num_images} images, {options.rounds} rounds; images per CPU second, ratio to {baseline}")
    for name, own in speeds.items():
        ratio = statistics.median(mine / other for mine, other in zip(own, speeds[baseline], strict=True))
        print(f"  {name:32}{statistics.median(own):8.0f}{ratio:8.2f}x")


if __name__ == "__main__":
    main()
