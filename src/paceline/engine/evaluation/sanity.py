"""Detects failing runs from the metrics of an evaluation."""

import math
from typing import Any

_EARLY = 0.25
"""Fraction of a run during which chance-level accuracy is normal."""


def sanity_warnings(evaluated: dict[str, Any], num_classes: int, progress: float) -> dict[str, str]:
    """Return warnings about an evaluation, by reason. `progress` is the completed fraction of the run."""
    found = {}
    uniform = math.log(num_classes)
    if evaluated["loss"] > 3 * uniform + 2:
        found["diverging"] = (
            f"validation loss {evaluated['loss']:.4g} is far above that of uniform predictions ({uniform:.2f}): "
            "training diverges. Try a lower --optim.lr, a longer --optim.schedule.warmup, or --optim.clip_grad_norm 1."
        )
    chance, samples = evaluated["chance"], evaluated["samples"]
    error = math.sqrt(chance * (1 - chance) / samples)
    if progress >= _EARLY and evaluated["top1"] <= min(chance + error, 0.99):
        found["chance"] = (
            f"validation top-1 {evaluated['top1']:.2%} is not clearly above chance level (always predicting the most "
            f"frequent class gives {chance:.2%}); the model predicts {evaluated['predicted']} of {num_classes} "
            "classes. Check the labels, the learning rate and model.weights."
        )
    return found
