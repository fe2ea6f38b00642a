"""Every optimizer of timm and of users: resumed bit for bit, or refused with the reason."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm.optim
import torch
import torch.distributed as dist
from conftest import raises
from saved_checkpoints import read
from small_net import config, net, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from paceline import extensions
from paceline.checkpoint import store
from paceline.checkpoint.state import HostCopies
from paceline.config.optim import Optim
from paceline.distributed.mesh import ShardId
from paceline.optim.factory import check, construct
from paceline.optim.groups import create, groups
from paceline.optim.rehearsal import check_shardable
from paceline.optim.state import load_state, state_dict

REFUSED = {
    "adahessian": "second derivatives",
    "kron": "random numbers",
    "kronc": "random numbers",
    "kronw": "random numbers",
    "radamlegacy": "Use radam",
} | dict.fromkeys(timm.optim.list_optimizers(["bnb*", "fused*"]), "part of")
LOOKAHEAD = ("lookahead_sgd", "lookahead_adamw", "lookahead_adafactorbv", "lookahead_muon")
NAMES = [*timm.optim.list_optimizers(), *LOOKAHEAD]
SUPPORTED = [name for name in NAMES if name not in REFUSED]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def registered(monkeypatch) -> Callable[[str, Any], None]:
    """Register an optimizer for the time of a test."""
    monkeypatch.setattr(extensions, "_registered", {})
    return lambda name, call: extensions.register_optimizer(name)(call)


def _resumed(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, folder: Path) -> dict[str, Any]:
    """The state of a model and an optimizer after a round trip through the checkpoint store."""
    progress = {
        "step": step,
        "scaler": {},
        "evaluations": {"step": [], "top1": [], "top5": [], "loss": []},
        "recipe": {"data": {}, "checkpoint": {}},
        "epoch": 0.5,
        "data": {"name": "any", "fingerprint": "d1", "splits": {"train": 10, "val": 5, "test": 0}},
        "precision": "fp32",
        "versions": {"torch": "2"},
        "classes": [["a", "a"], ["b", "b"], ["c", "c"]],
        "preprocessing": {"mean": [0.5] * 3, "std": [0.2] * 3, "interpolation": "bilinear"},
        "model": {"name": "any", "num_classes": 3, "in_chans": 3, "options": {}},
    }
    parts = {"model": model.state_dict(), "ema": {}, "optimizer": state_dict(optimizer), "progress": progress}
    path = folder / f"step-{step:08d}"
    store.write(path, step, HostCopies().take(parts, ShardId()), {})
    return read(path)[1]


def _check_resume(settings: Optim, folder: Path, steps: int, layout: torch.memory_format) -> None:
    """A run in one go and one that is resumed half-way end with the same bits."""
    whole, stopped, resumed = (net(layout) for _ in range(3))
    optimizers = [construct(groups(model, settings), settings, fused=True) for model in (whole, stopped, resumed)]
    train(whole, optimizers[0], *range(steps))
    train(stopped, optimizers[1], *range(steps // 2))
    parts = _resumed(stopped, optimizers[1], steps // 2, folder)
    resumed.load_state_dict(parts["model"])
    load_state(optimizers[2], settings, parts["optimizer"], steps // 2, "checkpoint")
    train(resumed, optimizers[2], *range(steps // 2, steps))
    for name, value in whole.state_dict().items():
        assert value.isfinite().all(), name
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert not torch.equal(whole[0].weight, stopped[0].weight)


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_resumes_bit_for_bit_or_is_refused(name: str, tmp_path: Path) -> None:
    settings = config(name)
    if name in REFUSED:
        with raises("optimizer-not-supported") as caught:
            create(net(), settings)
        assert REFUSED[name] in str(caught.value)
        return
    create(net(), settings)
    _check_resume(settings, tmp_path, 4, torch.contiguous_format)


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_optimizer_resumes_bit_for_bit_with_channels_last_weights(name: str, tmp_path: Path) -> None:
    _check_resume(config(name), tmp_path, 4, torch.channels_last)


def test_state_that_appears_in_later_steps_is_resumed(tmp_path: Path) -> None:
    """Lookahead creates its slow weights in the sixth step."""
    _check_resume(config("lookahead_adam"), tmp_path, 14, torch.channels_last)


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"foreach": False}, {"foreach": True}])
def test_options_of_a_built_in_optimizer_are_resumed(options: dict[str, Any], tmp_path: Path) -> None:
    settings = config("adamw", options=options)
    assert create(net(), settings).param_groups[0][next(iter(options))] == next(iter(options.values()))
    _check_resume(settings, tmp_path, 4, torch.channels_last)


@pytest.mark.parametrize("name", [name for name in SUPPORTED if name not in LOOKAHEAD and name != "lamb"])
def test_defaults_are_those_of_timms_factory(name: str) -> None:
    """LAMB has another epsilon."""
    ours, theirs = net(), net()
    settings = Optim(name=name, lr=0.01, weight_decay=0.05)
    reference = timm.optim.create_optimizer_v2(theirs, name, lr=0.01, weight_decay=0.05)
    for group in reference.param_groups:
        group["scale"] = 1.0
    train(ours, construct(groups(ours, settings), settings), 0, 1, 2)
    train(theirs, reference, 0, 1, 2)
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right)


def test_muon_updates_the_parameters_of_the_fallback_list_with_adamw() -> None:
    def routes(**options: Any) -> list[bool]:
        model = net()
        optimizer = create(model, config("muon", options=options))
        train(model, optimizer, 0)
        return [optimizer.state[parameter]["use_muon"] for parameter in (model[0].weight, model[6].weight)]

    assert routes() == [True, True]
    assert routes(fallback_list=["6.*"]) == [True, False]
    assert routes(fallback_no_weight_decay=True) == [True, True]
    with raises("invalid-optimizer-option"):
        routes(fallback_list=["head.*"])


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        ("unknown-optimizer", {"name": "adamm"}),
        ("unknown-optimizer", {"name": "lookahead_adamm"}),
        ("unknown-optimizer", {"name": "SGD"}),
        ("optimizer-field-unused", {"name": "lion", "momentum": 0.8}),
        ("optimizer-field-unused", {"name": "lion", "eps": 1e-6}),
        ("optimizer-field-unused", {"name": "adamw", "nesterov": False}),
        ("optimizer-field-unused", {"name": "sgd", "betas": (0.9, 0.99)}),
        ("wrong-number-of-betas", {"name": "adan", "betas": (0.9, 0.99)}),
        ("wrong-number-of-betas", {"name": "adamw", "betas": (0.9, 0.99, 0.9)}),
        ("optimizer-option-is-field", {"name": "lion", "options": {"betas": [0.9, 0.99]}}),
        ("optimizer-option-is-field", {"name": "adamw", "options": {"lr": 1.0}}),
        ("optimizer-option-is-field", {"name": "adamw", "options": {"weight_decay": 1.0}}),
        ("unknown-optimizer-option", {"name": "lion", "options": {"cautious": True}}),
        ("unknown-optimizer-option", {"name": "lion", "options": {"fallback_list": []}}),
        ("unknown-optimizer-option", {"name": "adamw", "options": {"fused": True}}),
        ("invalid-optimizer-option", {"name": "muon", "options": {"algo": "other"}}),
        ("invalid-optimizer-option", {"name": "adafactor", "options": {"warmup_init": True}}),
        ("invalid-optimizer-option", {"name": "adamw", "options": {"amsgrad": "yes"}}),
        ("optimizer-not-resumable", {"name": "adam", "options": {"amsgrad": True, "differentiable": True}}),
    ],
)
def test_settings_that_cannot_be_used_are_refused(code: str, fields: dict[str, Any]) -> None:
    with raises(code) as caught:
        create(net(), Optim(**fields))
    assert fields["name"] in str(caught.value) or "optim." in str(caught.value)


def test_an_unknown_name_suggests_close_ones() -> None:
    for name, close in (("adamm", "adam"), ("SGD", "sgd"), ("muom", "muon")):
        with raises("unknown-optimizer") as caught:
            check(Optim(name=name))
        assert close in caught.value.fields["close"]


def test_fields_and_options_reach_the_optimizer() -> None:
    group = create(net(), Optim(name="adan", betas=(0.9, 0.8, 0.7), eps=1e-5)).param_groups[0]
    assert (group["betas"], group["eps"], group["no_prox"]) == ((0.9, 0.8, 0.7), 1e-5, False)
    group = create(net(), Optim(name="nlars", momentum=0.8, nesterov=False)).param_groups[0]
    assert (group["momentum"], group["nesterov"]) == (0.8, False)
    assert create(net(), Optim(name="lion", options={"caution": True})).param_groups[0]["caution"]
    assert create(net(), Optim(name="lion")).param_groups[0]["betas"] == (0.9, 0.99)
    group = create(net(), Optim(name="adamw")).param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.9, 0.999), 1e-8)
    assert not create(net(), Optim(momentum=0.0)).param_groups[0]["nesterov"]


class _Signed(torch.optim.Optimizer):
    """With a number per group that adapts, state from the second step on, and a flag that is not part of the state."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, power: float = 1.0, keep: str = "group"):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "power": power, "d": 1.0})
        self.keep, self.extra, self.seen = keep, 1.0, []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["d"] *= 0.9
            for parameter in group["params"]:
                state = self.state[parameter]
                if group["d"] < 0.9:
                    state.setdefault("old", torch.zeros_like(parameter)).add_(parameter.grad)
                match self.keep:
                    case "attribute":
                        self.extra *= 0.5
                    case "history":
                        self.seen.append(parameter.grad.norm())
                        self.extra = 0.5 if len(self.seen) > 1000 else 1.0
                    case "list":
                        state["both"] = [torch.zeros(2), torch.zeros(3)]
                    case "closure":
                        state["closure"] = lambda: None
                    case "random":
                        parameter.add_(torch.rand_like(parameter), alpha=0.1)
                parameter.add_(parameter.grad.sign(), alpha=-group["lr"] * group["d"] * self.extra)


