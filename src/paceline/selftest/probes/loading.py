"""How fast the shard loader feeds each rank, beside how fast the rank trains."""

import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paceline.engine.build import Setup, build
from paceline.selftest.probes import Probing
from paceline.selftest.probes.steps import images_per_second
from paceline.selftest.settings import image_side, speed_recipe
from paceline.system.device import wait
from paceline.system.lifetime import child_env, own_command

_CLASSES, _PREFETCHED = 10, 4
_SHAPE = (1.75, 1.5)  # width and height of the files, as multiples of the side that is trained on


def loading(probing: Probing) -> dict[str, Any]:
    """Return the images per second that the loader of each rank decodes, and that its device trains on."""
    world, settings = probing.world, probing.settings
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        # the first rank of a node prepares the data for all of them
        place = world.all_gather_object(folder)[world.rank - world.local_rank]
        if world.local_rank == 0:
            per_rank = speed_recipe(settings).train.global_batch // settings.ranks
            _prepare(Path(folder), image_side(settings), num_images=4 * per_rank * world.local_size)
        world.barrier()
        setup = build(speed_recipe(settings, str(Path(place) / "shards")), world)
        fed = _feeding_rate(setup, seconds=0.5 if settings.quick else 3.0)
        world.barrier()
        consumed = images_per_second(setup, count=2 if settings.quick else 10)
        rates = world.all_gather_object((fed, consumed))
    return {"fed_per_rank": [rate[0] for rate in rates], "consumed_per_rank": [rate[1] for rate in rates]}


def _prepare(folder: Path, side: int, num_images: int) -> None:
    """Write JPEG files and convert them with the command that users run."""
    width, height = (round(side * factor) for factor in _SHAPE)
    rng = np.random.default_rng(0)
    for number in range(num_images):
        path = folder / "files" / ("train" if number % 8 else "val") / f"class-{number % _CLASSES}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = smooth + rng.integers(-8, 9, smooth.shape, dtype=np.int16)  # as hard to decode as a photograph
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)
    words = own_command("prepare", "folder", folder / "files", "--out", folder / "shards")
    subprocess.run(words, env=child_env(), check=True, capture_output=True)


def _feeding_rate(setup: Setup, seconds: float) -> float:
    """Return the images per second that the loader of this rank delivers to its device."""
    batches, images = setup.loader.steps(), 0
    for _ in range(_PREFETCHED):  # these may be ready before they are asked for
        next(batches)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or not images:
        images += sum(len(batch.labels) for batch in next(batches))
    wait(setup.world.device)
    return images / (time.perf_counter() - begin)
