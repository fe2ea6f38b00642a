"""Parameters that are trained only for a part of the run (optim.groups, train_until)."""

from collections.abc import Callable, Iterable

from torch import nn

from paceline.config.duration import parse
from paceline.config.optim import Optim
from paceline.config.timeline import Timeline
from paceline.errors import UserError
from paceline.optim.groups import matched


class TemporaryParameters:
    """Freezes parameters when their time is over, also after a resume."""

    def __init__(self, model: nn.Module, config: Optim, timeline: Timeline):
        self._trained: list[tuple[int, list[nn.Parameter]]] = []
        """Step from which they are frozen, and parameters."""
        for number, group in enumerate(config.groups):
            if parse(group.train_until).value:
                end = timeline.steps(group.train_until)
                self._trained.append((end, list(matched(model, group, number).values())))
        ended = {id(parameter) for end, parameters in self._trained if end < timeline.total for parameter in parameters}
        if all(id(parameter) in ended for parameter in model.parameters() if parameter.requires_grad):
            message = (
                "optim.groups freezes all parameters before the run ends, so there would be nothing to train. Remove "
                "train_until from a group, or shorten train.duration."
            )
            raise UserError("nothing-to-train", message, field="optim.groups")
        self._frozen: list[nn.Parameter] = []

    def before_step(self, step: int, freeze: Callable[[Iterable[nn.Parameter]], object]) -> None:
        """Freeze what is no longer trained in a step. A collective at the first step of a run and at these times."""
        due = [parameter for end, parameters in self._trained if end <= step for parameter in parameters]
        if due:
            self._trained = [(end, parameters) for end, parameters in self._trained if end > step]
            self._frozen += due
            freeze(due)

    def drop_gradients(self) -> None:
        """Remove gradients of frozen parameters that were computed all the same, so that optimizers skip them."""
        for parameter in self._frozen:
            parameter.grad = None
