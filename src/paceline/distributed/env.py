"""Rank and world size of this process, read from the launcher's environment variables. Does not import torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import UserError

AGENT = "PACELINE_AGENT"
"""Set by Paceline's agent for its ranks: the folder in which they report errors and stops."""
STORE = "PACELINE_STORE"
"""Set with it: the ranks' store, either PATH of a file or HOST:PORT/ROUND at the rendezvous."""


@dataclass(frozen=True)
class RankEnv:
    """The rank of this process among all ranks."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_env: dict[str, str] = field(default_factory=dict)
    """MASTER_ADDR and MASTER_PORT, if the launcher has not set them."""


def under_launcher(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return "RANK" in environ or in_srun(environ)


def rank_env(environ: Mapping[str, str]) -> RankEnv:
    """Return the rank that torchrun or srun assigned; without either, a world of size 1."""
    if "RANK" in environ:
        defaults = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        values = [environ.get(name, defaults.get(name, "")) for name in names]
        has_store = environ.get("WORLD_SIZE") == "1" or STORE in environ
        needed = () if has_store else ("MASTER_ADDR", "MASTER_PORT")
        if not all(value.isdigit() for value in values) or not all(name in environ for name in needed):
            found = ", ".join(f"{name}={environ.get(name)!r}" for name in (*names, *needed))
            raise UserError(
                "incomplete-rank-env",
                f"RANK is set, but the variables that belong to it are missing or invalid ({found}). Unset RANK, or "
                "start with torchrun.",
            )
        rank, size, local_rank, local_size = map(int, values)
        return RankEnv(rank, size, local_rank, local_size)
    if in_srun(environ):
        master_env = {
            "MASTER_ADDR": first_host(environ["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(20000 + int(environ["SLURM_JOB_ID"]) % 20000),
        }
        tasks_here = _tasks_here(environ["SLURM_STEP_TASKS_PER_NODE"], int(environ["SLURM_NODEID"]))
        local = int(environ["SLURM_LOCALID"]), tasks_here
        return RankEnv(int(environ["SLURM_PROCID"]), int(environ["SLURM_STEP_NUM_TASKS"]), *local, master_env)
    return RankEnv()


def in_srun(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several tasks."""
    # sbatch sets SLURM_PROCID for the script itself; only srun creates a step with several tasks
    return environ.get("SLURM_STEP_ID", "").isdigit() and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def first_host(nodelist: str) -> str:
    """Return the first host of SLURM's compressed host list: "gpu03" of "gpu[03-05,9],login"."""
    match = re.match(r"([^\[,]+)(?:\[(\d+))?", nodelist)
    if not match:
        raise UserError(
            "invalid-slurm-nodelist",
            f"SLURM_STEP_NODELIST={nodelist!r} contains no host. Set MASTER_ADDR to the name of the first node.",
        )
    return match[1] + (match[2] or "")


def last_host(nodelist: str) -> str:
    """Return the last host of SLURM's compressed host list: "gpu9" of "gpu[03-05,9]"."""
    match = re.search(r"([^\[\],]+)(?:\[(?:.*[,-])?(\d+)\])?$", nodelist)
    return match[1] + (match[2] or "") if match else ""


def _tasks_here(tasks_per_node: str, node: int) -> int:
    """Return the number of tasks on a node; SLURM's "2(x3),1" lists them in node order."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        number, _, times = part.partition("(x")
        counts += [int(number)] * int(times.rstrip(")") or 1)
    return counts[node]
