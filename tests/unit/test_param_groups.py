"""Parameter groups for fine-tuning: those of timm, weight for weight."""

import pytest
import timm
import torch
from conftest import raises
from timm.optim import param_groups_layer_decay
from torch import nn

from paceline.config.io import load_recipe
from paceline.config.optim import Optim, ParamGroup
from paceline.config.timeline import Timeline
from paceline.engine.temporary import TemporaryParameters
from paceline.optim.groups import groups


def _settings(listed, scale: str) -> dict[int, tuple[float, float]]:
    return {id(parameter): (group["weight_decay"], group[scale]) for group in listed for parameter in group["params"]}


@pytest.mark.parametrize("layer_decay", [1.0, 0.75])
@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "resnet18",
        "swin_tiny_patch4_window7_224",
        "beit_base_patch16_224",
        "levit_128s",
        "convnext_atto",
    ],
)
def test_groups_are_those_of_timm(name: str, layer_decay: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=10)
    excluded = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    theirs = param_groups_layer_decay(model, 0.05, excluded, layer_decay=layer_decay)
    ours = groups(model, Optim(name="adamw", weight_decay=0.05, layer_decay=layer_decay))
    assert _settings(ours, "scale") == _settings(theirs, "lr_scale")


def test_position_embeddings_are_not_decayed() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    for without in ("norm-and-bias", "norm", "nothing"):
        found = _settings(groups(model, Optim(weight_decay=0.1, no_weight_decay_on=without)), "scale")
        assert found[id(model.pos_embed)][0] == found[id(model.cls_token)][0] == 0
        assert found[id(model.blocks[0].norm1.weight)][0] == (0.1 if without == "nothing" else 0)
        assert found[id(model.head.bias)][0] == (0 if without == "norm-and-bias" else 0.1)
        assert found[id(model.head.weight)][0] == 0.1


def test_the_head_has_its_own_learning_rate() -> None:
    with torch.device("meta"):
        model = timm.create_model("resnet18", num_classes=10)
    found = _settings(groups(model, Optim(weight_decay=0.1, head_lr_mult=10, layer_decay=0.5)), "scale")
    assert found[id(model.fc.weight)] == (0.1, 10)
    assert found[id(model.fc.bias)] == (0, 10)
    assert found[id(model.layer4[1].conv2.weight)] == (0.1, 0.5)


def test_both_heads_of_a_distilled_model_have_their_own_learning_rate() -> None:
    with torch.device("meta"):
        model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=10)
    found = _settings(groups(model, Optim(head_lr_mult=10)), "scale")
    scales = {name: found[id(parameter)][1] for name, parameter in model.named_parameters()}
    heads = {name for name, scale in scales.items() if scale == 10}
    assert heads == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}


@pytest.mark.parametrize(
    ("settings", "code"), [({"layer_decay": 0.5}, "layer-decay-unsupported"), ({"head_lr_mult": 2.0}, "no-classifier")]
)
def test_models_that_do_not_name_their_parts_are_refused(settings: dict[str, float], code: str) -> None:
    with raises(code):
        groups(nn.Sequential(nn.Linear(2, 2)), Optim(**settings))


def test_something_is_trained_until_the_end() -> None:
    recipe = load_recipe("digits", ["--train.duration", "2ep"])
    timeline, model = Timeline.of(recipe, 1000), nn.Linear(2, 2)
    ends = {name: ParamGroup(match=(name,), train_until=end) for name, end in (("weight", "1ep"), ("bias", "2ep"))}
    TemporaryParameters(model, Optim(groups=tuple(ends.values())), timeline)
    with raises("nothing-to-train"):
        TemporaryParameters(model, Optim(groups=(ParamGroup(match=("*",), train_until="1ep"),)), timeline)
    model.bias.requires_grad_(False)
    with raises("nothing-to-train"):
        TemporaryParameters(model, Optim(groups=(ends["weight"],)), timeline)
