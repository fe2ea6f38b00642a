"""Archives laid out like those of ImageNet, with three classes of generated images."""

import io
import tarfile
from pathlib import Path

import numpy as np
import scipy.io
from sample_images import jpeg, sample_image

WNIDS = ["n00000003", "n00000001", "n00000002"]  # ILSVRC2012_ID 1, 2, 3: not sorted by WordNet id
TRUTH = [3, 1, 1, 2, 3]


def write_archives(folder: Path) -> dict[str, Path]:
    """Write the archives under their official names; return them by option of `paceline prepare imagenet`."""
    inner = {}
    for number, wnid in enumerate(WNIDS):
        images = {f"{wnid}_{image}.JPEG": jpeg(sample_image(50, 40, 10 * number + image)) for image in range(3)}
        inner[f"{wnid}.tar"] = tar(folder / f"{wnid}.tar", images).read_bytes()
    val = {f"ILSVRC2012_val_{n:08d}.JPEG": jpeg(sample_image(64, 48, 50 + n)) for n in range(len(TRUTH), 0, -1)}
    return {
        "train": tar(folder / "ILSVRC2012_img_train.tar", inner),
        "val": tar(folder / "ILSVRC2012_img_val.tar", val),
        "devkit": devkit(folder / "ILSVRC2012_devkit_t12.tar.gz"),
    }


def devkit(path: Path) -> Path:
    """Write the development kit: the classes, and the labels of the validation images."""
    rows = np.zeros(4, dtype=[("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")])
    for number, wnid in enumerate([*WNIDS, "n99999999"], start=1):
        rows[number - 1] = (number, wnid, f"thing {wnid[-1]}, other name", 0 if number <= 3 else 3)
    mat = io.BytesIO()
    scipy.io.savemat(mat, {"synsets": rows})
    files = {"meta.mat": mat.getvalue(), "ILSVRC2012_validation_ground_truth.txt": "\n".join(map(str, TRUTH)).encode()}
    return tar(path, {f"ILSVRC2012_devkit_t12/data/{name}": content for name, content in files.items()}, "w:gz")


def tar(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    """Write a tar with these files; return its path."""
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path
