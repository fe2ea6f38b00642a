"""Paceline trains image classifiers on one node or many with one command, and compares the results."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Run", "compare", "load_recipe", "train"]


def __getattr__(name: str) -> Any:
    """Import paceline.api on first use, so that the command line starts fast."""
    if name in __all__:
        from paceline import api

        return getattr(api, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
