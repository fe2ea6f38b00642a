"""The airbench recipes train like a plain loop that follows their source operation by operation."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.config.io import load_recipe
from paceline.distributed.world import World
from paceline.engine.build import Setup, build
from paceline.engine.evaluation.evaluate import predict
from paceline.engine.train import train_step
from paceline.models.airbench import AirbenchNet
from paceline.optim.groups import set_lr
from paceline.optim.schedules import lr_at

BATCH, PER_EPOCH, STEPS = 16, 4, 18
WIDTHS = (8, 16, 12)


def _setup(name: str, *words: str) -> Setup:
    """A recipe with small data and a small network, whose whitening bias is frozen after 12 of 18 steps."""
    data = f"{{train_samples: {BATCH * PER_EPOCH}, val_samples: 8, channels: 3, size: 32}}"
    recipe = load_recipe(
        name,
        [
            *("--data.name", "synthetic", "--data.synthetic", data, "--model.options.widths", str(list(WIDTHS))),
            *("--train.global_batch", str(BATCH), "--train.duration", f"{STEPS}ba"),
            *("--precision", "fp32", "--device", "cpu", *words),
        ],
    )
    return build(recipe, World())


class _Net(nn.Module):
    """Layer by layer as in the source: two or three convolutions per block, pooling after the first."""

    def __init__(self, depth: int, norm_momentum: float, scale: float):
        super().__init__()
        self.depth, self.scale = depth, scale
        self.whiten = nn.Conv2d(3, 24, 2)
        convs, norms, inputs = [], [], 24
        for width in WIDTHS:
            for number in range(depth):
                convs.append(nn.Conv2d(width if number else inputs, width, 3, padding=1, bias=False))
                norms.append(nn.BatchNorm2d(width, eps=1e-12, momentum=norm_momentum))
            inputs = width
        self.convs, self.norms = nn.ModuleList(convs), nn.ModuleList(norms)
        self.head = nn.Linear(inputs, 10, bias=False)
        for norm in self.norms:
            norm.weight.requires_grad = False
        self.whiten.weight.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = F.gelu(self.whiten(x))
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            place = number % self.depth
            x = conv(x)
            if place == 0:
                x = F.max_pool2d(x, 2)
            x = norm(x)
            if self.depth == 3 and place == 2:
                x = x + first
            x = F.gelu(x)
            if place == 0:
                first = x
        x = F.max_pool2d(x, 3).flatten(1)
        return self.head(x) * self.scale

    def load(self, model: nn.Module) -> "_Net":
        with torch.no_grad():
            for ours, theirs in zip(self.state_dict().values(), _in_order(model), strict=True):
                ours.copy_(theirs)
        return self


def _in_order(model: nn.Module) -> list[torch.Tensor]:
    """The state of an AirbenchNet in the order of the plain network."""
    assert isinstance(model, AirbenchNet)
    convs = [conv.weight for block in model.blocks for conv in block.convs]
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    norms = [getattr(norm, name) for block in model.blocks for norm in block.norms for name in names]
    return [model.whiten.weight, model.whiten.bias, *convs, *norms, model.head.weight]


def _train(setup: Setup, steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Take some steps; return their images and labels."""
    batches, seen = setup.loader.steps(), []
    for step in range(steps):
        seen.append(next(batches))
        setup.temporary.before_step(step, setup.replica.freeze)
        train_step(setup, seen[-1], step, lr_at(step, setup.lr_plan))
        if setup.ema:
            setup.ema.update(setup.replica.module, step + 1)
    return [(batch.images, batch.labels) for (batch,) in seen]


def _assert_same(net: _Net, model: nn.Module) -> None:
    for (name, expected), found in zip(net.state_dict().items(), _in_order(model), strict=True):
        torch.testing.assert_close(found.detach().float(), expected.float(), rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    ("name", "lr", "decay"), [("cifar10-airbench94", 11.5, 0.0153), ("cifar10-airbench96", 9, 0.012)]
)
def test_training_is_that_of_the_source(name: str, lr: float, decay: float) -> None:
    """Summed loss, decoupled hyperparameters, Lookahead in every fifth step, and a whitening bias frozen in epoch 3."""
    rise, end = (4, 0.07) if name.endswith("94") else (2, 0.0)
    points = f"[{{at: 0ba, factor: 0.2}}, {{at: {rise}ba, factor: 1.0}}, {{at: {STEPS}ba, factor: {end}}}]"
    momentum, kilostep = 0.85, 1024 * (1 + 1 / (1 - 0.85))
    step_lr, step_decay = lr / kilostep, decay * BATCH / kilostep
    setup = _setup(name, "--optim.lr", str(step_lr * BATCH), "--optim.schedule.points", points)
    net = _Net(*((2, 0.4) if name.endswith("94") else (3, 0.1)), 1 / 9).load(setup.replica.module)
    batches = _train(setup)

    biases = [norm.bias for norm in net.norms]
    others = [net.whiten.bias, *(conv.weight for conv in net.convs), net.head.weight]
    groups = [
        {"params": biases, "lr": 64 * step_lr, "weight_decay": step_decay / (64 * step_lr)},
        {"params": others, "lr": step_lr, "weight_decay": step_decay / step_lr},
    ]
    optimizer = torch.optim.SGD(groups, momentum=momentum, nesterov=True)

    def factor(step: int) -> float:
        if step < rise:
            return 0.2 + 0.8 * step / rise
        return 1 + (end - 1) * (step - rise) / (STEPS - rise)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    average = {key: value.clone() for key, value in net.state_dict().items()}
    for step, (images, labels) in enumerate(batches, start=1):
        net.whiten.bias.requires_grad = (step - 1) // PER_EPOCH < 3
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(net(images), labels, label_smoothing=0.2, reduction="sum").backward()
        optimizer.step()
        scheduler.step()
        for key, value in net.state_dict().items() if step % 5 == 0 else ():
            if value.is_floating_point():
                average[key].lerp_(value, 1 - 0.95**5 * (step / STEPS) ** 3)
                value.copy_(average[key])
    _assert_same(net, setup.replica.module)
    net.load_state_dict(average | {key: value for key, value in net.state_dict().items() if "num_batches" in key})
    assert setup.ema
    for key, found in zip(average, _in_order(setup.ema.model), strict=True):
        if "num_batches" not in key:
            torch.testing.assert_close(found.float(), average[key], rtol=1e-3, atol=2e-5, msg=key)


