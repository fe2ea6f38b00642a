"""Reads weights from a file or folder, without running code from it, and loads them into a model."""

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.errors import UserError
from paceline.system.heads import classifier_modules
from paceline.system.logs import log
from paceline.system.wording import counted

_NAMES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
"""Files of weights in a folder, the best first, as in timm."""
_SUFFIXES = (".safetensors", ".bin", ".pth")


def find_file(weights: str) -> Path:
    """Return the file of model.weights: the file itself, or the one in a folder."""
    path = Path(weights).expanduser()
    if _is_run_or_checkpoint(path):
        raise UserError(
            "run-instead-of-weights",
            f"model.weights={weights} is a run or a checkpoint, which may have several files of weights. Run "
            f'"paceline export {weights} --to FILE.safetensors", and give that file; it has their preprocessing, too.',
            path=path,
        )
    if path.is_dir():
        if found := next((path / name for name in _NAMES if (path / name).is_file()), None):
            return found
        if len(others := [file for file in path.iterdir() if file.suffix in _SUFFIXES]) == 1:
            return others[0]
        message = f"model.weights={weights} is a folder without {', '.join(_NAMES[:-1])} or {_NAMES[-1]}."
        raise UserError("weights-not-found", f"{message} Give the path of the file.", path=path)
    if not path.is_file():
        message = f"model.weights={path} does not exist. Use random, pretrained, or the path of a file or folder."
        raise UserError("weights-not-found", message, path=path)
    return path


def _is_run_or_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint folder, or a run folder that no model was exported into."""
    is_run = (path / "checkpoints").is_dir() and not (path / _NAMES[0]).is_file()
    return is_run or (path / "COMMIT").exists()


def load_file(model: nn.Module, given: str) -> None:
    """Load weights from a file or folder, without those of the classifier if the number of classes differs."""
    path = find_file(given)
    weights, expected = _read(path), model.state_dict()
    head = _head_names(model)
    if not _fits(weights, expected, head):
        weights = _converted(weights, model)
    mismatched = [name for name in weights if name in expected and weights[name].shape != expected[name].shape]
    for name in mismatched:
        if name not in head:
            raise UserError(
                "weights-model-mismatch",
                f"model.weights={path}: {name} has shape {tuple(weights[name].shape)}, but the model has "
                f"{tuple(expected[name].shape)}. The file has the weights of another model. Set model.name to that "
                "one, or use another file.",
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
    new = [name for name in missing if name in head]  # self-supervised weights have no classifier
    absent = [name for name in missing if name not in head]
    if absent or unknown or (new and set(new) < head and not mismatched):
        absent = absent or new
        raise UserError(
            "weights-model-mismatch",
            f"model.weights={path}: {_listed('missing', absent)}, {_listed('unknown', unknown)}. The file has the "
            "weights of another model. Set model.name to that one, or use another file.",
            path=path,
        )
    if new:
        why = "the number of classes differs" if mismatched else "the file has none"
        log.info("weights from %s; the head is initialized because %s (%s)", path, why, ", ".join(new))
    else:
        log.info("weights from %s", path)


def _listed(problem: str, names: Sequence[str]) -> str:
    """Return e.g. "2 tensors unknown (head.weight, head.bias)"."""
    some = ", ".join(names[:3]) + (", ..." if names[3:] else "")
    return f"{counted(len(names), 'tensor')} {problem}" + (f" ({some})" if names else "")


def _fits(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], head: set[str]) -> bool:
    return all(
        name in head or (name in weights and weights[name].shape == tensor.shape) for name, tensor in expected.items()
    )


def _converted(weights: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Return weights as timm converts them for its models: other names, and position embeddings for another size."""
    convert: Any = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return weights
    try:
        converted = convert(dict(weights), model)
    except Exception:  # of another model, which is reported with the names that differ
        return weights
    return converted if isinstance(converted, dict) else weights


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)  # weights_only cannot run code
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if isinstance(error, pickle.UnpicklingError):  # torch suggests to load it with code
            reason = "not a PyTorch file, or it has other objects than tensors, which could run code"
        message = f"model.weights={path} cannot be read ({reason}). Use a .safetensors file or a state dict."
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


def _head_names(model: nn.Module) -> set[str]:
    """Return the names of the classifier's parameters."""
    heads = classifier_modules(model)
    return {f"{name}.{inner}" for name, head in heads.items() for inner, _ in head.named_parameters()}
