"""How to tell that a launcher started this process as one of several ranks."""

from collections.abc import Mapping


def under_launcher(environ: Mapping[str, str]) -> bool:
    return "RANK" in environ or in_srun(environ)


def in_srun(environ: Mapping[str, str]) -> bool:
    # sbatch sets SLURM_PROCID for the script itself; only srun makes a step with several tasks
    return environ.get("SLURM_STEP_ID", "").isdigit() and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
