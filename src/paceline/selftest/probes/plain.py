"""The model of a setup as a plain PyTorch loop would train it."""

import dataclasses

from torch import nn

from paceline.engine.build import Setup
from paceline.engine.build_model import build_model
from paceline.models import factory


def plain_model(setup: Setup) -> nn.Module:
    """Return a copy of the model that is neither compiled nor recomputed, with the same weights.

    Not a deepcopy: the forward passes of compiled or recomputed blocks belong to the original and use its weights.
    """
    # all weights are loaded, so none are downloaded
    recipe = dataclasses.replace(setup.recipe, model=factory.untrained(setup.recipe.model))
    model = build_model(recipe, setup.source, len(setup.source.classes), setup.timeline, setup.world)
    model.load_state_dict(setup.replica.module.state_dict())
    return model
