"""The import layers, and which heavy modules a command imports."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_imports_follow_the_layers() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    answer = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from paceline.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"argcomplete", "torch", "pydantic", "numpy", "rich", "timm"} & set(loaded)


def test_a_recipe_is_validated_without_torch() -> None:
    script = (
        "import sys; from paceline.cli.main import main; main(['train', 'digits', '--seed', 'x']); print(*sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "seed='x'" in answer.stderr, answer.stderr
    assert "torch" not in answer.stdout.split()