def _registered_config(**options: Any) -> Optim:
    return Optim(name="mine", lr=0.01, options=options)


def test_registered_optimizers_are_resumed(registered, tmp_path: Path) -> None:
    registered("mine", _Signed)
    settings = _registered_config(power=2.0)
    optimizer = create(net(), settings)
    assert (type(optimizer), optimizer.param_groups[0]["power"]) == (_Signed, 2.0)
    _check_resume(settings, tmp_path, 8, torch.channels_last)


@pytest.mark.parametrize("keep", ["attribute", "history", "list", "closure", "random"])
def test_registered_optimizers_that_cannot_be_resumed_are_refused_at_the_start(registered, keep: str) -> None:
    registered("mine", _Signed)
    with raises("optimizer-not-resumable") as caught:
        create(net(), _registered_config(keep=keep))
    assert "_Signed" in str(caught.value)


class _ScheduleFree(torch.optim.SGD):
    def eval(self) -> None:
        """Switch to the averaged weights."""


def test_registered_schedule_free_optimizers_are_refused(registered) -> None:
    registered("mine", _ScheduleFree)
    with raises("optimizer-not-supported") as caught:
        create(net(), Optim(name="mine"))
    assert "eval()" in str(caught.value)


def test_registered_optimizers_are_checked(registered) -> None:
    registered("none", lambda params, lr: None)
    registered("flat", lambda params, lr: torch.optim.SGD([p for group in params for p in group["params"]], lr=lr))
    registered("broken", lambda params, lr: 1 / 0)
    registered("mine", _Signed)
    for name in ("none", "flat", "broken"):
        with raises("extension-failed") as caught:
            create(net(), Optim(name=name))
        assert caught.value.fields["name"] == name
    with raises("optimizer-field-unused"):
        create(net(), Optim(name="mine", momentum=0.5))
    with raises("optimizer-option-is-field"):
        create(net(), _registered_config(lr=1.0))
    with raises("unknown-optimizer") as caught:
        check(Optim(name="mime"))
    assert "mine" in caught.value.fields["close"]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    yield
    dist.destroy_process_group()


def test_optimizers_that_do_not_support_sharded_tensors_are_refused(group: None) -> None:
    parameter = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    for name in ("lion", "adan", "nadam", "lars", "adafactorbv", "muon"):
        check_shardable(config(name), parameter)
    for name in ("adamp", "sgdp", "adafactor", "novograd", "cadamw", "adamuon"):
        with raises("optimizer-needs-ddp") as caught:
            check_shardable(config(name), parameter)
        assert "strategy ddp" in str(caught.value)
