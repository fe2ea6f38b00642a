"""Any timm model, or this project's own small net, with its head fitted to the data."""

import dataclasses
import difflib
import socket
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from paceline.config.recipe import Model
from paceline.errors import UserError
from paceline.models.airbench import AirbenchNet
from paceline.system.logs import log
from paceline.system.torchvision_compat import allow_torchvision

_NOT_OPTIONS = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay")
"""Arguments of timm that name files of weights: some versions of it would unpickle them, which can run code."""


def create(config: Model, num_classes: int, channels: int) -> nn.Module:
    """Build the model with the weights the recipe asks for."""
    if refused := [name for name in _NOT_OPTIONS if name in config.options]:
        raise UserError(f"model.options.{refused[0]} is not an option here; set model.weights to the file instead")
    pretrained = config.weights == "pretrained"
    if config.name == "airbench":
        if pretrained:
            raise UserError("model.weights=pretrained: airbench has no published weights; use random or a file")
        model: nn.Module = _build(AirbenchNet, config, num_classes=num_classes, in_chans=channels)
    else:
        model = _timm(config, num_classes, channels, pretrained)
    if config.head_init_std and config.weights == "random":
        _draw_head(model, config)
    if config.weights not in ("random", "pretrained"):
        _load_file(model, Path(config.weights))
    return model


def untrained(config: Model) -> Model:
    """The same model from random weights: for when only its shape counts."""
    return dataclasses.replace(config, weights="random", head_init_std=0.0)


def _draw_head(model: nn.Module, config: Model) -> None:
    classifier: Any = getattr(model, "get_classifier", lambda: None)()
    if not isinstance(classifier, nn.Linear):
        raise UserError(
            f"model.head_init_std={config.head_init_std}: {config.name} has no linear classifier; set it to 0"
        )
    nn.init.normal_(classifier.weight, std=config.head_init_std)
    if classifier.bias is not None:
        nn.init.zeros_(classifier.bias)


def _timm(config: Model, num_classes: int, channels: int, pretrained: bool) -> nn.Module:
    allow_torchvision()
    import timm

    known = config.name.startswith(("hf-hub:", "local-dir:")) or timm.is_model(config.name)
    if not known:
        close = difflib.get_close_matches(config.name, ["airbench", *timm.list_models()], n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "timm.list_models() names them all"
        raise UserError(f"model.name={config.name!r} is no timm model; {hint}")
    if pretrained:
        _look_for_the_hub()
    try:
        model = _build(
            timm.create_model,
            config,
            model_name=config.name,
            num_classes=num_classes,
            in_chans=channels,
            pretrained=pretrained,
        )
    except UserError:
        raise
    except Exception as error:
        if not pretrained:
            raise
        raise UserError(
            f"model.weights=pretrained: the weights of {config.name} could not be had ({_one_line(error)}); without a "
            "way to the hub, bring the .safetensors file here and set model.weights to its path"
        ) from None
    published = (getattr(model, "pretrained_cfg", None) or {}).get("num_classes")
    if pretrained and published not in (None, num_classes):
        log.info(
            "pretrained weights of %s; the head has another number of classes (%d, here %d) and starts anew",
            *(config.name, published, num_classes),
        )
    return model


def _look_for_the_hub() -> None:
    """Its client tries for a minute to reach a name that nobody knows; then only what was fetched before counts."""
    from huggingface_hub import constants

    if urllib.request.getproxies():
        return  # names are the proxy's business
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = True


def _build(factory: Any, config: Model, **arguments: Any) -> nn.Module:
    try:
        model: nn.Module = factory(**arguments, **config.options)
    except (TypeError, AssertionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"model.options={config.options} do not fit {config.name}: {_one_line(error)}; "
            "set --model.options '{}' for the model's own defaults"
        ) from None
    return model


def _load_file(model: nn.Module, path: Path) -> None:
    """Weights from a file; the classifier's are left out where the number of classes differs."""
    weights = _read(path)
    own = model.state_dict()
    misfits = [name for name in weights if name in own and weights[name].shape != own[name].shape]
    head = set(_head_names(model))
    for name in misfits:
        if name not in head:
            raise UserError(
                f"model.weights={path}: {name} is {tuple(weights[name].shape)} there, {tuple(own[name].shape)} here; "
                "these are the weights of another model"
            )
        del weights[name]
    for name in weights.keys() & own.keys():
        if problem := _odd(weights[name], own[name]):
            raise UserError(f"model.weights={path}: {name} {problem}; use a file of weights as they were trained")
    missing, unknown = model.load_state_dict(weights, strict=False)
    lacking = [name for name in missing if name not in misfits]
    if lacking or unknown:
        raise UserError(
            f"model.weights={path}: {len(lacking)} tensors are missing ({', '.join(lacking[:3])} ...) and "
            f"{len(unknown)} unknown ({', '.join(unknown[:3])} ...); these are the weights of another model"
        )
    if misfits:
        log.info(
            "weights from %s; the head has another number of classes and starts anew (%s)", path, ", ".join(misfits)
        )
    else:
        log.info("weights from %s", path)


def _read(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise UserError(f"model.weights={path}: no such file; give `random`, `pretrained` or a file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)  # tensors only: cannot run code
    except Exception as error:
        raise UserError(f"model.weights={path} is not readable: {_one_line(error)}") from None
    for key in ("state_dict", "model"):
        state = state.get(key, state) if isinstance(state, dict) else state
    named = isinstance(state, dict) and all(isinstance(name, str) for name in state)
    if not named or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"model.weights={path} holds no weights by name")
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}


def _odd(tensor: torch.Tensor, own: torch.Tensor) -> str:
    """Why a tensor of the right shape cannot be the model's; other widths of floating point are converted."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        return "is not a plain tensor"
    if tensor.dtype != own.dtype and not (tensor.is_floating_point() and own.is_floating_point()):
        return f"is {tensor.dtype} there, {own.dtype} here"
    finite = not tensor.is_floating_point() or tensor.float().isfinite().all() or not own.isfinite().all()
    return "" if finite else "holds numbers that are not finite"


def _head_names(model: nn.Module) -> list[str]:
    """Parameters of the classifier, found as timm does: by the module that get_classifier returns."""
    classifier = getattr(model, "get_classifier", lambda: None)()
    modules = [name for name, module in model.named_modules() if module is classifier]
    return [name for name, _ in model.named_parameters() if name.rpartition(".")[0] in modules]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:200] or type(error).__name__
