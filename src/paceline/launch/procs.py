"""How many processes each node of a job starts. `--procs auto` is one per GPU, and one on CPUs."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from paceline.config.recipe import Recipe
from paceline.errors import UserError
from paceline.launch.host_output import shown
from paceline.launch.hosts import Host, HostError, SshHost
from paceline.launch.specs import Ec2Spec, JobSpec, LocalSpec, ManifestSpec, RemoteSpec, SlurmSpec
from paceline.system.gpus import no_gpu, only_visible, visible_gpus

AnySpec = TypeVar("AnySpec", bound=JobSpec)
_Fields = dict[str, Any]
_TIMEOUT = 30.0
# runs before anything is installed there, so it needs only a shell
_COUNT = """[ -z "${CUDA_VISIBLE_DEVICES+x}${HIP_VISIBLE_DEVICES+x}${ROCR_VISIBLE_DEVICES+x}" ] || exec echo restricted
gpus=$(nvidia-smi --query-gpu=uuid --format=csv,noheader 2> /dev/null | grep -c '^GPU-')
[ "$gpus" != 0 ] || gpus=$(cat /sys/class/kfd/kfd/topology/nodes/*/properties 2> /dev/null |
    grep -c '^simd_count [1-9]')
echo "$gpus"
"""
_NOT_ASKED = {
    "aws-credentials-missing": "no AWS credentials",
    "aws-region-missing": "no AWS region",
    "aws-unreachable": "AWS is not reachable",
    "missing-package": "boto3 is not installed",
}


def with_procs(spec: AnySpec, recipe: Recipe) -> AnySpec:
    """Return the spec with the number of processes of each node, and where it comes from."""
    return replace(spec, **_fields(spec, recipe))


def _fields(spec: JobSpec, recipe: Recipe) -> _Fields:
    if isinstance(spec, LocalSpec):
        return _on_this_machine(spec, recipe)
    if isinstance(spec, SlurmSpec):
        return _in_allocation(spec, recipe)
    if spec.procs != "auto":
        return _same(spec, spec.procs, "--procs")
    if why := _one_process(recipe):
        return _same(spec, 1, why)
    if isinstance(spec, Ec2Spec):
        return _of_instance_type(spec)
    if isinstance(spec, ManifestSpec):
        gpus = spec.gpus_per_node
        return _same(spec, gpus or 1, "--gpus-per-node" if gpus else "no --gpus-per-node")
    assert isinstance(spec, RemoteSpec)
    options = ("-F", spec.ssh_config) if spec.ssh_config else ()
    return _asked([SshHost(name, "$HOME", options) for name in spec.hosts])


def _one_process(recipe: Recipe) -> str:
    """Return the setting that makes `auto` one process on any machine, as in `paceline train`; "" without one."""
    if recipe.strategy == "single":
        return "strategy=single"
    return "" if recipe.device in ("auto", "cuda") else f"device={recipe.device}"


def _same(spec: JobSpec, count: int, source: str) -> _Fields:
    return {"procs_by_host": dict.fromkeys(spec.hosts, count), "procs_source": source}


def words_for(spec: JobSpec, host: str) -> list[str]:
    """Return the option of `paceline train` on a node; a node of unknown size counts its own GPUs."""
    return ["--procs", str(spec.procs_by_host.get(host, "auto"))]


def total(spec: JobSpec) -> int | None:
    """Return the number of ranks of the job, or None if a node counts its own GPUs."""
    counts = [spec.procs_by_host.get(host) for host in spec.hosts]
    return None if None in counts else sum(filter(None, counts))


def described(spec: JobSpec) -> str:
    """Return the number of processes per node and where it comes from, for plans."""
    counts = {host: spec.procs_by_host.get(host, "auto") for host in spec.hosts}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{host} {count}" for host, count in counts.items())
        return f"processes per node: {each} ({spec.procs_source})"
    return f"processes per node: {next(iter(counts.values()))} ({spec.procs_source})"


def _on_this_machine(spec: LocalSpec, recipe: Recipe) -> _Fields:
    """Divide the GPUs between the simulated nodes: two ranks cannot share one."""
    nodes, one = len(spec.hosts), _one_process(recipe)
    gpus = visible_gpus() if recipe.device in ("auto", "cuda") else []
    if not gpus:
        if recipe.device == "cuda":
            raise no_gpu()
        found = (1, one or "no GPU is visible") if spec.procs == "auto" else (spec.procs, "--procs")
        return _same(spec, *found)
    each = (1 if one else len(gpus) // nodes) if spec.procs == "auto" else spec.procs
    if not each or each * nodes > len(gpus):
        message = (
            f"{nodes} nodes with {each or 1} process{'es' * (each > 1)} each need {nodes * (each or 1)} GPUs, but "
            f"{len(gpus)} {'is' if len(gpus) == 1 else 'are'} visible. Add --device cpu, or use fewer --nodes or "
            "--procs."
        )
        raise UserError("too-few-gpus", message, gpus=len(gpus), needed=nodes * (each or 1))
    source = (one or f"{len(gpus)} visible GPUs on this machine") if spec.procs == "auto" else "--procs"
    variables = {host: only_visible(gpus[number * each :][:each]) for number, host in enumerate(spec.hosts)}
    return _same(spec, each, source) | {"node_variables": variables if nodes > 1 else {}}


def _asked(hosts: Sequence[Host]) -> _Fields:
    """Ask the hosts. Those that do not answer count for themselves, if they can be reached when the job starts."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = dict(zip([host.name for host in hosts], pool.map(_gpus_of, hosts), strict=True))
    counts = {host: answer for host, answer in answers.items() if isinstance(answer, int)}
    if len(set(counts.values())) > 1:  # a batch is divided between equal nodes
        each = ", ".join(f"{host} {count}" for host, count in counts.items())
        fewest = max(1, min(counts.values()))
        message = (
            f"the hosts have different numbers of GPUs: {each}. Pass --procs {fewest}, or choose hosts with the same "
            "number of GPUs."
        )
        raise UserError("gpus-differ", message, gpus=counts)
    unknown = [f"{host} {answer}" for host, answer in answers.items() if isinstance(answer, str)]
    source = "; ".join(["GPUs that the hosts report", *unknown]) if len(unknown) < len(hosts) else "; ".join(unknown)
    return {"procs_by_host": {host: max(1, count) for host, count in counts.items()}, "procs_source": source}


def per_host(hosts: Sequence[Host], recipe: Recipe) -> int:
    """Return the number of processes on each of some hosts for --procs auto."""
    if _one_process(recipe):
        return 1
    found = _asked(hosts)
    for host in hosts:
        if host.name not in found["procs_by_host"]:
            host.call("true")  # an error that says why it is unreachable
            message = f"the number of GPUs of {host.name} is unknown ({found['procs_source']}). Pass --procs N."
            raise UserError("missing-option", message, option="--procs", host=host.name)
    return min(found["procs_by_host"].values())


def _gpus_of(host: Host) -> int | str:
    """Return the number of GPUs of a host, or why it is unknown."""
    try:
        answer = host.call("sh -s", _COUNT.encode(), _TIMEOUT).text
    except HostError as error:
        return f"counts its own GPUs ({error.code.replace('-', ' ')})"
    if answer == "restricted":
        return "counts its own GPUs (a variable restricts them)"
    return int(answer) if re.fullmatch("[0-9]{1,3}", answer) else f"counts its own GPUs (it answered {shown(answer)!r})"


def _of_instance_type(spec: Ec2Spec) -> _Fields:
    from paceline.launch.ec2_client import Ec2Client, gpus_of

    try:
        gpus = gpus_of(Ec2Client(spec.region).instance_type(spec.instance_type))
    except UserError as error:
        if error.code not in _NOT_ASKED:
            raise
        return {"procs_source": f"each instance counts its GPUs; EC2 was not asked: {_NOT_ASKED[error.code]}"}
    source = f"GPUs of a {spec.instance_type}" if gpus else f"a {spec.instance_type} has no GPU"
    return _same(spec, max(1, gpus), source)


def _in_allocation(spec: SlurmSpec, recipe: Recipe) -> _Fields:
    """Take the number from the options of the job; without one that says it, the job counts on its first node."""
    options = spec.sbatch_options
    tasks = options.get("ntasks-per-node")
    if tasks and spec.procs not in ("auto", _number(tasks)):
        message = f"--procs {spec.procs} and --sbatch ntasks-per-node={tasks} differ. Omit one of them."
        raise UserError("conflicting-options", message, option="--procs")
    if spec.procs != "auto":
        return _same(spec, spec.procs, "--procs")
    if tasks:
        return _same(spec, _number(tasks), "--sbatch ntasks-per-node")
    if why := _one_process(recipe):
        return _same(spec, 1, why)
    if options.get("gpus-per-task"):
        message = (
            "with --sbatch gpus-per-task the number of GPUs per node is unknown. Add --procs N, the tasks per node."
        )
        raise UserError("missing-option", message, option="--procs")
    if found := _gpus_per_node(options, len(spec.hosts)):
        return _same(spec, *found)
    return {"procs_source": "the GPUs that SLURM allocates, counted in the job"}


def _gpus_per_node(options: Mapping[str, str | None], nodes: int) -> tuple[int, str] | None:
    """Return the GPUs per node that options of sbatch ask for, and the option."""
    if value := options.get("gpus-per-node"):
        return _sum(value), "--gpus-per-node"
    gres = [part.split(":") for part in _without_sockets(options.get("gres") or "").split(",")]
    if asked := [words for words in gres if words[0] in ("gpu", "gres/gpu")]:
        # without a number, as in gpu:a100, it is one
        return sum(_sum(words[-1]) if words[-1][:1].isdecimal() else 1 for words in asked), "--gres"
    if (value := options.get("gpus")) and not _sum(value) % nodes:
        return _sum(value) // nodes, "--gpus"
    return None


def _sum(value: str) -> int:
    """Return the number of GPUs in "4", "a100:4", "a100:2,v100:2" or "a100:4(S:0-1)"."""
    return sum(_number(part.rpartition(":")[2]) for part in _without_sockets(value).split(","))


def _without_sockets(value: str) -> str:
    return re.sub(r"\(.*?\)", "", value)


def _number(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,4}", text):
        message = f"--sbatch: {text[:40]!r} is not a number of GPUs or tasks. Write a positive integer, or --procs N."
        raise UserError("invalid-sbatch-option", message, option=text[:40])
    return int(text)
