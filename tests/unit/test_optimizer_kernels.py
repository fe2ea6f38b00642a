"""Fused and foreach kernels of optimizers: where they are used, and where their state belongs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from small_net import config, net, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from paceline.config.optim import Optim
from paceline.optim.factory import construct
from paceline.optim.groups import create, groups
from paceline.optim.state import load_state, state_dict

pytestmark = pytest.mark.usefixtures("one_thread")
BUILT_IN = pytest.mark.parametrize("name", ["sgd", "adamw"])


@pytest.fixture
def sharded(tmp_path) -> Iterator[nn.Module]:
    """A model whose parameters are sharded, over one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 4)
    for name, value in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(value.detach(), mesh, [Shard(0)])))
    yield model
    dist.destroy_process_group()


def skip_first_step(optimizer: torch.optim.Optimizer, layer: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for factor in (float("inf"), 1.0):
        scaler.scale(layer(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "settings",
    [
        Optim(lr=0.5, nesterov=False),
        Optim(lr=0.5),
        Optim(lr=0.5, momentum=0.0),
        Optim(lr=0.5, nesterov=False, options={"dampening": 0.5}),
        Optim(name="adamw", lr=0.5),
    ],
)
def test_first_step_skipped_by_the_loss_scaler_has_no_effect(settings: Optim) -> None:
    torch.manual_seed(0)
    layer, expected = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    expected.load_state_dict(layer.state_dict())
    # memory that fused SGD would take uninitialized
    garbage = [torch.full_like(layer.weight, torch.nan) for _ in range(64)]
    del garbage
    skip_first_step(create(layer, settings, loss_scaling=True), layer)
    reference = construct(groups(expected, settings), settings)
    expected(torch.ones(1, 2)).sum().backward()
    reference.step()
    assert torch.allclose(layer.weight, expected.weight, rtol=1e-6)


@BUILT_IN
def test_kernels_are_fused_in_every_precision(name: str) -> None:
    for loss_scaling in (False, True):
        assert create(nn.Linear(2, 2), Optim(name=name), loss_scaling).param_groups[0]["fused"] is True
    # the loss scaler then passes its result to the kernel instead of waiting for it
    assert create(nn.Linear(2, 2), Optim(name=name), loss_scaling=True)._step_supports_amp_scaling


def test_foreach_kernels_are_not_turned_off_where_fused_ones_do_not_apply(sharded: nn.Module) -> None:
    dampened = create(nn.Linear(2, 2), Optim(nesterov=False, options={"dampening": 0.5}), loss_scaling=True)
    for optimizer in (create(sharded, Optim()), dampened):
        assert [optimizer.param_groups[0][kind] for kind in ("fused", "foreach")] == [None, None]


@BUILT_IN
@pytest.mark.parametrize("loss_scaling", [False, True])
def test_sharded_parameters_are_trained_like_whole_ones(sharded: nn.Module, name: str, loss_scaling: bool) -> None:
    whole = nn.Linear(4, 4)
    whole.load_state_dict({key: value.full_tensor() for key, value in sharded.state_dict().items()})
    settings = replace(config(name), groups=())
    optimizer = create(sharded, settings, loss_scaling)
    assert optimizer.param_groups[0]["fused"] is (True if name == "adamw" else None)
    for model, used in ((whole, create(whole, settings)), (sharded, optimizer)):
        scaler = torch.amp.GradScaler("cpu", enabled=loss_scaling)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.25 * scaler.get_scale())
            if loss_scaling:
                scaler.scale(torch.zeros(()))
            scaler.step(used)
            scaler.update()
    for key, value in whole.state_dict().items():
        assert torch.allclose(sharded.state_dict()[key].full_tensor(), value, rtol=1e-6), key


class WithScalar(nn.Module):
    """A parameter without dimensions, whose shape is that of the optimizer's step."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), device=device))
        self.weight = nn.Parameter(torch.ones(2, 2, device=device))


@pytest.mark.parametrize("saved", [True, None])
@pytest.mark.parametrize("flags", [{"fused": True}, {"capturable": True}, {"fused": None}])
def test_the_step_is_placed_where_the_new_kernels_need_it(saved: bool | None, flags: dict[str, bool | None]) -> None:
    """On the device for fused and capturable kernels, else on the host; `meta` stands for a GPU."""
    settings = Optim(name="adamw")
    old, new = WithScalar("cpu"), WithScalar("meta")
    before, after = construct(groups(old, settings), settings, saved), construct(groups(new, settings), settings)
    for parameter in old.parameters():
        parameter.grad = torch.ones_like(parameter)
    before.step()
    for group in after.param_groups:
        group.update(flags)
    load_state(after, settings, state_dict(before), 1, "checkpoint")
    expected = "meta" if any(flags.values()) else "cpu"
    for parameter in new.parameters():
        assert after.state[parameter]["step"].device.type == expected
        assert after.state[parameter]["exp_avg"].device.type == "meta"


@BUILT_IN
@pytest.mark.parametrize("fused", [(True, None), (None, True)])
def test_resuming_with_other_kernels_gives_the_same_weights(name: str, fused: tuple[bool | None, bool | None]) -> None:
    """As between fp16, FSDP and the other settings. The state is the same bit for bit, the next steps nearly so."""
    settings = config(name)
    models = stopped, resumed = net(), net()
    whole = net()
    before, after = (
        construct(groups(model, settings), settings, kind) for model, kind in zip(models, fused, strict=True)
    )
    through = construct(groups(whole, settings), settings, fused[0])
    train(whole, through, *range(6))
    train(stopped, before, *range(3))
    resumed.load_state_dict(stopped.state_dict())
    load_state(after, settings, state_dict(before), 3, "checkpoint")
    for kept, loaded in zip(before.state.values(), after.state.values(), strict=True):
        assert all(torch.equal(kept[key], loaded[key]) for key in kept)
    train(resumed, after, *range(3, 6))
    for key, value in whole.state_dict().items():
        assert torch.allclose(resumed.state_dict()[key], value, rtol=1e-4, atol=1e-6), key
