"""The command line: verbs, thin. Nothing heavy is imported before a verb needs it."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from paceline import __version__
from paceline.distributed.env import AGENT, under_launcher
from paceline.errors import Stopped, UserError
from paceline.system.files import disk_error, is_disk_error, say
from paceline.system.lifetime import end_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    if argv is None:
        end_with_parent()
    arguments = list(sys.argv[1:] if argv is None else argv)
    status = _guarded(arguments)
    if under_launcher(os.environ):
        # all work is done; torch's threads sometimes abort the process while the interpreter is taken down
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _guarded(arguments: list[str]) -> int:
    """Run a verb; what the user can put right is a message, not a traceback."""
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()  # later nobody could say that it failed
        return status
    except Stopped as stopped:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return stopped.exit_status
        # a stopped rank has done what it was asked to; torchrun would report another status as a crash
        if AGENT in os.environ:
            from paceline.distributed.run import report_stop

            report_stop(stopped.signum)
        return 0
    except UserError as error:
        _complain(f"error: {error.report}")
        return 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except BrokenPipeError:
        _give_up_output()
        return 141
    except OSError as error:  # no room, no right to write, a file that vanished: the user's to mend
        if not error.filename and not is_disk_error(error):
            raise
        _complain(disk_error(error))
        _give_up_output()
        return 1


def _give_up_output() -> None:
    """If standard output takes nothing more, the interpreter would fail with it once more when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> None:
    if AGENT in os.environ:
        from paceline.distributed.run import report

        if report(message):
            return
    with suppress(OSError):  # the status still tells
        say(f"paceline: {message}", error=True)


def _dispatch(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="paceline",
        usage="paceline VERB ...",
        description="Train image classifiers on one machine or many with one command, and get the evidence.",
        epilog="`paceline VERB --help` explains a verb. Start with `paceline demo`.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    verbs = parser.add_subparsers(metavar="VERB")
    for name, summary in _public().items():
        verbs.add_parser(name, help=summary, add_help=False)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    verb = arguments[0]
    if verb.startswith("-"):
        parser.parse_args(arguments[:1])
    if verb not in _VERBS:
        return _unknown(verb)
    module = import_module(f"paceline.cli.{_VERBS[verb][1]}")
    status: int = getattr(module, verb.replace("-", "_"))(arguments[1:])
    return status


def _unknown(verb: str) -> int:
    names = list(_public())
    close = difflib.get_close_matches(verb, names, n=1, cutoff=0.5)
    _complain(f"{verb!r} is not a verb{f'; did you mean {close[0]}?' if close else ''}")
    print(f"verbs: {', '.join(names)}; `paceline --help` explains them", file=sys.stderr)
    return 2


def _public() -> dict[str, str]:
    """Verbs for users, with what they do; the others are called by paceline itself, also on other machines."""
    return {name: summary for name, (summary, _) in _VERBS.items() if summary}


# what a verb does, and the module whose function of its name does it
_VERBS = {
    "demo": ("train digits on one process, then on two, and compare", "demo"),
    "prepare": ("bring images into the form that training reads fastest", "data"),
    "data": ("describe, check, show or export prepared data", "data"),
    "recipes": ("list the shipped recipes", "train"),
    "train": ("train a recipe, on one process or many", "train"),
    "evaluate": ("evaluate a run or a checkpoint", "train"),
    "export": ("give a run's weights as a plain file", "train"),
    "plan": ("what a recipe would do, before it does it: phases, steps, time and cost", "plan"),
    "find-batch": ("find the largest batch that fits, and the fastest one", "find_batch"),
    "launch": ("train on several machines, and follow it", "launch"),
    "jobs": ("list the jobs that were launched", "jobs"),
    "status": ("say what the machines of a job are doing", "jobs"),
    "logs": ("show the logs of a job's machines", "jobs"),
    "attach": ("follow a job that was launched before", "jobs"),
    "resume": ("start a job again that ended before its time", "jobs"),
    "stop": ("end a job on all machines", "jobs"),
    "fetch": ("bring a job's run folder here", "jobs"),
    "ec2": ("look after machines, volumes and images on EC2", "ec2"),
    "runs": ("list run folders: status, progress, best accuracy", "runs"),
    "compare": ("compare runs: fair or not, speed-up, accuracy, memory, cost", "evidence"),
    "watch": ("watch a run as it goes on", "watch"),
    "doctor": ("check this machine, other machines, or where the time of a run went", "doctor"),
    "logbook": ("write the logbook of runs", "evidence"),
    "report": ("write one HTML page about runs", "evidence"),
    # without a summary: not for users
    "installation": ("", "installation"),
    "try-batch": ("", "find_batch"),
    "rendezvous": ("", "hosts"),
    "facts": ("", "hosts"),
    "probe": ("", "hosts"),
    "test-allreduce": ("", "hosts"),
}
