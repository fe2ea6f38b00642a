"""Freezes parts of a model: their weights are not trained, and their batch norm keeps its statistics."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from paceline.config.model import BACKBONE, Model
from paceline.errors import UserError
from paceline.system.heads import classifier_modules
from paceline.system.norms import BATCH_NORMS, freeze_norm

_SHOWN = 12


def freeze(model: nn.Module, config: Model) -> None:
    """Freeze what model.freeze matches. Frozen parameters get no gradient, so no optimizer or rank sees them."""
    if not config.freeze:
        return
    modules: set[str] = set()
    parameters: set[str] = set()
    for pattern in config.freeze:
        found = _backbone(model, config) if pattern == BACKBONE else _matched(model, pattern)
        if not found[0] and not found[1]:
            raise UserError(
                "freeze-pattern-unmatched",
                f"model.freeze={pattern!r} matches no module or parameter of {config.name}. It has "
                f"{_some(name for name, _ in model.named_children())}; write e.g. {_example(model)}.",
                pattern=pattern,
                candidates=[name for name, _ in model.named_children()],
            )
        modules |= found[0]
        parameters |= found[1]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in parameters or any(name.startswith(f"{module}.") for module in modules):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            "nothing-to-train",
            f"model.freeze={list(config.freeze)} freezes all parameters of {config.name}, so there is nothing to "
            f"train. Leave out one of {_some(name for name, _ in model.named_children())}.",
            freeze=config.freeze,
        )
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and _is_frozen(module, name, modules):
            freeze_norm(module)


def _is_frozen(norm: nn.Module, name: str, modules: set[str]) -> bool:
    """Whether a batch norm is part of a frozen module, or all of its weights are frozen one by one."""
    own = list(norm.parameters())
    inside = any(f"{name}.".startswith(f"{module}.") for module in modules)
    return inside or (bool(own) and not any(parameter.requires_grad for parameter in own))


def _matched(model: nn.Module, pattern: str) -> tuple[set[str], set[str]]:
    """Return names of modules with state, and of parameters, that match a shell pattern; `*` also matches dots."""
    modules = {
        name for name, module in model.named_modules() if name and fnmatchcase(name, pattern) and module.state_dict()
    }
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False) if fnmatchcase(name, pattern)}
    return modules, parameters


def _backbone(model: nn.Module, config: Model) -> tuple[set[str], set[str]]:
    """Return all modules that do not contain the classifier, and the parameters outside of them and of it."""
    heads = classifier_modules(model)
    if not heads or not any(True for head in heads.values() for _ in head.parameters()):
        raise UserError(
            "no-classifier",
            f"model.freeze={BACKBONE}: {config.name} has no classifier that it names (get_classifier). Use patterns of "
            f"names instead, e.g. {_example(model)}.",
            model=config.name,
        )
    around = [name.split(".") for name in heads]
    modules = {
        name
        for name, _ in model.named_modules()
        if name and not any(_is_prefix(name.split("."), head) or _is_prefix(head, name.split(".")) for head in around)
    }
    parameters = {
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if not any(name.startswith(f"{head}.") for head in heads)
    }
    return modules, parameters


def _is_prefix(short: list[str], long: list[str]) -> bool:
    return long[: len(short)] == short


def _example(model: nn.Module) -> str:
    names = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
    return f"{names[0]}.*" if names else "backbone"


def _some(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:_SHOWN]) + (" ..." if found[_SHOWN:] else "")
