"""Paceline trains image classifiers on one machine or many with one command, and hands back the evidence."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Run", "compare", "load_recipe", "train"]


def __getattr__(name: str) -> Any:
    """The functions of paceline.api, loaded when they are asked for: the command line has to start at once."""
    if name in __all__:
        from paceline import api

        return getattr(api, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
