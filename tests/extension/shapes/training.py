"""A model, a loss, an optimizer, a schedule and a callback."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl


@pl.register_model("shapes-net")
def shapes_net(num_classes: int, in_chans: int, width: int = 8, plain: bool = False) -> nn.Module:
    """`plain`: without batch norm and dropout, which differ between ranks."""

    def block(channels: int, out: int) -> nn.Module:
        extra = () if plain else (nn.BatchNorm2d(out), nn.Dropout(0.1))
        return nn.Sequential(nn.Conv2d(channels, out, 3, 2, 1), *extra, nn.ReLU())

    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, num_classes))
    return nn.Sequential(block(in_chans, width), block(width, 2 * width), *head)


@pl.register_loss("focal")
def focal(logits: torch.Tensor, targets: torch.Tensor, gamma: float = 2.0) -> torch.Tensor:
    log_p = F.log_softmax(logits, 1).gather(1, targets[:, None])
    return -((1 - log_p.exp()) ** gamma * log_p).mean()


@pl.register_optimizer("plain-sgd")
def plain_sgd(params: list[dict[str, Any]], lr: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=momentum, foreach=False)


@pl.register_schedule("triangle")
def triangle(step: int, total_steps: int, peak: float = 0.5) -> float:
    top = peak * total_steps
    return (step + 1) / top if step < top else (total_steps - step) / (total_steps - top)


@pl.register_callback("watcher")
class Watcher(pl.Callback):
    """Logs the number of evaluations, and may ask to stop at a step."""

    def __init__(self, stop_at: int = 0, fail_at: int = 0):
        self._stop_at, self._fail_at, self._seen = stop_at, fail_at, []

    def on_start(self, run: pl.RunInfo) -> None:
        self._seen.append("start")

    def on_step(self, run: pl.RunInfo, step: pl.StepInfo) -> None:
        assert step.loss > 0
        if step.step == self._fail_at:
            raise ValueError("as requested")
        if step.step == self._stop_at:
            run.stop("enough")

    def on_evaluation(self, run: pl.RunInfo, metrics: Mapping[str, Any]) -> None:
        self._seen.append("evaluation")
        run.log(evaluations=self._seen.count("evaluation"))

    def on_checkpoint(self, run: pl.RunInfo, path: Any) -> None:
        self._seen.append("checkpoint" if (path / "COMMIT").exists() else "too early")

    def on_end(self, run: pl.RunInfo, summary: Mapping[str, Any]) -> None:
        (run.path / "seen.txt").write_text(" ".join([*self._seen, str(summary["status"])]))

    def on_failure(self, run: pl.RunInfo, message: str) -> None:
        (run.path / "seen.txt").write_text(" ".join([*self._seen, "failure"]))
