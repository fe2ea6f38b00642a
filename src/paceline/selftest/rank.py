"""Runs probes in a rank process, and sends their figures to the selftest as lines of JSON."""

import json
import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from paceline.config.imports import load_imports
from paceline.distributed.world import World
from paceline.selftest.probes import PROBES, Probing, measure
from paceline.selftest.probes.facts import num_gpus
from paceline.selftest.settings import Settings, exact_recipe
from paceline.system import logs


def run_probes(names: Sequence[str], settings: Settings) -> None:
    """Run probes on this rank; rank 0 prints their figures."""
    world = World.from_env(settings.device)
    settings = settings.resolved(world.device.type, num_gpus(world.device))
    logs.set_up(1, 2)  # warnings only
    recipe = exact_recipe(settings)
    load_imports(recipe)
    connects_itself = world.size > 1 and any(PROBES[name].own_session for name in names)
    with nullcontext() if connects_itself else world.connected():
        for name in names:
            if recipe.compile:
                torch.compiler.reset()  # otherwise torch does not compile code that has run under `syncs`
            begin = time.perf_counter()
            figures = measure(name, Probing(world, settings))
            if world.is_rank_zero:
                seconds = time.perf_counter() - begin
                print(json.dumps({"probe": name, "seconds": seconds, "figures": figures}), flush=True)
