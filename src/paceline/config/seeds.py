"""The seeds of several runs of one recipe, and the names of these runs."""

import re
from collections.abc import Mapping, Sequence

from paceline.errors import UserError

_MAX_RUNS = 1000


def parse_seeds(given: "int | str | Sequence[int]") -> tuple[int, ...]:
    """Return the seeds that a number of seeds ("5": 0 to 4) or a list ("0,3,7"; a single one: "3,") means."""
    if isinstance(given, list | tuple):
        is_list, parts = True, list(map(repr, given))
    else:
        parts = [part.strip() for part in str(given).split(",")]
        is_list = len(parts) > 1
        parts = parts[:-1] if is_list and not parts[-1] else parts
    if not all(re.fullmatch("[0-9]{1,10}", part) and int(part) < 2**31 for part in parts):
        raise _invalid(given)
    seeds = tuple(map(int, parts)) if is_list else tuple(range(min(int(parts[0]), _MAX_RUNS + 1)))
    if not 0 < len(seeds) <= _MAX_RUNS or len(set(seeds)) < len(seeds):
        raise _invalid(given)
    return seeds


def _invalid(given: object) -> UserError:
    message = (
        f"--seeds {given!s:.80} is neither a number of seeds nor a list of different seeds. Write e.g. 5 for seeds 0 "
        f"to 4, or 0,3,7. Seeds are integers below 2,147,483,648; use at most {_MAX_RUNS:,} of them."
    )
    return UserError("invalid-seeds", message, seeds=str(given)[:80])


def seed_conflict() -> UserError:
    """Return the error for --seed together with --seeds."""
    message = "--seed and --seeds are both given. Omit one of them."
    return UserError("conflicting-options", message, option="--seed")


def run_name(name: str, seed: int) -> str:
    """Return the name of the run with this seed, one of several runs."""
    return f"{name}-seed{seed}"


def run_names(name: str, seeds: Sequence[int]) -> list[str]:
    """Return the names of all runs: one per seed, or without seeds the name itself."""
    return [run_name(name, seed) for seed in seeds] or [name]


def seed_words(seeds: Sequence[int]) -> list[str]:
    """Return the option of `paceline train` for these seeds; none without seeds."""
    return ["--seeds", "".join(f"{seed}," for seed in seeds)] if seeds else []


def failed_seeds(failures: Mapping[int, str], total: int) -> UserError:
    """Return the error for seeds that failed while others of the same command were trained; `failures`: the reasons."""
    listed = "".join(f"\n  seed {seed}: {reason}" for seed, reason in sorted(failures.items()))
    message = (
        f"{len(failures)} of {total} seeds failed:{listed}\nFix the cause and run the same command again: unfinished "
        "seeds resume, and finished ones are skipped."
    )
    return UserError("seeds-failed", message, seeds=sorted(failures))
