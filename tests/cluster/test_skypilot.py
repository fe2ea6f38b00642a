"""Manifests for SkyPilot, read by SkyPilot itself, which has its own virtual environment."""

import subprocess
from pathlib import Path

import pytest
from conftest import HANG

PYTHON = Path(__file__).parents[2] / ".venv-sky" / "bin" / "python"
READ = """
import sys, sky
for path in sys.argv[1:]:
    task = sky.Task.from_yaml(path)
    print(task.num_nodes, sorted(map(str, task.resources)), task.workdir)
"""


@pytest.mark.skipif(not PYTHON.exists(), reason="needs SkyPilot in .venv-sky: make cluster installs it")
def test_skypilot_reads_the_task(here, tmp_path: Path) -> None:
    shape = ("--nodes", 2, "--procs", 4, "--gpus-per-node", 4, "--gpu-type", "A100")
    options = {"image": ("--image", "me/paceline:1"), "plain": ("--results", "s3://bucket/prefix")}
    files = []
    for name, words in options.items():
        answer = here("launch", "manifest", "--for", "skypilot", *shape, "imagenet-rn18-2ep", *words)
        assert answer.returncode == 0, answer.stderr
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(answer.stdout)
    files.append(tmp_path / "wrong.yaml")
    files[-1].write_text(files[0].read_text().replace("num_nodes", "number_of_nodes"))

    def read(*paths: Path) -> subprocess.CompletedProcess[str]:
        env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        command = [str(PYTHON), "-c", READ, *map(str, paths)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG)

    result = read(*files[:2])
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first.startswith("2 ")
    assert "A100" in first
    assert "me/paceline:1" in first
    assert second.endswith(str(Path(__file__).parents[2]))  # the checkout is copied
    assert read(files[2]).returncode != 0
