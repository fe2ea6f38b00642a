"""Creates optimizers with parameter groups."""

import difflib
from fnmatch import filter as fnmatch_filter
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn, optim

from paceline.config.optim import Optim, ParamGroup
from paceline.errors import UserError
from paceline.optim.factory import Groups, check, construct, has_known_state
from paceline.optim.rehearsal import check_resumable, check_shardable
from paceline.system.heads import classifier_modules
from paceline.system.norms import NORMS


def groups(model: nn.Module, config: Optim) -> Groups:
    """Return parameter groups: weights with weight decay; biases, norms and what the model excludes without.

    `scale` of a group is its factor on the scheduled learning rate: of optim.groups, of the head, and of each layer.
    """
    excluded = [str(item) for item in getattr(model, "no_weight_decay", list)()]
    in_norms = {id(p) for module in model.modules() if isinstance(module, NORMS) for p in module.parameters(False)}
    scales, decays = _factors(model, config)
    found: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_excluded = any(fnmatch(name, item) for item in excluded)
        is_small = parameter.ndim <= 1 and config.no_weight_decay_on == "norm-and-bias"
        in_norm = id(parameter) in in_norms and config.no_weight_decay_on != "nothing"
        decay = 0.0 if is_excluded or is_small or in_norm else config.weight_decay * decays[name]
        found.setdefault((parameter.ndim <= 1 or is_excluded, decay, scales[name]), []).append(parameter)
    listed = [{"params": found[key], "weight_decay": key[1], "scale": key[2]} for key in sorted(found)]
    return [group for group in _with_fallback(listed, model, config) if group["params"]]


def matched(model: nn.Module, group: ParamGroup, number: int) -> dict[str, nn.Parameter]:
    """Return the parameters of optim.groups.NUMBER that are trained, by name."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found: dict[str, nn.Parameter] = {}
    for pattern in group.match:
        if not (names := fnmatch_filter(named, pattern)):
            close = difflib.get_close_matches(pattern, named, n=3, cutoff=0.3)
            message = f"optim.groups.{number}.match={pattern!r} matches no parameter that is trained"
            hint = f"Did you mean {' or '.join(close)}?" if close else f"Parameters: {', '.join(named)[:300]}."
            raise UserError("param-group-unmatched", f"{message}. {hint}", pattern=pattern)
        found |= {name: named[name] for name in names}
    return found


def _factors(model: nn.Module, config: Optim) -> tuple[dict[str, float], dict[str, float]]:
    """Return the factors on the learning rate and on the weight decay, by name of the parameter."""
    scales = dict.fromkeys((name for name, _ in model.named_parameters()), 1.0) | _scales(model, config)
    decays = dict.fromkeys(scales, 1.0)
    for number, group in enumerate(config.groups):
        for name in matched(model, group, number):
            scales[name] *= group.lr_factor
            decays[name] *= group.weight_decay_factor
    return scales, decays


def _scales(model: nn.Module, config: Optim) -> dict[str, float]:
    """Return the factors of optim.layer_decay and optim.head_lr_mult on the learning rate, by name of the parameter."""
    scales: dict[str, float] = {}
    if config.layer_decay < 1:
        matcher: Any = getattr(model, "group_matcher", None)
        if matcher is None:
            message = (
                f"optim.layer_decay={config.layer_decay:g}: {type(model).__name__} does not say what its layers are"
            )
            raise UserError("layer-decay-unsupported", f"{message} (group_matcher). Use 1, or a model of timm.")
        from timm.models import group_parameters

        layers = group_parameters(model, matcher(coarse=False), reverse=True)
        last = max(layers.values())
        scales = {name: config.layer_decay ** (last - layer) for name, layer in layers.items()}
    if config.head_lr_mult != 1:
        head = {id(parameter) for each in classifier_modules(model).values() for parameter in each.parameters()}
        if not head:
            message = (
                f"optim.head_lr_mult={config.head_lr_mult:g}: {type(model).__name__} has no classifier that it names"
            )
            raise UserError("no-classifier", f"{message} (get_classifier). Use 1, or a model of timm.")
        for name, parameter in model.named_parameters():
            if id(parameter) in head:
                scales[name] = scales.get(name, 1.0) * config.head_lr_mult
    return scales


def _with_fallback(listed: Groups, model: nn.Module, config: Optim) -> Groups:
    """Split groups by timm's options for Muon: parameters that AdamW updates, although their shape suits Muon."""
    patterns = config.options.get("fallback_list", [])
    names = [name for name, _ in model.named_parameters()]
    if not isinstance(patterns, list) or not all(any(fnmatch(name, str(item)) for name in names) for item in patterns):
        message = (
            f"optim.options.fallback_list={patterns!r} is not a list of patterns that match parameters of the model"
        )
        raise UserError("invalid-optimizer-option", f"{message}: {', '.join(names)[:300]}.", name="fallback_list")
    if config.options.get("fallback_no_weight_decay"):
        patterns = [*patterns, *getattr(model, "no_weight_decay", list)()]
    chosen = {id(p) for name, p in model.named_parameters() if any(fnmatch(name, str(item)) for item in patterns)}
    if not chosen:
        return listed
    return [
        {**group, "params": [p for p in group["params"] if (id(p) in chosen) == fallback], **more}
        for group in listed
        for fallback, more in ((False, {}), (True, {"use_fallback": True}))
    ]


def create(model: nn.Module, config: Optim, loss_scaling: bool = False) -> optim.Optimizer:
    """Return the optimizer of a recipe, with the fastest kernels that it has.

    Fused kernels also skip an overflowed step (`loss_scaling`) on the device, without a wait for its result.
    """
    check(config)
    sharded = next((parameter for parameter in model.parameters() if hasattr(parameter, "device_mesh")), None)
    if not has_known_state(config):
        check_resumable(config)
        if sharded is not None:
            check_shardable(config, sharded)
    if config.name != "sgd":
        optimizer = construct(groups(model, config), config, fused=True)
        if config.momentum_schedule.name != "constant" and not optimizer.param_groups[0].keys() & {"betas", "momentum"}:
            message = f"optim.momentum_schedule has no effect, because {config.name} has neither momentum nor betas"
            raise UserError("optimizer-field-unused", f"{message}. Remove it.", field="optim.momentum_schedule")
        return optimizer
    dampened = bool(config.options.get("dampening"))  # the first momentum is not dampened, so it cannot start at zero
    fusable = sharded is None and not (loss_scaling and dampened)  # PyTorch's fused SGD does not take sharded tensors
    optimizer = construct(groups(model, config), config, fused=True if fusable else None)
    if loss_scaling and optimizer.defaults.get("fused") and config.momentum:
        _init_momentum(optimizer)
    return optimizer


def _init_momentum(optimizer: optim.Optimizer) -> None:
    """Start the momentum at zero. Fused SGD would leave it uninitialized if the first step is skipped."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def set_momentum(optimizer: optim.Optimizer, momentum: float | None) -> None:
    """Set the momentum, or the first beta, of all parameter groups; None: leave it."""
    if momentum is None:
        return
    for group in optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])
        else:
            group["momentum"] = momentum


def set_lr(optimizer: optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["scale"]
