"""Creates the model of a recipe on this rank's device, or for sharding."""

from contextlib import suppress

import torch
from torch import nn

from paceline import extensions
from paceline.config.model import Model
from paceline.config.recipe import Recipe
from paceline.config.timeline import Timeline
from paceline.data.load.source import DataSource
from paceline.distributed.sync_batchnorm import synchronize
from paceline.distributed.world import World
from paceline.engine.model import create_model, probe
from paceline.models import factory
from paceline.models.freezing import freeze


def build_model(recipe: Recipe, source: DataSource, num_classes: int, timeline: Timeline, world: World) -> nn.Module:
    """Return the model on its device, with the same initial weights on every rank."""
    model = _created(recipe, recipe.model, source, num_classes, timeline, world)
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
    return model.to(world.device, memory_format=layout)  # type: ignore[call-overload]


def build_sharded_model(
    recipe: Recipe, source: DataSource, num_classes: int, timeline: Timeline, world: World
) -> nn.Module:
    """Return the model before it is sharded: in host memory on rank 0, without memory (meta) on others if possible.

    FSDP needs contiguous weights; images are channels_last in any case.
    """
    if not world.is_rank_zero and extensions.find("model", recipe.model.name) is None:
        # models that compute with their weights cannot be built on the meta device
        with suppress(Exception), torch.device("meta"):
            model = _created(recipe, factory.untrained(recipe.model), source, num_classes, timeline, world)
            if not any(
                isinstance(value, torch.Tensor) for module in model.modules() for value in vars(module).values()
            ):
                return model
    return _created(recipe, recipe.model, source, num_classes, timeline, world).to(
        memory_format=torch.contiguous_format  # type: ignore[call-overload]
    )


def _created(
    recipe: Recipe, config: Model, source: DataSource, num_classes: int, timeline: Timeline, world: World
) -> nn.Module:
    """Return the model on the default device, tested on an image of every size that the recipe uses."""
    model = create_model(config, recipe.seed, num_classes, source.channels)
    for size in source.sizes(timeline):
        probe(model, config.name, num_classes, source.channels, size)
    if recipe.model.sync_batchnorm and world.size > 1:
        model = synchronize(model, world)
    freeze(model, recipe.model)  # after batch norm has been replaced
    return model.train()
