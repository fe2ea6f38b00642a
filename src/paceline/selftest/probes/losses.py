"""Losses of the same training steps in several precisions, on several ranks and with FSDP, and in a plain loop."""

from typing import Any

import torch
from torch.nn import functional as F

from paceline.config.recipe import Recipe
from paceline.data.load.order import step_seed
from paceline.engine.build import Setup, build
from paceline.engine.train import train_step
from paceline.errors import UserError
from paceline.optim.schedules import lr_at
from paceline.selftest.probes import Probing
from paceline.selftest.probes.exact import exact_kernels
from paceline.selftest.probes.plain import plain_model
from paceline.selftest.settings import exact_recipe

_STEPS, _SAME_IMAGES = 6, 16


def precision(probing: Probing) -> dict[str, Any]:
    """Return the losses on the device in every precision that it supports, and of a plain fp32 loop on the CPU."""
    settings, device = probing.settings, probing.world.device
    found: dict[str, Any] = {"reference": _plain_losses(build(exact_recipe(settings), probing.world))}
    for name in _precisions(device):
        found[name] = _losses(exact_recipe(settings, name), probing)
    return found


def one_rank_losses(probing: Probing) -> dict[str, Any]:
    """Return the losses of one rank, and its loss for the images that every rank gets."""
    found: dict[str, Any] = {"same_images": _loss_of_same_images(probing)}
    return found | {"single": _losses(exact_recipe(probing.settings), probing)}


def many_rank_losses(probing: Probing) -> dict[str, Any]:
    """Return the losses of all ranks with DDP and with FSDP, and the loss of each rank for the same images."""
    settings, world = probing.settings, probing.world
    found: dict[str, Any] = {"same_images": world.all_gather_object(_loss_of_same_images(probing))}
    found["ddp"] = _losses(exact_recipe(settings, strategy="ddp"), probing)
    try:
        found["fsdp"] = _losses(exact_recipe(settings, strategy="fsdp"), probing)
    except UserError as error:
        if error.code != "fsdp-no-blocks":
            raise
        found["not_sharded"] = str(error)
    return found


def _precisions(device: torch.device) -> list[str]:
    if device.type == "cuda":
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return ["fp32", "bf16", "fp16"] if bf16 else ["fp32", "fp16"]
    return ["fp32"] if device.type == "mps" else ["fp32", "bf16"]


def _losses(recipe: Recipe, probing: Probing) -> list[float]:
    """Return the mean loss over all ranks at each step."""
    world, setup = probing.world, build(recipe, probing.world)
    batches, losses = setup.loader.steps(), []
    with exact_kernels():
        for step in range(_STEPS):
            torch.manual_seed(step_seed(recipe.seed, step, world.rank))
            result = train_step(setup, next(batches), step, lr_at(step, setup.lr_plan))
            losses.append(result.loss.detach().cpu().double())
    mean = world.sum_(torch.stack(losses)) / world.size
    return [float(loss) for loss in mean]


def _plain_losses(setup: Setup) -> list[float]:
    """Return the losses of a plain loop in fp32 on the CPU, from the same weights and with the same images."""
    model = plain_model(setup).cpu()
    optim = setup.recipe.optim
    optimizer = torch.optim.SGD(model.parameters(), optim.lr, momentum=optim.momentum, nesterov=optim.nesterov)
    batches, losses = setup.loader.steps(), []
    for step in range(_STEPS):
        torch.manual_seed(step_seed(setup.recipe.seed, step, 0))
        (batch,) = next(batches)
        images, targets = setup.objective.prepare(batch, step)
        loss = F.cross_entropy(model(images.float().cpu()), targets.cpu())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _loss_of_same_images(probing: Probing) -> float:
    """Return the loss of this rank alone for images that are the same on all ranks."""
    setup = build(exact_recipe(probing.settings), probing.world)
    (batch, *_) = next(setup.loader.steps())
    images, _ = setup.objective.prepare(batch, 0)
    generator = torch.Generator().manual_seed(0)
    same = torch.randn((_SAME_IMAGES, *images.shape[1:]), generator=generator).to(images)
    targets = torch.arange(len(same), device=same.device) % len(setup.source.classes)
    torch.manual_seed(0)
    with torch.no_grad(), exact_kernels():
        return F.cross_entropy(setup.replica.module(same).float(), targets).item()
