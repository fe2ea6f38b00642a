"""The sbatch file of a SLURM job: options, requeueing, and the srun command that starts the ranks."""

import re
import shlex

from paceline.errors import UserError
from paceline.launch import procs
from paceline.launch.planning import data_folders, selftest_words
from paceline.launch.specs import SlurmSpec
from paceline.launch.values import operand, plain


def sbatch_file(spec: SlurmSpec) -> str:
    """Return the script that sbatch submits."""
    name, seeds = spec.name, spec.seeds
    tasks = spec.procs_by_host.get(spec.hosts[0])
    header = {
        "job-name": name,
        "nodes": len(spec.hosts),
        **({"ntasks-per-node": tasks} if tasks else {}),
        "requeue": None,
        "open-mode": "append",
        "signal": f"B:USR1@{spec.notice}",
        "output": f"{_escape_pattern(spec.runs)}/{name}{'-%a' if seeds else ''}.log",
        **({"array": f"0-{len(seeds) - 1}"} if seeds else {}),
        **({"export": ",".join(["ALL", *spec.pass_env])} if spec.pass_env else {}),
        **spec.sbatch_options,
    }
    lines = [_directive(key, value) for key, value in header.items()]
    lines += ["", f"# {plain('--procs', procs.described(spec))}"]
    words = [*_program(spec), "train", f"{spec.runs}/{name}.yaml", "--runs", spec.runs]
    words += ["--results", spec.results] if spec.results else []
    train = [*map(shlex.quote, words), "--name", shlex.quote(name)]
    if seeds:
        lines += ["", f"seeds=({' '.join(map(str, seeds))})", "seed=${seeds[$SLURM_ARRAY_TASK_ID]}"]
        lines += ['echo "seed $seed"']
        train += ["--seeds", '"$seed,"']
    if spec.extensions:
        found = shlex.quote(f"{spec.runs}/{extensions_folder(spec)}")
        lines += ["", *(f"# copied to {plain('--runs', found)}: {plain('imports', path)}" for path in spec.extensions)]
        lines += [f'export PYTHONPATH={found}"${{PYTHONPATH:+:$PYTHONPATH}}"']
    lines += ["", f"export PACELINE_RANK_TIMEOUT={spec.rank_timeout}"]
    steps = [_SELFTEST.format(command=_selftest(spec))] if spec.selftest else []
    steps += [_CPUS_OF_TASKS.format(tasks=tasks) if tasks else _COUNT_GPUS]
    srun = ["srun", _TASKS if tasks else _COUNTED_TASKS, *_in_srun(spec, _UPLOAD_WAIT if spec.results else _WAIT)]
    body = _BODY.format(before="".join(steps), command=" ".join([*srun, *train]))
    return "#!/bin/bash\n" + "\n".join(lines) + body


def _program(spec: SlurmSpec) -> list[str]:
    return ["paceline"] if spec.container else [operand("--python", spec.python), "-m", "paceline"]


def _selftest(spec: SlurmSpec) -> str:
    """Return the command that tests every node, with one task that starts its own processes."""
    words = [*_program(spec), *selftest_words(spec)]
    alone = ["env", "--unset=SLURM_STEP_NUM_TASKS"]  # otherwise it would take itself for a rank
    tasks = ['--ntasks="$SLURM_NNODES"', "--ntasks-per-node=1", '--cpus-per-task="$SLURM_CPUS_ON_NODE"']
    step = ["srun", *tasks, *_in_srun(spec, _NO_LIMIT)]  # nodes may differ in speed, and do not wait for each other
    return " ".join([*step, *alone, *map(shlex.quote, words)])


def extensions_folder(spec: SlurmSpec) -> str:
    """Return the folder, next to the run, of the packages that the recipe imports."""
    return f"{spec.name}-extensions"


