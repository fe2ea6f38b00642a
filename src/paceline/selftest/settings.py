"""What the probes of a selftest share: options, and the recipes that they train."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args, get_type_hints

from paceline.config.io import recipe_from_tree, split_overrides
from paceline.config.recipe import Recipe
from paceline.errors import UserError

STEPS, CHECKPOINT_EVERY, KILLED_AT = 12, 4, 6
"""Of the trained runs. The run that is killed loses the steps since its checkpoint."""
OVERRIDABLE = ("model", "import", "callbacks", "grad_sync", "fsdp", "channels_last", "compile")
"""Groups of recipe fields that the user may override, e.g. to test an own model."""
DEVICES: tuple[str, ...] = get_args(get_type_hints(Recipe)["device"])
_CPU_PROCS = 2  # on one machine, so that there is something to compare
_GPU_SPEED: dict[str, Any] = {"model": "resnet50", "size": 224, "classes": 1000, "per_rank_batch": 64}
_CPU_SPEED: dict[str, Any] = {"model": "resnet18", "size": 32, "classes": 10, "per_rank_batch": 16}


@dataclass(frozen=True)
class Settings:
    """Options of a selftest, as its rank processes get them."""

    device: str = "auto"
    folder: str = "."
    """Folder for run folders, on every host."""
    hosts: int = 1
    procs: int = 0
    """Ranks per host; 0: its GPUs, or a few on CPUs."""
    quick: bool = False
    overrides: tuple[str, ...] = ()

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> "Settings":
        values = json.loads(text)
        return Settings(**values | {"overrides": tuple(values["overrides"])})

    def resolved(self, device: str, num_gpus: int) -> "Settings":
        """Return the settings for the device that was found."""
        default = num_gpus or (_CPU_PROCS if device == "cpu" and self.hosts == 1 else 1)
        return replace(self, device=device, procs=self.procs or default)

    @property
    def ranks(self) -> int:
        """Number of ranks of all hosts together."""
        return self.hosts * self.procs

    @property
    def on_gpus(self) -> bool:
        return self.device != "cpu"


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse fields that the selftest sets itself."""
    for key, _ in split_overrides(overrides):
        if key.partition(".")[0].replace("-", "_") not in OVERRIDABLE:
            message = (
                f"--{key} does not apply to a selftest, which sets data, training and precision itself. Omit it; only "
                f"fields of {', '.join(OVERRIDABLE)} can be overridden."
            )
            raise UserError("option-not-applicable", message, option=f"--{key}")


def exact_recipe(settings: Settings, precision: str = "fp32", strategy: str = "auto") -> Recipe:
    """Return a small recipe whose losses are the same on any number of ranks: group norm, no augmentation."""
    batch = settings.ranks * max(2, 64 // settings.ranks)
    tree = {
        "name": "selftest",
        "data": {"name": "digits"},
        "model": {"name": "airbench", "options": {"widths": [16, 32], "norm": "group"}},
        "train": {"global_batch": batch, "duration": f"{STEPS}ba"},
        "optim": {"lr": 0.02, "schedule": {"name": "constant"}},
        "evaluate": {"every": f"{STEPS}ba"},
        "checkpoint": {"every": f"{CHECKPOINT_EVERY}ba"},
        "log": {"every": "1ba", "tensorboard": False},
        "strategy": strategy,
        "precision": precision,
        "device": settings.device,
    }
    return _recipe(tree, settings)


def speed_recipe(settings: Settings, shards: str = "") -> Recipe:
    """Return a recipe with the load of real training: synthetic images in memory, or those of prepared shards."""
    load = _GPU_SPEED if settings.on_gpus else _CPU_SPEED
    synthetic = {"train_samples": load["per_rank_batch"] * settings.ranks, "val_samples": 2}
    data: dict[str, Any] = {"name": "shards", "path": shards, "size": load["size"]}
    if not shards:
        data = {
            "name": "synthetic",
            "synthetic": synthetic | {"size": load["size"], "classes": load["classes"]},
            "mean": [0.5] * 3,
            "std": [0.25] * 3,
        }
    tree = {
        "name": "selftest-speed",
        "data": data,
        "model": {"name": load["model"]},
        "train": {"global_batch": load["per_rank_batch"] * settings.ranks, "duration": "1000ba"},
        "optim": {"lr": 0.001, "schedule": {"name": "constant"}},
        "device": settings.device,
    }
    return _recipe(tree, settings)


def image_side(settings: Settings) -> int:
    """Return the side of the images that the speed recipe trains on."""
    return int((_GPU_SPEED if settings.on_gpus else _CPU_SPEED)["size"])


def _recipe(tree: dict[str, Any], settings: Settings) -> Recipe:
    if any(key == "model.name" for key, _ in split_overrides(settings.overrides)):
        tree["model"] = {}  # the options belong to the built-in model
    return recipe_from_tree(tree, "selftest", settings.overrides)
