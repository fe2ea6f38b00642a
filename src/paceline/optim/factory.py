"""Constructs optimizers by name: PyTorch's SGD and AdamW, timm's, and registered ones."""

import difflib
import inspect
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

from torch import optim

from paceline import extensions
from paceline.config.optim import Optim
from paceline.errors import UserError
from paceline.optim.muon_sgd import MuonSgd
from paceline.system.torchvision_compat import allow_torchvision

Groups = list[dict[str, Any]]

BUILT_IN: dict[str, dict[str, Any]] = {
    "sgd": {"nesterov": True},
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8},
    "lamb": {"betas": (0.9, 0.999), "eps": 1e-8},
}
"""Optimizers whose defaults are ours, not timm's."""
GROUP_FIELDS = ("weight_decay", "scale", "use_fallback")
"""What `groups` sets in a parameter group."""
FALLBACK_OPTIONS = ("fallback_list", "fallback_no_weight_decay")
"""Options of timm's factory that `groups` uses: parameters that Muon updates with AdamW, whatever their shape."""
_FIELDS = ("momentum", "nesterov", "betas", "eps")
_LOOKAHEAD = "lookahead_"
_REFUSED = {
    "Kron": "it draws random numbers from a generator of its own, which checkpoints do not hold.",
    "RAdamLegacy": "it uses one step size for all parameter groups, whatever their learning rates. Use radam.",
}


def check(config: Optim) -> None:
    """Refuse an optimizer that is unknown or not supported, and fields and options that it does not take."""
    if extensions.find("optimizer", config.name):
        _check_options(config, config.options, ("lr", "weight_decay"))
        _chosen_fields(config, ())
    else:
        _resolve(config)


def has_known_state(config: Optim) -> bool:
    """Return whether the names of the state are known: those of built-in optimizers without options."""
    return config.name in BUILT_IN and not config.options and not extensions.find("optimizer", config.name)


def construct(groups: Groups, config: Optim, fused: bool | None = None) -> optim.Optimizer:
    """Return the optimizer of a recipe for these parameter groups.

    `fused=None` lets PyTorch choose, which uses foreach kernels on GPUs; False would turn these off as well.
    """
    if extension := extensions.find("optimizer", config.name):
        return _registered(extension, groups, config)
    kind, arguments = _resolve(config)
    if config.name in ("sgd", "adamw") and "foreach" not in arguments:
        arguments["fused"] = fused
    try:
        optimizer = kind(groups, lr=config.lr, **arguments)
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        message = f"optim.name={config.name} does not accept these fields and options: {reason}. Change them."
        raise UserError("invalid-optimizer-option", message, name=config.name) from None
    return _timm().Lookahead(optimizer) if config.name.startswith(_LOOKAHEAD) else optimizer


def argument_names(optimizer: optim.Optimizer, config: Optim) -> Collection[str]:
    """Return the arguments of the optimizer's class. Entries of parameter groups with these names are not state."""
    registered = extensions.find("optimizer", config.name)
    return inspect.signature(type(optimizer) if registered else _resolve(config)[0]).parameters


def _registered(extension: extensions.Extension, groups: Groups, config: Optim) -> optim.Optimizer:
    given = [[id(parameter) for parameter in group["params"]] for group in groups]
    optimizer = extension(groups, lr=config.lr, **config.options)
    if not isinstance(optimizer, optim.Optimizer):
        raise extension.error(f"returned a {type(optimizer).__name__}")
    kept = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    if kept != given or any("scale" not in group for group in optimizer.param_groups):
        raise extension.error("returned an optimizer with other parameter groups than it was given")
    if callable(getattr(optimizer, "eval", None)):
        reason = "its eval() and train() switch weights, as in schedule-free optimizers, and training calls neither."
        raise _not_supported(config, f"{reason} Use another optimizer, e.g. adamw.")
    return optimizer


