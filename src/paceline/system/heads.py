"""Finds the classifiers of a model, which fine-tuning treats differently from the rest."""

from torch import nn


def classifier_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the classifiers of a model by name, found by timm's get_classifier; models with distillation have two."""
    found = getattr(model, "get_classifier", lambda: None)()
    heads = [id(head) for head in (found if isinstance(found, tuple | list) else [found])]
    return {name: module for name, module in model.named_modules() if name and id(module) in heads}
