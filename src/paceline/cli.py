"""The command line: verbs, thin. Nothing heavy is imported before a verb needs it."""

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline import __version__
from paceline.config.launched import AGENT
from paceline.errors import Stopped, UserError

_TRAIN = """Train a recipe.

RECIPE is a shipped name (see `paceline recipes`) or a YAML file. Any of its fields can be overridden:
`--optim.lr 0.5 --train.duration 20ep`. A run of the same name and recipe that was interrupted is resumed."""

_EVALUATE = """Evaluate a run's best checkpoint, or one checkpoint, exactly, on any number of processes.

Fields of data, evaluate, precision and device can be overridden: `--evaluate.views flip --data.path DIR`."""

_EVALUATION_FIELDS = ("data", "evaluate", "precision", "device", "channels_last")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    status = _guarded(arguments)
    if _is_rank():
        # all work is done; torch's threads sometimes abort the process while the interpreter is taken down
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _guarded(arguments: list[str]) -> int:
    """Run a verb; what the user can put right is a message, not a traceback."""
    try:
        return _dispatch(arguments)
    except Stopped as stopped:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return stopped.exit_status
        # a stopped rank has done what it was asked to; torchrun would report another status as a crash
        if AGENT in os.environ:
            from paceline.base.agent import report_stop

            report_stop(stopped.signum)
        return 0
    except UserError as error:
        _complain(str(error))
        return 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # no room, no right to write, a file that vanished: the user's to mend
        if not error.filename and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        _complain(f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror}; make room")
        return 1


def _complain(message: str) -> None:
    if AGENT in os.environ:
        from paceline.base.agent import report

        if report(message):
            return
    print(f"paceline: {message}", file=sys.stderr)


def _dispatch(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Train image classifiers on one machine or many with one command, and get the evidence.",
        epilog="`paceline VERB --help` explains a verb. Start with `paceline demo`.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (summary, _) in _VERBS.items():
        verbs.add_parser(name, help=summary, add_help=False)
    known = parser.parse_args(arguments[:1])
    return _VERBS[known.verb][1](arguments[1:])


def _parser(verb: str, usage: str, description: str) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        prog=f"paceline {verb}",
        usage=f"paceline {verb} {usage}",
        description=description,
        formatter_class=formatter,
        allow_abbrev=False,
        add_help=False,
    )


