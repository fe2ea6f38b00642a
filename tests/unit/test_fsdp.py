"""FSDP on a single rank, which is enough for everything that does not depend on the others."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import raises
from torch.distributed.tensor import DTensor

from paceline.config.recipe import Fsdp, Model, Recipe
from paceline.distributed.fsdp import Sharded, repeated_blocks
from paceline.distributed.world import World
from paceline.models.airbench import AirbenchNet


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
