"""The random numbers that augmentation draws, for the code of other libraries to use."""

from types import ModuleType
from typing import Any

import pytest
import torch

from paceline.data.load.order import uniform


def record_numbers(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return a list to which every draw of a module adds its numbers."""
    numbers: list[torch.Tensor] = []

    def recording(*arguments: Any) -> torch.Tensor:
        numbers.append(uniform(*arguments))
        return numbers[-1].clone()

    monkeypatch.setattr(module, "uniform", recording)
    return numbers
