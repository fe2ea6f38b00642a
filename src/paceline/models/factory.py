"""Creates a timm model, airbench or a registered model, with a head for the classes of the data."""

import dataclasses
import socket
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from paceline import extensions
from paceline.config.recipe import Model
from paceline.errors import UserError
from paceline.models.airbench import AirbenchNet
from paceline.system.logs import log
from paceline.system.torchvision_compat import allow_torchvision

_REFUSED_OPTIONS = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay")
"""Arguments of timm that name weight files, which some versions unpickle: that can run code."""


def check(config: Model) -> None:
    """Refuse a model that is unknown, options that are not supported, and pretrained weights that do not exist."""
    if refused := [name for name in _REFUSED_OPTIONS if name in config.options]:
        raise UserError(
            "model-option-refused",
            f"model.options.{refused[0]} is not supported. Set model.weights to the file instead.",
            option=refused[0],
        )
    if not extensions.find("model", config.name) and config.name != "airbench":
        _check_timm_name(config.name)
    elif config.weights == "pretrained":
        message = f"model.weights=pretrained: {config.name} has no pretrained weights. Use random or a file."
        raise UserError("no-pretrained-weights", message, model=config.name)


def _check_timm_name(name: str) -> None:
    allow_torchvision()
    import timm

    if not name.startswith(("hf-hub:", "local-dir:")) and not timm.is_model(name):
        raise extensions.unknown("model", "model.name", name, ["airbench", *timm.list_models()])


def create(config: Model, num_classes: int, channels: int) -> nn.Module:
    """Return the model with the weights that the recipe specifies."""
    check(config)
    if registered := extensions.find("model", config.name):
        model: nn.Module = registered(num_classes=num_classes, in_chans=channels, **config.options)
        if not isinstance(model, nn.Module):
            raise registered.error(f"returns {type(model).__name__}")
    elif config.name == "airbench":
        model = _build(AirbenchNet, config, num_classes=num_classes, in_chans=channels)
    else:
        model = _timm(config, num_classes, channels)
    if config.head_init_std and config.weights == "random":
        _init_head(model, config)
    if config.weights not in ("random", "pretrained"):
        _load_file(model, Path(config.weights))
    return model


def untrained(config: Model) -> Model:
    """Return the same model with random weights, for when only its architecture matters."""
    return dataclasses.replace(config, weights="random", head_init_std=0.0)


def _init_head(model: nn.Module, config: Model) -> None:
    classifier: Any = getattr(model, "get_classifier", lambda: None)()
    if not isinstance(classifier, nn.Linear):
        raise UserError(
            "no-linear-classifier",
            f"model.head_init_std={config.head_init_std}: {config.name} has no linear classifier. Set it to 0.",
            model=config.name,
        )
    nn.init.normal_(classifier.weight, std=config.head_init_std)
    if classifier.bias is not None:
        nn.init.zeros_(classifier.bias)


def _timm(config: Model, num_classes: int, channels: int) -> nn.Module:
    import timm

    pretrained = config.weights == "pretrained"
    if pretrained:
        _check_hub_access()
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
            "pretrained-weights-unavailable",
            f"model.weights=pretrained: the weights of {config.name} cannot be downloaded ({_one_line(error)}). "
            "Without access to the Hugging Face Hub, copy the .safetensors file and set model.weights to its path.",
            model=config.name,
        ) from None
    published = (getattr(model, "pretrained_cfg", None) or {}).get("num_classes")
    if pretrained and published not in (None, num_classes):
        log.info(
            "pretrained weights of %s; the head is initialized because it has %d classes and the data has %d",
            *(config.name, published, num_classes),
        )
    return model


def _check_hub_access() -> None:
    """Use only cached files if the hub's name does not resolve: its client would retry for a minute."""
    from huggingface_hub import constants

    if urllib.request.getproxies():
        return  # the proxy resolves names
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = True


def _build(factory: Any, config: Model, **arguments: Any) -> nn.Module:
    try:
        model: nn.Module = factory(**arguments, **config.options)
    except (TypeError, AssertionError, ValueError, RuntimeError) as error:
        raise UserError(
            "invalid-model-options",
            f"model.options={config.options} are not valid for {config.name}: {_one_line(error)}. "
            "Set --model.options '{}' to use the model's defaults.",
            model=config.name,
        ) from None
    return model


def _load_file(model: nn.Module, path: Path) -> None:
    """Load weights from a file, without those of the classifier if the number of classes differs."""
    weights = _read(path)
    expected = model.state_dict()
    mismatched = [name for name in weights if name in expected and weights[name].shape != expected[name].shape]
    head = set(_head_names(model))
    for name in mismatched:
        if name not in head:
            raise UserError(
                "weights-model-mismatch",
                f"model.weights={path}: {name} has shape {tuple(weights[name].shape)}, but the model has "
                f"{tuple(expected[name].shape)}. The file has the weights of another model.",
                path=path,
                tensor=name,
            )
        del weights[name]
    for name in weights.keys() & expected.keys():
        if problem := _invalid(weights[name], expected[name]):
            raise UserError(
                "invalid-weights",
                f"model.weights={path}: {name} {problem}. Use a file with finite weights of the model's types.",
                path=path,
                tensor=name,
            )
    missing, unknown = model.load_state_dict(weights, strict=False)
    absent = [name for name in missing if name not in mismatched]
    if absent or unknown:
        raise UserError(
            "weights-model-mismatch",
            f"model.weights={path}: {len(absent)} tensors are missing ({', '.join(absent[:3])} ...) and "
            f"{len(unknown)} are unknown ({', '.join(unknown[:3])} ...). The file has the weights of another model.",
            path=path,
        )
    if mismatched:
        log.info(
            "weights from %s; the head is initialized because the number of classes differs (%s)",
            *(path, ", ".join(mismatched)),
        )
    else:
        log.info("weights from %s", path)


def _read(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        message = f"model.weights={path} does not exist. Use random, pretrained or the path of a file."
        raise UserError("weights-not-found", message, path=path)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)  # weights_only cannot run code
    except Exception as error:
        message = f"model.weights={path} cannot be read ({_one_line(error)}). Use a .safetensors file or a state dict."
        raise UserError("weights-unreadable", message, path=path) from None
    for key in ("state_dict", "model"):
        state = state.get(key, state) if isinstance(state, dict) else state
    named = isinstance(state, dict) and all(isinstance(name, str) for name in state)
    if not named or not all(isinstance(value, torch.Tensor) for value in state.values()):
        message = f"model.weights={path} is not a state dict (tensors by name). Save it with model.state_dict()."
        raise UserError("weights-not-a-state-dict", message, path=path)
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}


def _invalid(tensor: torch.Tensor, expected: torch.Tensor) -> str:
    """Return why a tensor of the right shape cannot be loaded, or "". Floating-point types are converted."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        return "is not a dense CPU tensor"
    if tensor.dtype != expected.dtype and not (tensor.is_floating_point() and expected.is_floating_point()):
        return f"is {tensor.dtype}, but the model has {expected.dtype}"
    finite = not tensor.is_floating_point() or tensor.float().isfinite().all() or not expected.isfinite().all()
    return "" if finite else "contains NaN or infinity"


def _head_names(model: nn.Module) -> list[str]:
    """Return the names of the classifier's parameters, found by timm's get_classifier."""
    classifier = getattr(model, "get_classifier", lambda: None)()
    modules = [name for name, module in model.named_modules() if module is classifier]
    return [name for name, _ in model.named_parameters() if name.rpartition(".")[0] in modules]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:200] or type(error).__name__
