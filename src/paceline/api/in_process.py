"""Trains and evaluates within this process, and restores what that changes."""

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from paceline.errors import Stopped, UserError
from paceline.system.host import affinity_restorer
from paceline.system.lifetime import NOT_INHERITED
from paceline.system.logs import log

_trained_in = 0  # the process that trained first; threads of torch do not survive a fork of it


@contextmanager
def in_this_process() -> Iterator[None]:
    """Hide the variables of a launcher, and turn a stop after a signal into KeyboardInterrupt.

    Settings of torch that training cannot work with are neutralized. They, the random state, threads, log handlers,
    CPU affinity, warning filters and environment variables are restored at the end.
    """
    global _trained_in
    if threading.current_thread() is not threading.main_thread():
        message = "in_process=True needs the main thread, which receives signals. Call it there, or omit it."
        raise UserError("in-process-needs-main-thread", message)
    if _trained_in not in (0, os.getpid()):
        message = (
            f"in_process=True does not work in a process that was forked from one that trained ({_trained_in}). "
            'Use multiprocessing.get_context("spawn"), or omit it.'
        )
        raise UserError("in-process-after-fork", message)
    _trained_in = os.getpid()
    with ExitStack() as restored:
        _restore_torch(restored)
        _restore_log(restored)
        restored.callback(affinity_restorer())
        restored.enter_context(warnings.catch_warnings())
        restored.callback(_restore_environment, dict(os.environ))
        for name in NOT_INHERITED:
            os.environ.pop(name, None)
        try:
            yield
        except Stopped:
            raise KeyboardInterrupt from None


def _restore_torch(restored: ExitStack) -> None:
    import torch

    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    restored.enter_context(torch.random.fork_rng(devices))
    restored.callback(torch.set_num_threads, torch.get_num_threads())
    restored.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float32)
    restored.enter_context(torch.inference_mode(False))
    restored.enter_context(torch.enable_grad())


def _restore_log(restored: ExitStack) -> None:
    for name in ("handlers", "propagate", "level"):
        restored.callback(setattr, log, name, getattr(log, name))


def _restore_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
