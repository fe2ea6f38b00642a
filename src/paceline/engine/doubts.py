"""What looks like a failed training in the figures of an evaluation."""

import math
from typing import Any

_EARLY = 0.25
"""Share of a training that may pass at chance level."""


def doubts(evaluated: dict[str, Any], num_classes: int, progress: float) -> dict[str, str]:
    """What is wrong with an evaluation's figures, by reason; `progress`: the share of the training that is done."""
    found = {}
    guessing = math.log(num_classes)
    if evaluated["loss"] > 3 * guessing + 2:
        found["diverging"] = (
            f"validation loss {evaluated['loss']:.4g} is far above that of uniform predictions ({guessing:.2f}): "
            "training diverges; try a lower --optim.lr, a longer --optim.schedule.warmup, or --optim.clip_grad_norm 1"
        )
    chance, samples = evaluated["chance"], evaluated["samples"]
    error = math.sqrt(chance * (1 - chance) / samples)
    if progress >= _EARLY and evaluated["top1"] <= min(chance + error, 0.99):
        found["chance"] = (
            f"validation top-1 {evaluated['top1']:.2%} is at chance level (always predicting the most frequent "
            f"class gives {chance:.2%}); the model predicts {evaluated['predicted']} of {num_classes} classes; check "
            "the labels, the learning rate and model.weights"
        )
    return found
