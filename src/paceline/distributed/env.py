"""Which of how many ranks a launcher made of this process, told from the environment. No torch here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import UserError

# in the environment of ranks that distributed/run.py started: the file in which they note that they were stopped
AGENT = "PACELINE_AGENT"
# and where their store is: PATH of a file, or HOST:PORT/ROUND at the rendezvous
STORE = "PACELINE_STORE"


@dataclass(frozen=True)
class Place:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_env: dict[str, str] = field(default_factory=dict)
    """What torch needs in the environment to meet the others, where the launcher has not put it there."""


def under_launcher(environ: Mapping[str, str]) -> bool:
    return "RANK" in environ or in_srun(environ)


def place(environ: Mapping[str, str]) -> Place:
    """This process's place as torchrun, or srun, tells it; a lone process without either."""
    if "RANK" in environ:
        defaults = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        values = [environ.get(name, defaults.get(name, "")) for name in names]
        is_told = environ.get("WORLD_SIZE") == "1" or STORE in environ
        needed = () if is_told else ("MASTER_ADDR", "MASTER_PORT")
        if not all(value.isdigit() for value in values) or not all(name in environ for name in needed):
            found = ", ".join(f"{name}={environ.get(name)!r}" for name in (*names, *needed))
            raise UserError(f"RANK is set, but what belongs to it is not ({found}); unset RANK, or start with torchrun")
        rank, size, local_rank, local_size = map(int, values)
        return Place(rank, size, local_rank, local_size)
    if in_srun(environ):
        master_env = {
            "MASTER_ADDR": first_host(environ["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(20000 + int(environ["SLURM_JOB_ID"]) % 20000),
        }
        tasks_here = _tasks_here(environ["SLURM_STEP_TASKS_PER_NODE"], int(environ["SLURM_NODEID"]))
        local = int(environ["SLURM_LOCALID"]), tasks_here
        return Place(int(environ["SLURM_PROCID"]), int(environ["SLURM_STEP_NUM_TASKS"]), *local, master_env)
    return Place()


def in_srun(environ: Mapping[str, str]) -> bool:
    # sbatch sets SLURM_PROCID for the script itself; only srun makes a step with several tasks
    return environ.get("SLURM_STEP_ID", "").isdigit() and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def first_host(nodelist: str) -> str:
    """First of SLURM's compressed host list: "gpu[03-05,9],login" gives "gpu03"."""
    match = re.match(r"([^\[,]+)(?:\[(\d+))?", nodelist)
    if not match:
        raise UserError(f"SLURM_STEP_NODELIST={nodelist!r} names no host; set MASTER_ADDR to the first node's name")
    return match[1] + (match[2] or "")


def last_host(nodelist: str) -> str:
    """Last of SLURM's compressed host list: "gpu[03-05,9]" gives "gpu9"."""
    match = re.search(r"([^\[\],]+)(?:\[(?:.*[,-])?(\d+)\])?$", nodelist)
    return match[1] + (match[2] or "") if match else ""


def _tasks_here(tasks_per_node: str, node: int) -> int:
    """SLURM's "2(x3),1": tasks on the nodes in order."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        number, _, times = part.partition("(x")
        counts += [int(number)] * int(times.rstrip(")") or 1)
    return counts[node]
