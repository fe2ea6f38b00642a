"""Logits that ranks keep, gathered in chunks: any division of the samples among ranks gives the same arrays."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import raises

from paceline.analysis.details.slices import DetailsSpec
from paceline.data.load.batch import Batch
from paceline.distributed.world import World
from paceline.engine.evaluation import details
from paceline.engine.evaluation.details import DetailsWriter, KeptLogits

CLASSES = 7


@dataclass(frozen=True)
class _Threads(World):
    """A rank that is a thread of this process."""

    barrier_: Barrier = field(default_factory=lambda: Barrier(1))
    slots: list[torch.Tensor] = field(default_factory=list)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.slots[self.rank] = tensor
        self.barrier_.wait(60)
        shapes = {part.shape for part in self.slots}
        assert len(shapes) == 1, shapes  # as a back end needs
        parts = [part.clone() for part in self.slots]
        self.barrier_.wait(60)
        return parts


def _gathered(ids_by_rank: list[list[int]], logits: torch.Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    size, barrier, slots = len(ids_by_rank), Barrier(len(ids_by_rank)), [torch.empty(0)] * len(ids_by_rank)

    def rank(number: int) -> tuple[np.ndarray, np.ndarray]:
        ids = torch.tensor(ids_by_rank[number], dtype=torch.int64)
        kept = KeptLogits(len(ids) + 2, CLASSES)  # two samples are corrupt
        for part in ids.split(3):
            best = logits[part].topk(5, dim=1).indices
            kept.keep(Batch(torch.empty(0), part % CLASSES, part), part % CLASSES, logits[part], best)
        return kept.gathered(_Threads(number, size, barrier_=barrier, slots=slots))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


@pytest.mark.parametrize("chunk", [1, 40, 200, 1 << 20])
def test_any_division_gives_the_same_arrays(chunk: int, monkeypatch) -> None:
    monkeypatch.setattr(details, "_CHUNK_BYTES", chunk)
    logits = torch.randn(20, CLASSES, generator=torch.Generator().manual_seed(0))
    ids = [number for number in range(20) if number not in (4, 11)]
    for division in ([ids], [ids[::-1]], [ids[:5], ids[5:]], [ids[9:], [], ids[:9]], [ids[1::2], ids[::2]]):
        (integers, found), *others = _gathered(division, logits)
        assert integers[:, 0].tolist() == ids
        assert integers[:, 1].tolist() == [number % CLASSES for number in ids]
        np.testing.assert_array_equal(found, logits[ids].numpy())
        np.testing.assert_array_equal(integers[:, 2], found.argmax(1))
        assert all(len(rest) == 0 for _, rest in others)


def test_one_rank_holds_its_logits_once() -> None:
    kept = KeptLogits(3, CLASSES)
    ids = torch.tensor([2, 0])
    logits = torch.randn(2, CLASSES)
    kept.keep(Batch(torch.empty(0), ids, ids), ids, logits, logits.topk(5, dim=1).indices)
    _, found = kept.gathered(World())
    np.testing.assert_array_equal(found, logits[[1, 0]].numpy())
    assert np.shares_memory(found, kept._logits.numpy())


def test_too_many_logits_leave_no_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(details, "_MAX_BYTES", 100)
    facts = {"classes": [{"id": "a", "name": "a"}] * CLASSES, "data": {}}
    batches = SimpleNamespace(num_samples=10, rank_samples=10, names=[])
    with raises("too-many-logits"):
        DetailsWriter(DetailsSpec(out=tmp_path / "out"), facts, tmp_path, batches, World())
    assert not list(tmp_path.iterdir())
