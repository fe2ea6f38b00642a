"""The message of tests that notice a change in torch."""

import torch


def changed(name: str, package: str = "torch") -> str:
    """Return the message of a failure."""
    version = torch.__version__ if package == "torch" else __import__(package).__version__
    return f"{package} {version} changed {name}: adapt src/paceline/system/torch_internals/"