def _add_launch_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes")
    group.add_argument("--procs", type=_count, default=None, metavar="N", help="processes on this machine (default 1)")
    group.add_argument(
        "--nodes", type=_count, default=1, metavar="N", help="machines, each started by hand (default 1)"
    )
    group.add_argument("--node-rank", type=int, default=0, metavar="K", help="number of this machine, from 0")
    group.add_argument(
        "--rendezvous", default="", metavar="HOST:PORT", help="where machine 0 can be reached by the others"
    )
    group.add_argument(
        "--meet-within",
        type=_count,
        default=300,
        metavar="SECONDS",
        help="how long to wait for the others (default 300)",
    )
    group.add_argument(
        "--threads", type=_count, metavar="N", help="compute threads a process (default: cores / processes)"
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this help")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _split_source(arguments: list[str]) -> tuple[str, list[str]]:
    """The positional comes first, so that `--dotted.field VALUE` can never be mistaken for it."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    return "", arguments


def train(arguments: list[str]) -> int:
    from paceline.config.batch import BatchLayout
    from paceline.config.io import load_recipe

    parser = _parser("train", "RECIPE [--procs N] [--name NAME] [--dotted.field VALUE ...]", _TRAIN)
    parser.add_argument("--name", help="name of the run (default: the recipe's)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run folders live (default: runs)"
    )
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run folder, in place of RECIPE")
    _add_launch_options(parser)
    source, rest = _split_source(arguments)
    options, overrides = parser.parse_known_args(rest)
    if options.resume:
        if not (options.resume / "recipe.yaml").is_file():
            raise UserError(f"--resume {options.resume}: no run folder (it has no recipe.yaml)")
        if source:
            raise UserError(f"--resume goes on with the run's own recipe; leave {source!r} out")
        if options.name:
            raise UserError(f"--resume goes on in {options.resume}; leave --name {options.name} out")
        source = str(options.resume / "recipe.yaml")
    if options.help:
        return _help_with_fields(parser, source or "digits", overrides)
    if not source:
        raise UserError("which recipe? `paceline recipes` lists them; `paceline train digits` needs no data of its own")
    recipe = load_recipe(source, overrides)
    name = options.name or recipe.name
    if Path(name).name != name or not name.isprintable() or name in ("", ".", ".."):
        raise UserError(f"--name {name!r} is not a plain folder name")
    if not _is_rank():
        BatchLayout.of(recipe, (options.procs or 1) * options.nodes)
        if _needs_agent(options):
            return _start_ranks(["train", *arguments], options)
    _enter_rank(options)
    from paceline.engine.session import train_recipe

    train_recipe(recipe, options.runs, name, options.resume)
    return 0


def evaluate(arguments: list[str]) -> int:
    from paceline.config.io import split_overrides

    parser = _parser("evaluate", "RUN|CHECKPOINT [--last] [--procs N] [--dotted.field VALUE ...]", _EVALUATE)
    parser.add_argument("--last", action="store_true", help="the newest checkpoint of the run instead of its best one")
    _add_launch_options(parser)
    source, rest = _split_source(arguments)
    options, overrides = parser.parse_known_args(rest)
    if options.help:
        return _help_with_fields(parser, "digits", overrides, _EVALUATION_FIELDS)
    if not source:
        raise UserError("evaluate what? Give a run folder or a checkpoint folder")
    for key, _ in split_overrides(overrides):
        if key.partition(".")[0].replace("-", "_") not in _EVALUATION_FIELDS:
            raise UserError(
                f"--{key} has no bearing on an evaluation; possible are fields of {', '.join(_EVALUATION_FIELDS)}"
            )
    if not _is_rank() and _needs_agent(options):
        return _start_ranks(["evaluate", *arguments], options)
    _enter_rank(options)
    from paceline.engine.session import evaluate_path

    label, metrics = evaluate_path(Path(source), "last" if options.last else "best", overrides)
    if metrics:
        counts = f"{metrics['correct']} of {metrics['samples']}"
        print(
            f"{label}: top-1 {metrics['top1']:.2%} ({counts}), top-5 {metrics['top5']:.2%}, loss {metrics['loss']:.4f}"
        )
    return 0


def _is_rank() -> bool:
    from paceline.config.launched import under_launcher

    return under_launcher(os.environ)


def _needs_agent(options: argparse.Namespace) -> bool:
    if options.nodes > 1 and not options.rendezvous:
        raise UserError(f"--nodes {options.nodes} needs --rendezvous HOST:PORT, the same on every machine")
    if not 0 <= options.node_rank < options.nodes:
        raise UserError(f"--node-rank {options.node_rank} is not between 0 and {options.nodes - 1}")
    return (options.procs or 1) > 1 or options.nodes > 1


def _enter_rank(options: argparse.Namespace) -> None:
    from paceline.config.launched import place

    started = place(os.environ).local_size
    if _is_rank() and options.procs not in (None, started):
        raise UserError(
            f"--procs {options.procs}, but torchrun or srun started {started} here; leave --procs out under them"
        )
    if options.threads:
        os.environ["PACELINE_THREADS"] = str(options.threads)
    # OpenMP's threads spin a long time for each other by default, which makes small steps many times slower beside
    # another busy process. Read when torch is loaded, so set before.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _start_ranks(command: list[str], options: argparse.Namespace) -> int:
    from paceline.launch.local import plan

    place = (options.nodes, options.node_rank, options.rendezvous, options.meet_within)
    meeting = f"node {options.node_rank} of {options.nodes}, meeting at {options.rendezvous}: "
    procs = options.procs or 1
    print(
        f"{meeting if options.nodes > 1 else ''}starting {procs} process{'es' if procs > 1 else ''} ...",
        file=sys.stderr,
    )
    planned = plan(command, procs, *place)
    os.environ.update(planned.environment)
    from paceline.base import agent

    return agent.run(planned.arguments)


def _help_with_fields(
    parser: argparse.ArgumentParser, source: str, overrides: list[str], only: Sequence[str] = ()
) -> int:
    from paceline.config.help import print_fields
    from paceline.config.io import load_recipe

    parser.print_help()
    print_fields(load_recipe(source, overrides), source, only)
    return 0


def recipes(arguments: list[str]) -> int:
    parser = _parser("recipes", "[-h]", "List the shipped recipes: source, published figure, what was measured here.")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    parser.parse_args(arguments)
    from paceline.config.help import print_recipes

    print_recipes()
    return 0


def prepare(arguments: list[str]) -> int:
    parser = _parser(
        "prepare", "cifar10 [--out DIR] [--from FILE]", "Bring a data set into the form that training reads."
    )
    parser.add_argument("dataset", choices=["cifar10"], help="which data set")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to put it (default: $PACELINE_DATA/NAME or data/NAME)"
    )
    parser.add_argument("--from", type=Path, dest="source", metavar="FILE", help="an archive you already have")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    from paceline.data.prepare import cifar10
    from paceline.data.sets import default_folder

    cifar10.prepare(options.out or default_folder("cifar10"), options.source)
    return 0


def demo(arguments: list[str]) -> int:
    parser = _parser("demo", "[--runs DIR]", "Train the embedded digits on one process, then on two, and compare.")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run folders go (default: runs)"
    )
    parser.add_argument("-h", "--help", action="help", help="show this help")
    from paceline.demo import run

    return run(parser.parse_args(arguments).runs)


_VERBS = {
    "demo": ("train digits on one process, then on two, and compare", demo),
    "train": ("train a recipe, on one process or many", train),
    "evaluate": ("evaluate a run or a checkpoint", evaluate),
    "recipes": ("list the shipped recipes", recipes),
    "prepare": ("bring a data set into the form that training reads", prepare),
}
