"""Compare the recipe cifar10-airbench94 with the code that it follows, on the CPU: training time per image.

    python benchmarks/airbench.py [--source airbench94.py] [--steps 24] [--batch 1024] [--rounds 5] [--precision bf16]

SOURCE is legacy/airbench94.py of KellerJordan/cifar10-airbench, which is not part of this project. Its network, loader
and Lookahead run on the CPU, in the data type of --precision instead of fp16. Without it, the loop takes the network of
this project and a loader in plain PyTorch. Images are generated, and contestants take turns in one process.
"""

import argparse
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from loop import engine_seconds
from torch import nn
from torch.nn import functional as F

from paceline.config.io import load_recipe
from paceline.config.recipe import Recipe
from paceline.distributed.world import World, threads_per_process
from paceline.engine.build import build
from paceline.models.airbench import AirbenchNet
from paceline.system.host import keep_freed_memory
from paceline.system.torchvision_compat import allow_torchvision

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def recipe_of(steps: int, batch: int, precision: str) -> Recipe:
    """Return the recipe with generated images, an epoch of `steps` steps, and no evaluation or checkpoint."""
    words = ["--data.name", "synthetic", "--data.synthetic", f"{{train_samples: {steps * batch}, val_samples: 8}}"]
    words += [
        "--train.global_batch",
        str(batch),
        "--train.duration",
        f"{steps}ba",
        "--evaluate.every",
        "1000ep",
        "--checkpoint.every",
        "1000ep",
    ]
    words += ["--optim.schedule", "{name: constant, points: []}", "--device", "cpu", "--precision", precision]
    return load_recipe("cifar10-airbench94", words)


def source_parts(path: Path, dtype: torch.dtype) -> SimpleNamespace:
    """Return the definitions of the source, on the CPU and in `dtype` instead of fp16."""
    text = path.read_text(encoding="utf-8").split("#                Training ")[0]
    text = text.replace(".half()", f".to({dtype})").replace(".cuda()", "").replace("torch.half", str(dtype))
    parts: dict[str, Any] = {"__name__": "source"}
    allow_torchvision()
    exec(compile(re.sub(r"gpu=0\b", "gpu='cpu'", text), str(path), "exec"), parts)
    return SimpleNamespace(**parts)


def source_loop(
    path: Path, dtype: torch.dtype, batch: int, images: torch.Tensor, labels: torch.Tensor
) -> Callable[[], float]:
    parts = source_parts(path, dtype)
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"images": images, "labels": labels, "classes": [*"0123456789"]}, Path(folder) / "train.pt")
        loader = parts.CifarLoader(folder, train=True, batch_size=batch, aug=parts.hyp["aug"])
    net = parts.make_net()
    parts.init_whitening_conv(net[0], loader.normalize(loader.images[:5000]))
    return lambda: loop_seconds(net, loader, parts.LookaheadState(net))


def plain_loop(dtype: torch.dtype, batch: int, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], float]:
    net = AirbenchNet().to(dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    pixels = (images.to(dtype) / 255).permute(0, 3, 1, 2)
    return lambda: loop_seconds(net, _epoch(pixels, labels, batch), Lookahead(net))


def _epoch(images: torch.Tensor, labels: torch.Tensor, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of an epoch, shifted by up to two pixels."""
    padded = F.pad(images, (2, 2, 2, 2), "reflect")
    shifts = torch.randint(5, (len(images), 2))
    cropped = torch.empty_like(images, memory_format=torch.channels_last)
    for down in range(5):
        for across in range(5):
            chosen = (shifts == torch.tensor([down, across])).all(1)
            cropped[chosen] = padded[chosen, :, down : down + 32, across : across + 32]
    for ids in torch.randperm(len(images)).split(batch):
        yield cropped[ids], labels[ids]


class Lookahead:
    def __init__(self, net: nn.Module):
        self.average = {name: value.clone() for name, value in net.state_dict().items()}

    def update(self, net: nn.Module, decay: float) -> None:
        for average, value in zip(self.average.values(), net.state_dict().values(), strict=True):
            if value.is_floating_point():
                average.lerp_(value, 1 - decay)
                value.copy_(average)


def loop_seconds(net: nn.Module, loader: Iterable[Any], lookahead: Any) -> float:
    """Train an epoch as the source does its first three; return the wall time without the first step."""
    next(net.parameters()).requires_grad_(False)  # the whitening filters
    norms = [p for name, p in net.named_parameters() if "norm" in name and p.requires_grad]
    others = [p for name, p in net.named_parameters() if "norm" not in name and p.requires_grad]
    groups = [{"params": norms, "lr": 0.01, "weight_decay": 0.1}, {"params": others, "lr": 1e-3, "weight_decay": 1.0}]
    optimizer = torch.optim.SGD(groups, momentum=0.85, nesterov=True)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.2, reduction="none")
    times = []
    for step, (images, labels) in enumerate(loader, start=1):
        logits = net(images)
        loss = loss_of(logits, labels).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            lookahead.update(net, 0.5)
        times.append(time.perf_counter())
    return times[-1] - times[0]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, metavar="FILE", help="legacy/airbench94.py")
    parser.add_argument("--steps", type=int, default=24, help="steps per turn")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    options = parser.parse_args(arguments)
    torch.set_num_threads(threads_per_process(1))
    keep_freed_memory()
    dtype, generator = DTYPES[options.precision], torch.Generator().manual_seed(0)
    images = torch.randint(256, (options.steps * options.batch, 32, 32, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (len(images),), generator=generator)
    setup = build(recipe_of(options.steps, options.batch, options.precision), World())
    name = "source" if options.source else "plain loop"
    given = (dtype, options.batch, images, labels)
    other = source_loop(options.source, *given) if options.source else plain_loop(*given)
    seconds: dict[str, list[float]] = {"paceline": [], name: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 1):
            turns: list[tuple[str, Callable[[], float]]] = [
                ("paceline", partial(engine_seconds, setup, Path(folder) / str(number))),
                (name, other),
            ]
            for contestant, turn in turns if number % 2 else reversed(turns):
                seconds[contestant].append(turn())
    count = (options.steps - 1) * options.batch
    print(f"airbench94, {options.precision}, {torch.get_num_threads()} threads, {options.rounds} rounds; medians")
    for contestant, own in seconds.items():
        ratios = [
            mine / theirs for mine, theirs in zip(own[1:], seconds[name][1:], strict=True)
        ]  # the first epoch is a warmup
        per_image = 1e6 * statistics.median(own[1:]) / count
        print(f"  {contestant:12}{per_image:9.1f} us per image   ratio to the {name} {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
