"""The native codec on corrupt records and JPEGs, under the sanitizers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sample_images import KINDS, jpeg, sample_image

from paceline.data import codec

NATIVE = Path(codec.__file__).parent / "native"


def test_corrupt_input_never_reads_or_writes_out_of_bounds(tmp_path: Path) -> None:
    """Twenty thousand corrupt records and as many JPEGs, under the sanitizers."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    sources = [str(path) for path in NATIVE.glob("*.c") if path.name != "api.c"]
    flags = ["-std=c11", "-O1", "-g", "-D_GNU_SOURCE", "-ffp-contract=off", "-fsanitize=address,undefined"]
    flags += ["-fno-sanitize-recover=all", f"-I{NATIVE}", "-o", str(tmp_path / "fuzz")]
    command = [str(compiler), *flags, str(Path(__file__).parents[1] / "native" / "fuzz.c"), *sources, "-lm"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode and ("asan" in built.stderr or "unrecognized" in built.stderr or sys.platform != "linux"):
        pytest.skip(f"the compiler has no sanitizers (install libasan): {built.stderr[-200:]}")
    assert built.returncode == 0, built.stderr
    files = []
    for number, options in enumerate(KINDS):
        choice = dict(options)
        path = tmp_path / f"{number}.jpg"
        path.write_bytes(jpeg(sample_image(90 + 10 * number, 60, number, str(choice.pop("mode", "RGB"))), **choice))
        files.append(str(path))
    rounds = 20_000 // len(files) + 1
    answer = subprocess.run([str(tmp_path / "fuzz"), str(rounds), *files], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    bad_records, bad_jpegs = map(int, answer.stdout.split())
    assert min(bad_records, bad_jpegs) > 1000  # enough of them were indeed corrupt
