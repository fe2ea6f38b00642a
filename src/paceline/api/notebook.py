"""Progress and curves of a run in a notebook, updated while it trains."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.system.outcome import read_outcome

_SECONDS = 2.0


@contextmanager
def live_view(outcome: Path) -> Iterator[None]:
    """In a notebook, display the run that the file `outcome` names until the end of the block."""
    if not _in_notebook():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_follow, args=(outcome, done), name="live view", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


def _follow(outcome: Path, done: threading.Event) -> None:
    ipython: Any = import_module("IPython.display")
    handle: Any = None
    finished = False
    while not finished:
        finished = done.wait(_SECONDS)
        try:
            text = progress_html(Path(read_outcome(outcome)["run"]))
        except (KeyError, UserError, OSError):  # not started, or not readable at this moment
            continue
        if handle:
            handle.update(ipython.HTML(text))
        else:
            handle = ipython.display(ipython.HTML(text), display_id=True)
    if handle:
        handle.update(ipython.HTML(""))  # the run that the cell returns shows its final curves


def progress_html(path: Path) -> str:
    """Return a progress bar and the curves of a run so far."""
    from paceline.analysis.charts import svg
    from paceline.analysis.curves import charts_of
    from paceline.analysis.read import read

    run = read(path)
    step = max((record["step"] for record in run.trained), default=0)
    total = max(1, run.summary.get("total_steps", 1))
    drawn = [svg(chart) for name, chart in charts_of([run])][:2]
    figures = "".join(f'<div style="width:420px">{chart}</div>' for chart in drawn if chart)
    head = f'<progress max="{total}" value="{step}"></progress> {escape(run.name)}: step {step:,} of {total:,}'
    return f'{head}<div style="display:flex;flex-wrap:wrap;gap:8px">{figures}</div>'
