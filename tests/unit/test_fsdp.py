"""FSDP on a single rank, which is enough for everything that does not depend on the others."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import raises
from safetensors.torch import save_file
from torch.distributed import device_mesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from paceline.checkpoint.tensors import open_files, read_like
from paceline.config.data import Data, Synthetic
from paceline.config.model import Model
from paceline.config.recipe import Fsdp, Recipe, Train
from paceline.data.load.order import Plan
from paceline.data.load.source import open_source
from paceline.distributed import flight_recorder, mesh, process_group
from paceline.distributed.fsdp import Sharded, initialize, repeated_blocks, without_memory
from paceline.distributed.mesh import ranks_per_replica
from paceline.distributed.world import World
from paceline.engine.build_model import build_sharded_model
from paceline.models.airbench import AirbenchNet
from paceline.optim.template import place


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("reshard", [True, False])
def test_an_evaluation_does_not_change_resharding(group: None, reshard: bool) -> None:
    model = AirbenchNet(widths=(8, 16), norm="group")
    replica = Sharded(model, World(), Recipe("any", fsdp=Fsdp(reshard_after_forward=reshard)), "fp32")
    images = torch.randn(2, 3, 16, 16)

    def shards() -> set[bool]:
        return {isinstance(parameter, DTensor) for parameter in model.blocks[0].parameters()}

    with replica.unsharded(model), torch.no_grad():
        model(images)
        assert shards() == {False}
    assert shards() == {True}
    replica.forward(images)
    assert shards() == {reshard}


def test_a_model_without_repeated_blocks_is_refused(group: None) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    assert not list(repeated_blocks(model))
    with raises("fsdp-no-blocks") as caught:
        Sharded(model, World(), Recipe("any", model=Model(name="plain")), "fp32")
    assert caught.value.fields == {"model": "plain"}


class _Net(torch.nn.Module):
    """Two blocks, a weight that is used twice, and a buffer that checkpoints do not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(6, 6)) for _ in range(2))
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.rand(6), persistent=False)
        self.register_buffer("steps", torch.tensor(3))


def test_a_model_without_memory_gets_the_weights_and_buffers_of_rank_zero(group: None) -> None:
    recipe, initial = Recipe("any"), AirbenchNet(widths=(8, 16), norm="batch")
    initial.register_buffer("scale", torch.rand(6), persistent=False)
    model = without_memory(initial)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert not any(tensor.is_meta for tensor in [*initial.parameters(), *initial.buffers()])
    Sharded(model, World(), recipe, "fp32")
    initialize(model, initial, World(), recipe)
    expected = dict([*initial.named_parameters(), *initial.named_buffers()])
    found = dict([*model.named_parameters(), *model.named_buffers()])
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, expected[name])
    assert torch.isfinite(model(torch.randn(2, 3, 16, 16))).all()


def test_buffers_that_modules_share_are_filled_in_each(group: None) -> None:
    initial, mask = AirbenchNet(widths=(8, 16), norm="group"), torch.rand(2)
    for block in initial.blocks:
        block.register_buffer("mask", mask)
    model = without_memory(initial)
    Sharded(model, World(), Recipe("any"), "fp32")
    initialize(model, initial, World(), Recipe("any"))
    assert all(torch.equal(block.mask, mask) for block in model.blocks)


@pytest.mark.parametrize(("device", "closes"), [("cpu", True), ("cuda", False)])
def test_ports_of_a_hybrid_mesh(device: str, closes: bool, monkeypatch) -> None:
    """NCCL connects through its ports at the first collective, so only those of gloo are closed."""
    found: list[object] = []
    monkeypatch.setattr(mesh, "ranks_per_replica", lambda world, choice: 2)
    monkeypatch.setattr(World, "close_ports", lambda self: found.append("closed"))
    groups = [SimpleNamespace(set_timeout=found.append) for _ in range(2)]
    monkeypatch.setattr(process_group, "_subgroups", [])
    created = SimpleNamespace(get_all_groups=lambda: groups)
    monkeypatch.setattr(device_mesh, "init_device_mesh", lambda *_, **__: created)
    mesh.create_mesh(World(0, 4, 0, 2, torch.device(device)), "hybrid")
    assert found == [flight_recorder.timeout()] * 2 + ["closed"] * closes


