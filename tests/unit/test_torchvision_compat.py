"""torchvision next to a torch that its operators fit or do not fit, each in a new process."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment

# what a torchvision wheel does on import: load its operators if they fit, then register fake kernels for them
STUB = {
    "version.py": "__version__ = '0.28.0+cu130'\n",
    "__init__.py": "from . import extension\nfrom torchvision import _meta_registrations\n",
    "_meta_registrations.py": (
        "import torch\n"
        "@torch.library.register_fake('torchvision::nms')\n"
        "def nms(dets, scores, iou_threshold): return dets\n"
        "@torch.library.register_fake('torchvision::qnms')\n"
        "def qnms(dets, scores, iou_threshold, scale, zero_point): return dets\n"
    ),
}
LOADS = """import torch
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold, float scale, int zero_point) -> Tensor")
library.impl("nms", lambda dets, scores, iou_threshold: torch.tensor([7]), "CompositeExplicitAutograd")
"""
CALL = "print(torch.ops.torchvision.nms(torch.zeros(1, 4), torch.zeros(1), 0.5).tolist())"


def run(script: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    # plain torch: Paceline's part is only what `import torch` calls through the entry point
    variables = environment() | {"PYTHONPATH": ":".join(map(str, folders)), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=False)


def stub(folder: Path, extension: str) -> Path:
    (folder / "torchvision").mkdir()
    for name, text in (STUB | {"extension.py": extension}).items():
        (folder / "torchvision" / name).write_text(text)
    return folder


@pytest.mark.parametrize("call", ["", "from paceline.system.torchvision_compat import allow_torchvision as a; a(); "])
def test_operators_that_torchvision_loaded_are_not_declared_again(tmp_path: Path, call: str) -> None:
    """As with ROCm, on macOS and with the CPU wheels of PyTorch, where torch has no CUDA version either."""
    answer = run(f"import torch; {call}import torchvision; {call}{CALL}", stub(tmp_path, LOADS))
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == "[7]"


def test_operators_that_did_not_load_are_declared(tmp_path: Path) -> None:
    answer = run("import torch, torchvision; print(torch.ops.torchvision.qnms)", stub(tmp_path, ""))
    assert answer.stdout.strip() == "torchvision.qnms", answer.stderr


def test_the_installed_torchvision_and_timm_can_be_imported() -> None:
    answer = run("import torch, torchvision, timm; print(torch.ops.torchvision.nms)")
    assert answer.stdout.strip() == "torchvision.nms", answer.stderr


def test_importing_torch_does_not_import_torchvision() -> None:
    answer = run("import torch, sys; print('torchvision' in sys.modules, sys.meta_path[0].__class__.__module__)")
    assert answer.stdout.split() == ["False", "paceline.system.torchvision_compat"], answer.stderr