def _resolve(config: Optim) -> tuple[Callable[..., optim.Optimizer], dict[str, Any]]:
    """Return the class of an optimizer of PyTorch or timm, and its arguments."""
    name = config.name.removeprefix(_LOOKAHEAD)
    kind, defaults = _class_of(config, name)
    parameters = inspect.signature(kind).parameters
    taken = parameters.keys() - {"params", "fused"}  # `create` chooses the kernels
    if "fallback_lr_scale" in taken:
        taken |= set(FALLBACK_OPTIONS)
    _check_options(config, taken, ("lr", "weight_decay", *_FIELDS))
    options = {key: value for key, value in config.options.items() if key not in FALLBACK_OPTIONS}
    for key, value in options.items():
        if isinstance(parameters[key].default, bool) and not isinstance(value, bool):
            message = f"optim.options.{key}={value!r} is not a boolean. Write true or false."
            raise UserError("invalid-optimizer-option", message, name=key)
    fields = _chosen_fields(config, taken)
    if "betas" in fields:
        _check_number_of_betas(config, parameters["betas"].default)
    if name == "sgd" and not config.momentum:
        fields["nesterov"] = False
    return kind, {**defaults, **fields, **options}


def _class_of(config: Optim, name: str) -> tuple[Callable[..., optim.Optimizer], dict[str, Any]]:
    """Return a class and the arguments that its name stands for, e.g. nesterov for nlars."""
    if name == "sgd":
        return optim.SGD, BUILT_IN[name]
    if name == "adamw":
        return optim.AdamW, BUILT_IN[name]
    if name == "muon-sgd":
        return MuonSgd, {}
    known = [*_timm().list_optimizers(), "muon-sgd"]
    if name not in known:
        raise extensions.unknown("optimizer", "optim.name", config.name, known)
    info = _timm().get_optimizer_info(name)
    reason = ""
    if isinstance(info.opt_class, str):  # of a package that is not installed with timm
        package = info.opt_class.partition(".")[0]
        reason = f"it is part of {package}, which is not supported. sgd and adamw use PyTorch's fused kernels."
    elif info.second_order:
        reason = "it needs second derivatives, which training does not compute."
    elif info.opt_class.__name__ in _REFUSED:
        reason = _REFUSED[info.opt_class.__name__]
    if reason:
        raise _not_supported(config, reason)
    return info.opt_class, BUILT_IN.get(name, info.defaults or {})


def _not_supported(config: Optim, reason: str) -> UserError:
    message = f"optim.name={config.name!r} is not supported: {reason}"
    return UserError("optimizer-not-supported", message, name=config.name)


def _timm() -> Any:
    allow_torchvision()
    return import_module("timm.optim")  # late, because it takes seconds


def _check_options(config: Optim, taken: Collection[str], fields: Collection[str]) -> None:
    for name in config.options:
        if name in fields:
            message = f"optim.options.{name} is also a field of the recipe. Set optim.{name} instead."
            raise UserError("optimizer-option-is-field", message, name=name)
        if name not in taken:
            others = sorted(set(taken) - set(fields))
            close = difflib.get_close_matches(name, others, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"Options: {', '.join(others)}."
            message = f"optim.options.{name}: {config.name} has no such option. {hint}"
            raise UserError("unknown-optimizer-option", message, name=name, close=close)


def _chosen_fields(config: Optim, taken: Collection[str]) -> dict[str, Any]:
    """Return the fields to pass on: momentum as in timm's factory, the others if they are set."""
    default = Optim()
    chosen = {name: getattr(config, name) for name in _FIELDS if getattr(config, name) != getattr(default, name)}
    for name, value in chosen.items():
        if name not in taken:
            how = "Remove it" if taken else f"Remove it, or use optim.options.{name}"
            message = f"optim.{name}={value} has no effect, because {config.name} does not take it. {how}."
            raise UserError("optimizer-field-unused", message, field=f"optim.{name}")
    return ({"momentum": config.momentum} if "momentum" in taken else {}) | chosen


def _check_number_of_betas(config: Optim, default: Any) -> None:
    wanted = len(default) if isinstance(default, tuple) else 2
    if len(config.betas) != wanted:
        message = f"optim.betas has {len(config.betas)} values, but {config.name} takes {wanted}"
        defaults = f" (default {', '.join(map(str, default))})" if default else ""
        raise UserError("wrong-number-of-betas", f"{message}{defaults}. Give {wanted} or none.", betas=config.betas)
