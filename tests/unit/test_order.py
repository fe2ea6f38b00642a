import torch
from conftest import one_epoch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from paceline.config.batch import BatchLayout
from paceline.config.data import Augment, Data
from paceline.config.recipe import Recipe, Train
from paceline.data.load.in_memory import ResidentLoader
from paceline.data.load.order import Plan, epoch_order, micro_batches, uniform
from paceline.data.sets import ImageSet, load


@given(
    seed=st.integers(0, 2**31 - 1),
    epoch=st.integers(0, 1000),
    samples=st.integers(1, 300),
    ranks=st.integers(1, 6),
    accumulation=st.integers(1, 3),
    per_rank=st.integers(1, 5),
)
def test_global_batches_are_the_same_on_any_number_of_ranks(
    seed, epoch, samples, ranks, accumulation, per_rank
) -> None:
    batch = ranks * accumulation * per_rank
    order = epoch_order(seed, epoch, samples)
    assert sorted(order.tolist()) == list(range(samples))
    layout = BatchLayout(batch, ranks, accumulation)
    for step in range(samples // batch):
        together = torch.cat([micro_batches(order, step, layout, rank).flatten() for rank in range(ranks)])
        assert torch.equal(together, order[step * batch : (step + 1) * batch])


@given(
    seed=st.integers(0, 2**31 - 1),
    repeats=st.integers(2, 6),
    eighth=st.integers(1, 64),
    rest=st.integers(0, 40),
)
@example(seed=0, repeats=4, eighth=128, rest=0)  # torchvision's recipe on 8 ranks
def test_copies_of_an_image_spread_over_the_ranks(seed, repeats, eighth, rest) -> None:
    """Same global batches on any number of ranks, as many different images per rank as possible, all copies shown."""
    batch, steps = 8 * eighth, 3
    samples = steps * batch + rest % batch
    order = epoch_order(seed, 0, samples, repeats)
    assert len(order) == samples
    counts = (order % samples).bincount(minlength=samples)
    assert set(counts.tolist()) <= {0, samples % repeats, repeats}
    assert (counts == samples % repeats).sum() <= 1 or samples % repeats == 0  # the epoch may end within an image
    for step in range(steps):
        whole = micro_batches(order, step, BatchLayout(batch, 1, 1), 0, repeats).flatten()
        assert sorted(whole.tolist()) == sorted(order[step * batch : (step + 1) * batch].tolist())
        different = len((whole % samples).unique())
        for ranks, accumulation in ((2, 1), (4, 1), (8, 1), (2, 4)):
            layout = BatchLayout(batch, ranks, accumulation)
            parts = [micro_batches(order, step, layout, rank, repeats) for rank in range(ranks)]
            assert torch.equal(torch.cat([part.flatten() for part in parts]), whole)
            most, shown = min(batch // ranks, different), min(len((part % samples).unique()) for part in parts)
            if batch % repeats == 0 and (ranks % repeats == 0 or repeats % ranks == 0):
                assert shown == most
            else:  # samples move by a few places, for their partners; batches begin or end within the copies of one
                near = batch // ranks > different - 2 * repeats - 4
                assert shown >= most - (repeats + 2 if near else 0)


@given(repeats=st.integers(2, 6), half=st.integers(1, 60), step=st.integers(0, 5))
def test_a_copy_is_mixed_with_another_image_than_the_other_copies(repeats, half, step) -> None:
    batch = 2 * half
    assume(batch >= 2 * repeats)
    samples = 6 * batch + 1
    order = epoch_order(0, 0, samples, repeats)
    ids = micro_batches(order, step, BatchLayout(batch, 1, 1), 0, repeats).flatten() % samples
    partners: dict[int, set[int]] = {}
    for one, other in ids.view(-1, 2).tolist():
        assert one != other
        partners.setdefault(one, set()).add(other)
        partners.setdefault(other, set()).add(one)
    if batch % (2 * repeats) == 0 and len(partners) > repeats:
        assert {len(others) for others in partners.values()} == {repeats}


def test_epochs_and_seeds_differ() -> None:
    orders = [epoch_order(seed, epoch, 100).tolist() for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_random_numbers_depend_on_the_sample_id_and_are_uniform() -> None:
    ids = torch.arange(200_000)
    values = uniform(1, 2, ids, stream=3)
    shuffled = torch.randperm(len(ids))
    assert torch.equal(uniform(1, 2, ids[shuffled], stream=3), values[shuffled])
    assert ((values >= 0) & (values < 1)).all()
    counts = torch.histc(values, bins=100, min=0, max=1)
    chi_squared = ((counts - 2000) ** 2 / 2000).sum()
    assert chi_squared < 160  # 99 degrees of freedom: exceeded with probability 1e-4
    other = uniform(1, 2, ids, stream=4)
    assert abs(torch.corrcoef(torch.stack([values, other]))[0, 1]) < 0.01


def _loader(images: ImageSet, data: Data, ranks: int, rank: int, accumulation: int = 1) -> ResidentLoader:
    recipe = Recipe("any", seed=3, data=data, train=Train(global_batch=48, grad_accumulation=accumulation))
    return ResidentLoader(data, images, Plan.of(recipe, len(images.train), ranks, rank), torch.device("cpu"))


def test_ids_and_pixels_are_the_same_on_1_2_and_4_ranks() -> None:
    data = Data(name="digits", augment=Augment(flip="random", translate=2, cutout=3))
    images = load(data)
    alone = one_epoch(_loader(images, data, 1, 0), 1)
    for ranks, accumulation in ((2, 1), (4, 1), (2, 3)):
        loaders = [one_epoch(_loader(images, data, ranks, rank, accumulation), 1) for rank in range(ranks)]
        for whole, *parts in zip(alone, *loaders, strict=True):
            batches = [batch for rank in parts for batch in rank]
            assert torch.equal(torch.cat([batch.ids for batch in batches]), whole[0].ids)
            assert torch.equal(torch.cat([batch.labels for batch in batches]), whole[0].labels)
            assert torch.equal(torch.cat([batch.images for batch in batches]), whole[0].images)


def test_an_epoch_resumed_in_the_middle_continues_with_the_same_samples() -> None:
    data = Data(name="digits", augment=Augment(flip="random"))
    images = load(data)
    whole = [batch for step in one_epoch(_loader(images, data, 1, 0), 2) for batch in step]
    first = [batch for step in one_epoch(_loader(images, data, 2, 0), 2)[:10] for batch in step]
    first_other = [batch for step in one_epoch(_loader(images, data, 2, 1), 2)[:10] for batch in step]
    rest = [batch for step in one_epoch(_loader(images, data, 1, 0), 2, first_step=10) for batch in step]
    ids = [torch.cat([a.ids, b.ids]) for a, b in zip(first, first_other, strict=True)] + [batch.ids for batch in rest]
    assert torch.equal(torch.cat(ids), torch.cat([batch.ids for batch in whole]))