def _directive(key: str, value: object) -> str:
    """Return one #SBATCH line. Backslashes escape even in quotes; a line break would start another directive."""
    if not re.fullmatch("[a-z][a-z0-9-]*", key):
        message = f"--sbatch {key!r} is not an option of sbatch. Write option=value."
        raise UserError("invalid-sbatch-option", message, option=key)
    if value is None:
        return f"#SBATCH --{key}"
    text = plain(f"--{key}", str(value))
    inside = re.sub(r'(["\\])', r"\\\1", text)
    return f"#SBATCH --{key}=" + (text if shlex.quote(text) == text else f'"{inside}"')


def _escape_pattern(path: str) -> str:
    """Escape percent signs, which SLURM expands in file names; it removes backslashes."""
    if "\\" in path:
        message = f"--runs {path}: SLURM cannot write to a path with a backslash. Choose another folder."
        raise UserError("runs-path-invalid", message, path=path)
    return path.replace("%", "%%")


_BODY = """

# this task of an array, not the whole array
me=$SLURM_JOB_ID
[ -z "$SLURM_ARRAY_JOB_ID" ] || me=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID

# near the time limit or on preemption: checkpoint, then continue in another allocation
requeue() {{
    trap '' USR1 TERM
    echo "preempted or near the time limit: checkpointing"
    scancel --signal=TERM "$me"
    wait "$step" && exit 0  # it had just finished
    case $(squeue --noheader --jobs="$me" --format=%T) in
        CANCELLED | COMPLETING) ;;  # by the user
        *) scontrol requeue "$me" ;;
    esac
    exit
}}
trap requeue USR1 TERM

# the secret by which the ranks of this allocation authenticate each other
PACELINE_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
export PACELINE_TOKEN

{before}{command} &
step=$!
wait "$step"
status=$?
[ $status != 143 ] || requeue  # with a grace time, preemption signals only the ranks
exit $status
"""


_TASKS = '--cpus-per-task="$cpus"'
_COUNTED_TASKS = f'--ntasks=$((procs * SLURM_NNODES)) --ntasks-per-node="$procs" {_TASKS}'

_CPUS_OF_TASKS = """# a task gets one core, unless srun has --cpus-per-task, which it does not inherit since SLURM 22.05
cpus=${{SLURM_CPUS_PER_TASK:-$((SLURM_CPUS_ON_NODE / {tasks}))}}
[ "$cpus" -gt 0 ] || cpus=1

"""

_COUNT_GPUS = """# one process per GPU of a node, or one without GPUs; they divide its cores
procs=${SLURM_GPUS_ON_NODE:-0}
# SLURM sets CUDA_VISIBLE_DEVICES also in jobs without GPUs
[ "$procs" -gt 0 ] || [ -n "${CUDA_VISIBLE_DEVICES+x}" ] || procs=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU')
[ "$procs" -gt 0 ] || procs=1
cpus=$((SLURM_CPUS_ON_NODE / procs))
[ "$cpus" -gt 0 ] || cpus=1
echo "processes per node: $procs"

"""

_SELFTEST = """{command} || {{
    status=$?
    echo "the selftest failed (see above), so the job does not train." >&2
    echo "Fix the checks that failed, or omit --selftest." >&2
    exit $status
}}

"""


# seconds until srun kills the other tasks when one has ended, so that a hanging rank does not block the nodes
_WAIT, _NO_LIMIT = 60, 0
_UPLOAD_WAIT = 660  # rank 0 may upload results for ten minutes after the others have ended


def _in_srun(spec: SlurmSpec, wait: int) -> list[str]:
    """Return the options of srun, and the container if the job has one."""
    step = [f"--wait={wait}", "--export=ALL"]  # --sbatch export=... does not hide the token from the ranks
    if not spec.container:
        return step
    here = '"$PWD"'
    folders = [here, *map(shlex.quote, data_folders(spec))]
    image = shlex.quote(operand("--container", spec.container))
    if spec.container_runtime == "pyxis":
        mounts = ",".join(f"{folder}:{folder}" for folder in folders)
        return [*step, f"--container-image={image}", f"--container-mounts={mounts}", f"--container-workdir={here}"]
    return [*step, "apptainer", "exec", "--nv", "--bind", ",".join(folders), "--pwd", here, image]
