"""The parameters of timm models with weight decay are the same as in timm, also after the model is changed."""

import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay
from torch import nn

from paceline.config.model import Model
from paceline.config.optim import Optim
from paceline.config.recipe import Recipe
from paceline.config.timeline import Timeline
from paceline.engine.compiled import compile_model
from paceline.models.activation_checkpointing import checkpoint_activations
from paceline.models.freezing import freeze
from paceline.optim.groups import groups

DECAY = 0.05
MODELS = [
    "beit_base_patch16_224",
    "cait_xxs24_224",
    "coat_lite_tiny",
    "convit_tiny",
    "convnext_atto",
    "crossvit_tiny_240",
    "davit_tiny",
    "deit3_small_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "efficientformerv2_s0",
    "efficientnet_b0",
    "eva02_tiny_patch14_224",
    "hiera_tiny_224",
    "levit_128s",
    "maxvit_rmlp_pico_rw_256",
    "mobilevit_xxs",
    "mobilevitv2_050",
    "mvitv2_tiny",
    "pit_ti_224",
    "pvt_v2_b0",
    "resnet18",
    "resnetv2_50",
    "swin_tiny_patch4_window7_224",
    "swinv2_cr_tiny_ns_224",
    "swinv2_tiny_window8_256",
    "tiny_vit_5m_224",
    "vit_relpos_small_patch16_224",
    "vit_tiny_patch16_224",
    "volo_d1_224",
    "xcit_nano_12_p16_224",
]
EXCLUDED = {
    "beit_base_patch16_224": ("cls_token", "relative_position_bias_table"),
    "deit_tiny_distilled_patch16_224": ("pos_embed", "cls_token", "dist_token"),
    "levit_128s": ("attention_biases",),
    "swin_tiny_patch4_window7_224": ("relative_position_bias_table",),
    "vit_tiny_patch16_224": ("pos_embed", "cls_token"),
}


def _without_weights(name: str) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = timm.create_model(name, num_classes=10)
    return model


def _decayed(model: nn.Module) -> dict[str, float]:
    found = {
        id(parameter): group["weight_decay"]
        for group in groups(model, Optim(name="adamw", weight_decay=DECAY))
        for parameter in group["params"]
    }
    return {name: found[id(p)] for name, p in model.named_parameters() if p.requires_grad}


def _decayed_by_timm(model: nn.Module) -> dict[str, float]:
    excluded = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()  # type: ignore[operator]
    listed = param_groups_weight_decay(model, DECAY, no_weight_decay_list=excluded)
    found = {id(parameter): group["weight_decay"] for group in listed for parameter in group["params"]}
    return {name: found[id(p)] for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", MODELS)
def test_weight_decay_is_that_of_timm(name: str) -> None:
    model = _without_weights(name)
    ours = _decayed(model)
    assert ours == _decayed_by_timm(model)
    assert set(ours.values()) == {0.0, DECAY}
    for table in EXCLUDED.get(name, ()):
        values = [value for key, value in ours.items() if table in key]
        assert set(values) == {0.0}


@pytest.mark.parametrize("name", ["levit_128s", "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224"])
@pytest.mark.parametrize("change", ["frozen", "checkpointed", "compiled"])
def test_changed_models_keep_their_exclusions(name: str, change: str) -> None:
    expected = _decayed_by_timm(_without_weights(name))
    model = _without_weights(name)
    if change == "frozen":
        freeze(model, Model(name=name, freeze=("head*",)))
    elif change == "checkpointed":
        checkpoint_activations(model, Model(name=name, activation_checkpointing="full"))
    else:
        compile_model(model, Timeline.of(Recipe("any"), 512), torch.device("cpu"))
    ours = _decayed(model)
    assert ours.items() <= expected.items()
    assert (len(ours) < len(expected)) == (change == "frozen")
