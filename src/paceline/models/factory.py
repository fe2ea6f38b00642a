"""Creates a timm model, a built-in or a registered model, with a head for the classes of the data."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn

from paceline import extensions
from paceline.config.model import Model
from paceline.errors import UserError
from paceline.models import folders, hub
from paceline.models.airbench import AirbenchNet
from paceline.models.ffcv_resnet import FFCV_RESNETS
from paceline.models.weight_files import find_file, load_file
from paceline.system.heads import classifier_modules
from paceline.system.logs import log
from paceline.system.torchvision_compat import allow_torchvision

BUILT_IN: dict[str, Callable[..., nn.Module]] = {"airbench": AirbenchNet, **FFCV_RESNETS}
"""Built-in models, which are not in timm."""
_REFUSED_OPTIONS = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay")
"""Arguments of timm that name weight files, which some versions unpickle: that can run code."""
_DROP_PATH = "drop_path_rate"
_OWN_ARGUMENTS = ("num_classes", "in_chans", _DROP_PATH)
"""Arguments of timm that come from the data, or from other fields than model.options."""


def check(config: Model) -> None:
    """Refuse a model that is unknown, options that are not supported, and pretrained weights that do not exist."""
    if refused := [name for name in _REFUSED_OPTIONS if name in config.options]:
        raise UserError(
            "model-option-refused",
            f"model.options.{refused[0]} is not supported. Set model.weights to the file instead.",
            option=refused[0],
        )
    if is_timm(config.name):
        _check_timm_name(config.name)
        if config.weights == "pretrained" and not _has_pretrained(config.name):
            raise _no_pretrained(config.name)
    elif config.drop_path:
        raise _no_drop_path(config)
    elif config.weights == "pretrained":
        raise _no_pretrained(config.name)
    if config.weights not in ("random", "pretrained"):
        find_file(config.weights)
    elif config.weights == "pretrained" and config.name.startswith("local-dir:"):
        find_file(config.name.removeprefix("local-dir:"))


def is_timm(name: str) -> bool:
    """Return whether a name is that of a timm model, rather than of a built-in or registered one."""
    return not extensions.find("model", name) and name not in BUILT_IN


def downloads(config: Model) -> bool:
    """Whether a model needs files of the Hugging Face Hub."""
    pretrained = config.weights == "pretrained" and not config.name.startswith("local-dir:")
    return is_timm(config.name) and (pretrained or config.name.startswith("hf-hub:"))


def _check_timm_name(name: str) -> None:
    allow_torchvision()
    import timm

    if name.startswith("local-dir:"):
        folders.read_config(name)
    elif not name.startswith(hub.SOURCES) and not timm.is_model(name):
        raise extensions.unknown("model", "model.name", name, [*BUILT_IN, *timm.list_models()])


def _has_pretrained(name: str) -> bool:
    import timm

    if name.startswith(hub.SOURCES):
        return True
    found = timm.get_pretrained_cfg(name)
    return bool(found and found.has_weights)


def _no_pretrained(name: str) -> UserError:
    message = f"model.weights=pretrained: {name} has no pretrained weights. Use random or a file."
    return UserError("no-pretrained-weights", message, model=name)


def _no_drop_path(config: Model) -> UserError:
    message = f"model.drop_path={config.drop_path:g}: {config.name} has no stochastic depth ({_DROP_PATH}). Set it to 0"
    hint = ", or pass it in model.options if the model takes it" if extensions.find("model", config.name) else ""
    return UserError("drop-path-unsupported", f"{message}{hint}.", model=config.name)


def create(config: Model, num_classes: int, channels: int) -> nn.Module:
    """Return the model with the weights that the recipe specifies."""
    check(config)
    if registered := extensions.find("model", config.name):
        model: nn.Module = registered(num_classes=num_classes, in_chans=channels, **config.options)
        if not isinstance(model, nn.Module):
            raise registered.error(f"returns {type(model).__name__}")
    elif config.name in BUILT_IN:
        model = _built(BUILT_IN[config.name], config, num_classes=num_classes, in_chans=channels)
    else:
        model = _timm(config, num_classes, channels)
    if config.head_init_std and (config.weights != "pretrained" or _published_classes(model) != num_classes):
        _init_head(model, config)
    if config.weights not in ("random", "pretrained"):
        load_file(model, config.weights)
    return model


def untrained(config: Model, saved: Mapping[str, Any] | None = None) -> Model:
    """Return the same model with random weights, for when only its architecture matters.

    `saved`: what `architecture_of` put into a checkpoint or an export, in place of a folder or repository.
    """
    if saved and config.name.startswith(hub.SOURCES):
        config = dataclasses.replace(config, name=saved["name"], options=saved["options"] | config.options)
    return dataclasses.replace(config, weights="random", head_init_std=0.0)


def architecture_of(config: Model, model: nn.Module) -> dict[str, Any]:
    """Return name and options of a model that was created, without a folder or repository that may be gone later."""
    name = config.name
    if not name.startswith(hub.SOURCES):
        return {"name": name, "options": config.options}
    found = folders.read_config(name) if name.startswith("local-dir:") else hub.read_config(config)
    published: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    given = {key: value for key, value in (found.get("model_args") or {}).items() if key not in _OWN_ARGUMENTS}
    options = given | config.options
    # what timm takes from pretrained_cfg
    if published.get("fixed_input_size"):
        options.setdefault("img_size", list(published["input_size"][-2:]))
    if published.get("global_pool") is not None:
        options.setdefault("global_pool", published["global_pool"])
    return {"name": published["architecture"], "options": options}


def _init_head(model: nn.Module, config: Model) -> None:
    heads = list(classifier_modules(model).values())
    # some models of timm end with a 1x1 convolution
    linear = [head for head in heads if isinstance(head, nn.Linear | nn.Conv2d)]
    if not linear or len(linear) < len(heads):
        raise UserError(
            "no-linear-classifier",
            f"model.head_init_std={config.head_init_std}: {config.name} has no linear classifier. Set it to 0.",
            model=config.name,
        )
    for head in linear:
        nn.init.normal_(head.weight, std=config.head_init_std)
        if head.bias is not None:
            nn.init.zeros_(head.bias)


def _timm(config: Model, num_classes: int, channels: int) -> nn.Module:
    import timm

    pretrained = config.weights == "pretrained"
    sizes = {"num_classes": num_classes, "in_chans": channels}
    drop_path = {_DROP_PATH: config.drop_path} if config.drop_path else {}
    with hub.cached_if_unreachable() if downloads(config) else nullcontext():
        model = _built(timm.create_model, config, model_name=config.name, pretrained=pretrained, **sizes, **drop_path)
    if config.drop_path and not any(getattr(module, "drop_prob", 0) for module in model.modules()):
        raise _no_drop_path(config)
    published = _published_classes(model)
    if pretrained and published not in (None, num_classes):
        log.info(
            "pretrained weights of %s; the head is initialized because it has %d classes and the data has %d",
            *(config.name, published, num_classes),
        )
    return model


def _published_classes(model: nn.Module) -> Any:
    """Return the number of classes of timm's weights for a model; None if it is unknown."""
    return (getattr(model, "pretrained_cfg", None) or {}).get("num_classes")


def _built(factory: Any, config: Model, **arguments: Any) -> nn.Module:
    try:
        model: nn.Module = factory(**arguments, **config.options)
    except Exception as error:
        if downloads(config) and hub.is_failure(error):
            raise hub.failure(error, config) from None
        if not isinstance(error, TypeError | AssertionError | ValueError | RuntimeError):
            raise
        if config.drop_path and isinstance(error, TypeError) and _DROP_PATH in str(error):
            raise _no_drop_path(config) from None
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            "invalid-model-options",
            f"model.options={config.options} are not valid for {config.name}: {reason}. "
            "Set --model.options '{}' to use the model's defaults.",
            model=config.name,
        ) from None
    return model
