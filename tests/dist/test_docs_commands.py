"""Run the blocks of the documents that are marked with ```bash run: each line must succeed within seconds."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANG
from documents import blocks, documents

BLOCKS = [(page, body) for page, text in documents().items() for body in blocks(text, "bash run")]


def test_some_blocks_are_marked() -> None:
    assert BLOCKS


@pytest.mark.parametrize(("page", "body"), BLOCKS)
def test_marked_blocks_run(page: str, body: str, tmp_path: Path) -> None:
    function = f'set -eu\npaceline() {{ "{sys.executable}" -m paceline "$@"; }}\n'
    answer = subprocess.run(
        ["bash", "-c", function + body], cwd=tmp_path, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