def test_muon_updates_are_those_of_the_source() -> None:
    """Filters of constant norm with orthogonalized updates, SGD for the rest. The source uses the summed loss."""
    setup = _setup("cifar10-airbench94-muon", "--train.global_batch", "64")
    assert not setup.ema
    net = _Net(2, 0.4, 1 / 256).load(setup.replica.module)
    assert net.head.weight.std().item() == pytest.approx(1)
    filters, batch, decay = [conv.weight for conv in net.convs], 2000, 2e-6 * 2000
    rates = {net.whiten.bias: 0.053, **{norm.bias: 0.053 for norm in net.norms}, net.head.weight: 0.67}
    small = torch.optim.SGD(
        [{"params": [p], "lr": lr, "weight_decay": decay / lr} for p, lr in rates.items()], momentum=0.85, nesterov=True
    )
    buffers = [torch.zeros_like(weight) for weight in filters]
    ours = [value for value in _in_order(setup.replica.module) if value.requires_grad]
    theirs = [net.whiten.bias, *filters, *(norm.bias for norm in net.norms), net.head.weight]
    for step in range(6):
        for mean, summed in zip(ours, theirs, strict=True):
            mean.grad = torch.randn(mean.shape, generator=torch.Generator().manual_seed(step)) * 1e-3
            summed.grad = mean.grad * batch
        set_lr(setup.optimizer, lr_at(step, setup.lr_plan))
        setup.optimizer.step()
        for group, lr in zip(small.param_groups, rates.values(), strict=True):
            group["lr"] = lr * (1 - step / STEPS)
        small.step()
        with torch.no_grad():
            for weight, buffer in zip(filters, buffers, strict=True):
                buffer.mul_(0.6).add_(weight.grad)
                update = _orthogonal(weight.grad + 0.6 * buffer)
                weight.mul_(math.sqrt(len(weight)) / weight.norm()).sub_(0.24 * (1 - step / STEPS) * update)
    for found, expected in zip(ours, theirs, strict=True):
        tolerance = 0.02 if found.ndim == 4 else 1e-4  # Newton-Schulz iterations are in bf16
        assert (found - expected).norm() <= tolerance * expected.norm()


def _orthogonal(gradient: torch.Tensor) -> torch.Tensor:
    """The quintic Newton-Schulz iteration of airbench94_muon, three times."""
    x = gradient.reshape(len(gradient), -1).bfloat16()
    x = x / (x.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(3):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.T if tall else x).float().view_as(gradient)


def test_the_whitening_layer_is_that_of_the_source() -> None:
    """Eigenvectors of the covariance of 2x2 patches, by falling eigenvalue, and their negatives."""
    model, images = AirbenchNet(), torch.rand(40, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    model.prepare(images)
    patches = images.unfold(2, 2, 1).unfold(3, 2, 1).transpose(1, 3).reshape(-1, 3, 2, 2).flatten(1)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches), UPLO="U")
    expected = (vectors.T / torch.sqrt(values + 5e-4)[:, None]).flip(0).view(12, 3, 2, 2)
    found = model.whiten.weight[:12]
    signs = (found.flatten(1) * expected.flatten(1)).sum(1).sign()  # of an eigenvector, the sign is arbitrary
    torch.testing.assert_close(found, expected * signs.view(-1, 1, 1, 1), rtol=1e-2, atol=1e-3)
    assert torch.equal(model.whiten.weight[12:], -found)
    assert not model.whiten.bias.any()


def test_test_time_augmentation_is_that_of_the_source() -> None:
    """Half of the weight is for the image and its mirror image, half for both shifted by one pixel, two ways."""
    model = AirbenchNet(widths=(4, 4, 4)).eval()
    images = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def mirrored(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * model(x) + 0.5 * model(x.flip(-1))

    padded = F.pad(images, (1,) * 4, "reflect")
    shifted = torch.stack([mirrored(padded[..., 0:32, 0:32]), mirrored(padded[..., 2:34, 2:34])]).mean(0)
    expected = 0.5 * mirrored(images) + 0.5 * shifted
    torch.testing.assert_close(predict(model, images, "flip-translate"), expected)
    halves = predict(lambda x: model(x).bfloat16(), images, "flip")
    assert halves.dtype == torch.float32
