"""torch.compile for the repeated blocks of a model, and how long and how often it compiled.

Block by block, as PyTorch's documentation recommends: equal blocks share their code, gradients of a block are reduced
while earlier ones are still computed, and all strategies run the same kernels.
"""

import os
import shutil
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.config.timeline import ResolvedPhase, Timeline
from paceline.errors import UserError
from paceline.system.blocks import repeated_blocks
from paceline.system.logs import log
from paceline.system.torch_internals import on_compilation

BACKEND = "inductor"
_WARM_STEPS = 2
"""Steps of a shape in which compiling is expected: the second may differ in the layout of gradients."""


@dataclass
class Compilation:
    """Counts and times compilations on this rank. Without compilation it stays at zero."""

    count: int = 0
    recompilations: int = 0
    """Compilations in a step whose shape was compiled before."""
    _seconds: float = 0.0
    _begin: float = 0.0
    _known: int = 0
    _steps: dict[tuple[int, int], int] = field(default_factory=dict)

    def start(self, _: Any) -> None:
        if not self.count and not self._begin:
            log.info("compiling the model, which can take minutes; its blocks are compiled one after another")
        self._begin = time.perf_counter()

    def end(self, _: Any) -> None:
        self._seconds += time.perf_counter() - self._begin
        self.count += 1

    def take_seconds(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def after_step(self, phase: ResolvedPhase) -> None:
        """Look for compilations that no new shape explains. Cheap, because it is called after every step."""
        shape = phase.size, phase.global_batch
        self._steps[shape] = steps = self._steps.get(shape, 0) + 1
        new, self._known = self.count - self._known, self.count
        if new and steps > _WARM_STEPS:
            if not self.recompilations:
                log.warning(
                    "the model was compiled again, although the shape of its input did not change. Its forward pass "
                    "may depend on a value that changes; TORCH_LOGS=recompiles shows which. --compile false turns "
                    "compiling off."
                )
            self.recompilations += new


def compile_model(model: nn.Module, timeline: Timeline, device: torch.device) -> Compilation:
    """Compile the repeated blocks of a model, or the whole model if it has none. Names of weights stay the same."""
    _check_compiler(device)
    blocks = list(repeated_blocks(model)) or [model]
    shapes = len({(phase.size, phase.global_batch) for phase in timeline.phases})
    # torch would run what exceeds the limit without compiling it; blocks of one class count together
    needed = 2 * len(blocks) * shapes
    settings: Any = torch.compiler.config
    settings.recompile_limit = max(settings.recompile_limit, needed)
    settings.accumulated_recompile_limit = max(settings.accumulated_recompile_limit, needed)
    for block in blocks:
        # not block.compile(), which would also compile the hooks of FSDP
        compiled = torch.compile(block.forward, backend=BACKEND, dynamic=False)
        setattr(block, "forward", compiled)  # noqa: B010 (mypy refuses the assignment)
    compilation = Compilation()
    on_compilation(compilation.start, compilation.end)
    return compilation


def _check_compiler(device: torch.device) -> None:
    """Refuse to compile without the compiler that torch calls: of C++ for CPUs, of C for the kernels of GPUs."""
    variable, usual = ("CXX", ("g++", "clang++")) if device.type == "cpu" else ("CC", ("gcc", "clang", "cc"))
    given = os.environ.get(variable)
    if not any(map(shutil.which, [given] if given else usual)):
        language, tried = "C++" if variable == "CXX" else "C", given or ", ".join(usual)
        found = f"{variable}={given} does not exist" if given else f"none of {tried} is on the PATH"
        raise UserError(
            "compiler-not-found",
            f"compile=true needs a {language} compiler, but {found}. Install one, set {variable}, or use --compile "
            "false.",
            compiler=tried,
        )