def test_shared_weights_stay_shared_without_memory() -> None:
    model = without_memory(_Net())
    assert model.second.weight is model.first.weight
    assert model.scale.is_meta
    assert "scale" not in model.state_dict()


@pytest.mark.parametrize(("rank", "device"), [(0, "cpu"), (1, "meta")])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "airbench"])
def test_only_rank_zero_creates_weights(name: str, rank: int, device: str) -> None:
    options = {"img_size": 32} if name.startswith("vit") else {"widths": [8, 16]}
    synthetic = Synthetic(train_samples=8, val_samples=2, channels=3, size=32, classes=4)
    data = Data(name="synthetic", synthetic=synthetic, mean=(0.5,) * 3, std=(0.25,) * 3)
    train = Train(global_batch=4, duration="2ba")
    recipe = Recipe("any", data=data, model=Model(name, options=options), train=train, device="cpu", precision="fp32")
    source = open_source(recipe)
    timeline = Plan.of(recipe, source.num_train, 2, rank).timeline
    model = build_sharded_model(recipe, source, 4, timeline, World(rank, 2, rank, 2))
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {device}
    assert model.training


class _Gathered(World):
    """A rank of a job whose nodes have these numbers of ranks."""

    def all_gather_object(self, value: object) -> list[object]:
        assert value in NODES
        return list(NODES)


NODES: list[object] = []


@pytest.mark.parametrize(
    ("nodes", "choice", "shards"),
    [
        *[([2, 2], "auto", 2), ([4, 4, 4], "hybrid", 4), ([2, 2], "flat", 4), ([4], "auto", 4), ([1, 1], "auto", 2)],
        *[([3, 1], "auto", 4), ([1, 3], "auto", 4), ([2, 2, 1], "auto", 5)],
    ],
)
def test_models_are_sharded_within_equal_nodes(nodes: list[int], choice: str, shards: int) -> None:
    size, first, found = sum(nodes), 0, set()
    NODES.clear()
    for count in nodes:
        NODES.extend([(first, count)] * count)
        first += count
    for rank, (begin, count) in enumerate(NODES):  # type: ignore[misc]
        found.add(ranks_per_replica(_Gathered(rank, size, rank - begin, count), choice))
    assert found == {shards}


def test_hybrid_sharding_of_unequal_nodes_is_refused() -> None:
    NODES[:] = [(0, 3), (0, 3), (0, 3), (3, 1)]
    with raises("fsdp-mesh-unsupported"):
        ranks_per_replica(_Gathered(0, 4, 0, 3), "hybrid")


def test_optimizer_state_is_placed_on_the_device_of_an_offloaded_parameter(monkeypatch) -> None:
    """The mesh is of GPUs, where distribute_tensor puts its result, but the parameter is in host memory."""
    on_gpu = torch.zeros(3, device="meta")
    moved = []
    monkeypatch.setattr(type(on_gpu), "to", lambda tensor, device: moved.append((tensor, device)) or torch.ones(3))
    monkeypatch.setattr("torch.distributed.tensor.distribute_tensor", lambda *_: on_gpu)
    parameter = SimpleNamespace(device_mesh="cuda", placements=(Shard(0),), device=torch.device("cpu"))
    assert place(torch.ones(3), parameter).device.type == "cpu"
    assert moved == [(on_gpu, torch.device("cpu"))]


def test_saved_tensor_is_read_into_shards_on_the_device_of_a_parameter(group: None, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    weight = torch.arange(12.0).view(4, 3)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    saved = open_files([tmp_path / "model.safetensors"])["weight"]
    like = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]))
    found = read_like(saved, like)
    assert isinstance(found, DTensor)
    assert found.device == like.device
    assert torch.equal(found.to_local(), weight)
    assert not isinstance(read_like(saved, torch.zeros(4, 3)), DTensor)
    assert not isinstance(read_like(saved, None), DTensor)
