"""model.freeze: what is frozen stays as it is, and the rest trains as in a plain PyTorch loop."""

from copy import deepcopy

import pytest
import torch
from conftest import raises
from torch import nn
from torch.nn.functional import cross_entropy

from paceline.config.io import load_recipe
from paceline.config.model import Model
from paceline.config.recipe import Recipe
from paceline.distributed.ddp import average_buffers
from paceline.distributed.sync_batchnorm import synchronize
from paceline.distributed.world import World
from paceline.engine.build import Setup, build
from paceline.engine.train import train_step
from paceline.models.factory import create
from paceline.models.freezing import freeze
from paceline.system.norms import BATCH_NORMS, FrozenNorm

SHAPE = "{train_samples: 32, val_samples: 8, channels: 3, size: 32, classes: 5}"


def _recipe(*words: str) -> Recipe:
    small = [
        "--data.name",
        "synthetic",
        "--data.synthetic",
        SHAPE,
        "--model.options",
        "{}",
        "--train.global_batch",
        "8",
    ]
    fixed = ["--precision", "fp32", "--device", "cpu", "--optim.lr", "0.1", "--optim.weight_decay", "0.1"]
    plain = ["--data.augment", "null", "--train.label_smoothing", "0"]
    return load_recipe("digits", [*small, *fixed, *plain, *words])


def _train(setup: Setup, steps: int = 3) -> None:
    batches = setup.loader.steps()
    for step in range(steps):
        train_step(setup, next(batches), step, 0.1)
        if setup.ema:
            setup.ema.update(setup.replica.module, step + 1)


@pytest.mark.parametrize(
    "words",
    [
        ("--ema.decay", "0.9"),
        ("--model.activation_checkpointing", "full", "--train.grad_accumulation", "2"),
    ],
)
def test_training_equals_a_plain_loop_with_the_same_freezing(words: tuple[str, ...]) -> None:
    freezing = ("--model.freeze", "[layer1.*, layer2.*, bn1]", "--model.options", "{layers: [2, 1, 2, 1]}")
    recipe = _recipe("--model.name", "test_resnet", *freezing, *words)
    setup = build(recipe, World())
    plain = create(recipe.model, 5, 3)
    plain.load_state_dict(setup.replica.module.state_dict())
    plain.to(memory_format=torch.channels_last).train()
    for part in (plain.layer1, plain.layer2, plain.bn1):
        part.requires_grad_(False)
        for module in part.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if parameter.ndim > 1]
    rest = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    before = deepcopy(plain.state_dict())
    batches = setup.loader.steps()
    for _ in range(3):
        micro = next(batches)
        for batch in micro:
            (cross_entropy(plain(batch.images), batch.labels) / len(micro)).backward()
        optimizer.step()
        optimizer.zero_grad()
    _train(setup)
    found = setup.replica.module.state_dict()
    for name, tensor in plain.state_dict().items():
        assert torch.allclose(found[name], tensor, atol=1e-6), name
        if name.startswith(("layer1", "layer2", "bn1")):
            assert torch.equal(found[name], before[name]), name
    assert not torch.equal(found["layer3.0.bn1.running_mean"], before["layer3.0.bn1.running_mean"])
    held = {id(parameter) for group in setup.optimizer.param_groups for parameter in group["params"]}
    assert held == {id(p) for p in setup.replica.module.parameters() if p.requires_grad}
    if setup.ema:
        averaged = setup.ema.model.state_dict()
        assert all(torch.equal(averaged[name], before[name]) for name in before if name.startswith("layer1"))
        assert not torch.equal(averaged["fc.weight"], before["fc.weight"])


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext", "test_efficientnet", "airbench"])
def test_backbone_is_everything_but_the_classifier(name: str) -> None:
    config = Model(name=name, freeze=("backbone",), options={"widths": [8, 16]} if name == "airbench" else {})
    model = create(config, 5, 3)
    freeze(model, config)
    classifier = {id(parameter) for parameter in model.get_classifier().parameters()}
    assert {id(p) for p in model.parameters() if p.requires_grad} == classifier
    model.train()
    assert not any(module.training for module in model.modules() if isinstance(module, BATCH_NORMS))


def test_patterns_name_modules_and_parameters() -> None:
    def frozen(*patterns: str) -> tuple[set[str], set[str]]:
        config = Model(name="test_resnet", freeze=patterns)
        freeze(model := create(config, 5, 3), config)
        names = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        return names, {name for name, module in model.named_modules() if isinstance(module, FrozenNorm)}

    assert frozen("fc.bias") == ({"fc.bias"}, set())
    assert frozen("bn1") == ({"bn1.weight", "bn1.bias"}, {"bn1"})
    assert frozen("bn1.weight") == ({"bn1.weight"}, set())  # its bias and statistics train
    assert frozen("bn1.*") == frozen("bn1")
    assert frozen("layer1") == frozen("layer1.*")
    with raises("freeze-pattern-unmatched") as caught:
        frozen("layer9.*")
    assert "layer4" in caught.value.fields["candidates"]
    with raises("nothing-to-train"):
        frozen("*")
    with raises("nothing-to-train"):
        frozen("backbone", "fc")


def test_a_model_without_a_named_classifier_has_no_backbone() -> None:
    with raises("no-classifier"):
        freeze(nn.Sequential(nn.Linear(2, 2)), Model(name="mine", freeze=("backbone",)))


def test_frozen_statistics_stay_with_synchronized_batch_norm_and_in_averages(monkeypatch) -> None:
    config = Model(name="test_resnet", freeze=("layer1",))
    model = create(config, 5, 3)
    norm = model.layer1[0].bn1
    norm.running_mean.fill_(0.1)  # three times 0.1 is not 0.3
    freeze(synchronize(model, World()), config)
    model.train()
    model(torch.randn(4, 3, 32, 32))
    world = World(rank=0, size=3)
    monkeypatch.setattr(World, "sum_", lambda _, tensor: tensor.mul_(3))
    monkeypatch.setattr(World, "broadcast_", lambda *_: None)
    average_buffers(model, world)
    assert torch.equal(norm.running_mean, torch.full_like(norm.running_mean, 0.1))
    assert norm.num_batches_tracked == 0
    assert model.layer2[0].bn1.num_batches_tracked == 1


def test_one_pattern_needs_no_list() -> None:
    assert _recipe("--model.freeze", "backbone").model.freeze == ("backbone",)
    assert _recipe("--model.freeze", "stem.*", "head").model.freeze == ("stem.*", "head")


def test_one_image_per_rank_is_enough_for_frozen_batch_norm() -> None:
    words = ("--model.name", "test_resnet", "--train.global_batch", "1")
    with raises("batch-too-small-for-batch-norm"):
        build(_recipe(*words), World())
    _train(build(_recipe(*words, "--model.freeze", "backbone"), World()), steps=1)


def test_stochastic_depth() -> None:
    model = create(Model(name="test_resnet", drop_path=0.3), 5, 3)
    assert max(getattr(module, "drop_prob", 0) or 0 for module in model.modules()) == pytest.approx(0.3)
    for name in ("vgg11", "airbench"):
        with raises("drop-path-unsupported") as caught:
            create(Model(name=name, drop_path=0.1), 5, 3)
        assert caught.value.fields == {"model": name}


def test_stochastic_depth_is_set_once() -> None:
    with pytest.raises(Exception, match="drop-path-twice"):
        _recipe("--model.drop_path", "0.1", "--model.options", "{drop_path_rate: 0.2}")
