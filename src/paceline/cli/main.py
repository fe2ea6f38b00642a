"""The command line. Nothing heavy is imported before a command needs it, so that --help is fast."""

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from paceline import __version__
from paceline.distributed.env import AGENT, under_launcher
from paceline.errors import Stopped, UserError
from paceline.system.files import disk_error, disk_error_code, is_disk_error, say
from paceline.system.lifetime import end_with_parent
from paceline.system.outcome import report_outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    if argv is None:
        _replace_closed_streams()
        end_with_parent()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not under_launcher(os.environ):
        return _guarded(arguments)
    try:
        status = _guarded(arguments)
    except Exception:
        traceback.print_exc()
        status = 1
    except SystemExit as left:  # argparse
        status = int(left.code or 0)
    # shutting down the interpreter would wait for lost ranks, and torch's threads sometimes abort the process
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _replace_closed_streams() -> None:
    """Let standard streams that were closed (`<&-`) read or write nothing, so that no other file gets their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def _guarded(arguments: list[str]) -> int:
    """Run a command; errors that the user can fix are printed as a message, not as a traceback."""
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()  # here a failure can still be reported
        return status
    except Stopped as stopped:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return stopped.exit_status
        # the rank stopped as requested; torchrun would report any other status as a crash
        if AGENT in os.environ:
            from paceline.distributed.reports import report_stop

            report_stop(stopped.signum)
        return 0
    except UserError as error:
        _complain(error)
        return 2 if error.code in _USAGE_ERRORS else 1
    except KeyboardInterrupt:
        _complain(UserError("command-interrupted", "interrupted"), "interrupted")
        return 130
    except BrokenPipeError:
        _discard_output()
        return 141
    except OSError as error:  # disk full, no permission, a file that disappeared: the user can fix it
        if not error.filename and not is_disk_error(error):
            raise
        _complain(UserError(disk_error_code(error), disk_error(error)))
        _discard_output()
        return 1


def _discard_output() -> None:
    """Redirect a broken standard output, because the interpreter would fail again when it flushes at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(error: UserError, printed: str = "") -> None:
    """Report an error to the program that started this one, or print it. For a rank, its agent does that."""
    if AGENT in os.environ:
        from paceline.distributed.reports import report_error

        if report_error(error):
            return
    with suppress(OSError):
        if report_outcome(error=error.to_json()):
            return
    with suppress(OSError):  # the exit status still reports the failure
        say(f"paceline: {printed or f'error: {error.report}'}", error=True)


def _dispatch(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="paceline",
        usage="paceline COMMAND ...",
        description="Train image classifiers on one node or many with one command, and compare the results.",
        epilog="`paceline COMMAND --help` shows the options of a command. Start with `paceline demo`.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, summary in _public().items():
        commands.add_parser(name, help=summary, add_help=False)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        from paceline.cli.completion import words_to_complete

        arguments = words_to_complete(parser)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    if arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    command = arguments[0]
    if command.startswith("-"):
        parser.parse_args(arguments[:1])
    if command not in _COMMANDS:
        return _unknown(command)
    module = import_module(f"paceline.cli.{_COMMANDS[command][1]}")
    status: int = getattr(module, command.replace("-", "_"))(arguments[1:])
    return status


def _unknown(command: str) -> int:
    names = list(_public())
    close = difflib.get_close_matches(command, names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]}?" if close else ""
    _complain(UserError("unknown-command", f"{command!r} is not a command.{hint}"))
    print(f"commands: {', '.join(names)}; `paceline --help` describes them", file=sys.stderr)
    return 2


def _public() -> dict[str, str]:
    """Commands for users, with their summary; paceline itself calls the others, also on remote hosts."""
    return {name: summary for name, (summary, _) in _COMMANDS.items() if summary}


_USAGE_ERRORS = ("missing-backend", "unknown-backend", "unknown-option")
"""Errors of options that argparse does not find itself."""

# summary of each command, and the module with the function of the same name
_COMMANDS = {
    "demo": ("train digits in one process, then in two, and compare", "demo"),
    "prepare": ("convert a dataset to the format that training reads fastest", "prepare"),
    "data": ("inspect prepared data: verify, show, find near-duplicates, export", "data"),
    "recipes": ("list the shipped recipes, or show one", "recipes"),
    "train": ("train a recipe in one process or many", "train"),
    "evaluate": ("evaluate a run or a checkpoint", "evaluate"),
    "export": ("export a model: safetensors, timm, ONNX, torch.export, model card", "export"),
    "predict": ("predict the classes of images with a trained model", "predict"),
    "serve": ("serve a page and an HTTP API that classify images", "predict"),
    "plan": ("show phases, steps, time and cost of a recipe without training", "plan"),
    "find-batch": ("find the largest batch that fits in memory, and the fastest one", "find_batch"),
    "find-lr": ("suggest a learning rate, with a range test", "find_lr"),
    "sweep": ("search for the best hyperparameters of a recipe", "sweep"),
    "launch": ("train on several nodes, and follow the logs", "launch"),
    "jobs": ("list launched jobs", "jobs"),
    "status": ("show the status of a job's nodes", "jobs"),
    "logs": ("show the logs of a job's nodes", "jobs"),
    "attach": ("follow the logs of a running job", "jobs"),
    "resume": ("restart a job that ended early", "jobs"),
    "stop": ("stop a job on all nodes", "jobs"),
    "fetch": ("download the run folder of a job", "jobs"),
    "ec2": ("manage instances, volumes and images on EC2", "ec2"),
    "runs": ("list runs: status, progress, best accuracy", "runs"),
    "compare": ("compare runs: comparability, speed-up, accuracy, memory, cost", "evidence"),
    "watch": ("watch a run live", "watch"),
    "doctor": ("diagnose this machine, other hosts, or where the time of a run went", "doctor"),
    "selftest": ("test whether training is correct and fast on this machine or on several hosts", "selftest"),
    "logbook": ("write a logbook of runs", "evidence"),
    "report": ("write an HTML report about runs", "evidence"),
    "rendezvous": ("run the rendezvous store of an elastic job that you start by hand", "hosts"),
    "completion": ("print a script for TAB completion in bash, zsh or fish", "completion"),
    # internal commands have no summary
    "installation": ("", "installation"),
    "try-batch": ("", "trials"),
    "try-lr": ("", "trials"),
    "facts": ("", "hosts"),
    "probe": ("", "hosts"),
    "test-allreduce": ("", "hosts"),
    "selftest-probe": ("", "selftest"),
}
