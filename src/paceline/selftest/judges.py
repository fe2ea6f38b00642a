"""Turns the figures of probes into a status and a reason. Pure functions: a test can give them any figures.

Figures that depend on the load of the machine give `slow`, never `fail`.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.selftest.settings import CHECKPOINT_EVERY, KILLED_AT
from paceline.system.files import size_text

PASS, FAIL, SLOW, SKIPPED = "pass", "fail", "slow", "skipped"
TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}
"""Relative difference of losses to the fp32 reference on the CPU."""
RANKS_TOLERANCE = 1e-5
SLOW_STEP, SLOW_RANK, SLOW_LINK, SLOW_PAIR = 1.1, 1.5, 0.5, 0.5
"""Step time over that of a plain loop; rank over the median; bandwidth over that of the link; pair over the median."""
SPLIT_TOLERANCE, SPLIT_SECONDS = 0.1, 0.05
MAX_GROWTH, MAX_GROWTH_BYTES = 0.02, 32 << 20
"""Memory that steps may add: a fraction of what is in use, and bytes."""


class Verdict(NamedTuple):
    status: str
    reason: str


Figures = Mapping[str, Any]


def environment(found: Figures) -> Verdict:
    """Processes start and find their device."""
    gpus = [f"{count} x {name}" for name, count in Counter[str](found["gpus"]).items()]
    devices = ", ".join(gpus or [found["cpu"], f"{found['cores']} cores"])
    versions = {"torch": found["packages"]["torch"], "CUDA": found["cuda"], "ROCm": found["hip"]}
    versions |= {"driver": found["driver"], "NCCL": found["nccl"]}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return Verdict(PASS, f"{devices}; {listed}")


def precision(found: Figures) -> Verdict:
    """The losses on the device compared with those of a plain loop on the CPU."""
    reference, differences = found["reference"], {}
    for name in (name for name in TOLERANCES if name in found):
        step, differences[name] = _largest_difference(found[name], reference)
        if not differences[name] <= TOLERANCES[name]:
            return Verdict(
                FAIL,
                f"{name}: loss {found[name][step]:.6g} at step {step + 1}, but {reference[step]:.6g} in a plain fp32 "
                f"loop on the CPU; the relative difference exceeds {TOLERANCES[name]:g}",
            )
    listed = ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
    return Verdict(PASS, f"largest relative difference to a plain fp32 loop on the CPU: {listed}")


def same_losses(single: Figures, many: Figures) -> Verdict:
    """The losses of one rank, of all ranks with DDP, and with FSDP."""
    per_rank, usual = many["same_images"], single["same_images"]
    for rank, loss in enumerate(per_rank):
        if _difference(loss, usual) > RANKS_TOLERANCE:
            text = f"rank {rank} of {len(per_rank)} computes the loss {loss:.6g}"
            return Verdict(FAIL, f"{text} for images whose loss in a single process is {usual:.6g}")
    differences = {}
    for name in (name for name in ("ddp", "fsdp") if name in many):
        step, differences[name] = _largest_difference(many[name], single["single"])
        if not differences[name] <= RANKS_TOLERANCE:
            return Verdict(
                FAIL,
                f"{name} on {len(per_rank)} ranks: loss {many[name][step]:.6g} at step {step + 1}, but "
                f"{single['single'][step]:.6g} on one rank",
            )
    listed = [f"{name.upper()} {value:.1e}" for name, value in differences.items()]
    listed += ["FSDP was not tried: the model has no repeated blocks"] if "not_sharded" in many else []
    return Verdict(PASS, f"largest relative difference of {len(per_rank)} ranks to one: {', '.join(listed)}")


def resume(whole: Figures, killed: Figures, resumed: Figures) -> Verdict:
    """A run that was killed and resumed, compared with one that was not."""
    if "rank-killed" not in killed.get("error", ""):
        return Verdict(FAIL, f"kill -9 of rank 0 was not reported as such: {killed.get('error') or 'the run finished'}")
    if resumed["first_step"] != CHECKPOINT_EVERY:
        text = f"resumed from step {resumed['first_step']} instead of the checkpoint of step {CHECKPOINT_EVERY}"
        return Verdict(FAIL, text)
    if resumed["steps"] != whole["steps"]:
        return Verdict(FAIL, "the resumed run differs from the uninterrupted one: steps are missing")
    # DDP chooses its buckets anew in each process, and the sum of more than two numbers depends on their order
    ranks = whole["ddp_ranks"]
    tolerance = RANKS_TOLERANCE if ranks > 2 else 0.0
    limit = f" by more than {tolerance:g}" if tolerance else ""
    for step, new, old in zip(resumed["steps"], resumed["losses"], whole["losses"], strict=True):
        if _difference(new, old) > tolerance:
            text = f"the resumed run differs from the uninterrupted one{limit}; step {step}: loss {new:.9g}"
            return Verdict(FAIL, f"{text} instead of {old:.9g}")
    text = f"rank 0 killed at step {KILLED_AT}, resumed from step {CHECKPOINT_EVERY}"
    if tolerance:
        _, largest = _largest_difference(resumed["losses"], whole["losses"])
        text = f"{text}: largest relative difference of losses {largest:.1e}, of {tolerance:g} allowed"
        return Verdict(PASS, f"{text} because the all-reduce of {ranks} ranks adds in no fixed order")
    if resumed["digest"] != whole["digest"]:
        return Verdict(FAIL, "the losses are the same, but the weights of the last checkpoint are not bit-identical")
    return Verdict(PASS, f"{text}: bit-identical losses and weights")


def round_trip(_: Figures, found: Figures) -> Verdict:
    """A checkpoint that is written, verified, loaded and corrupted."""
    for name, value in found["recorded"].items():
        loaded = found["loaded"][name]
        if value is None or loaded is None or _difference(loaded, value) > RANKS_TOLERANCE:
            return Verdict(FAIL, f"{name} is {loaded} with the loaded checkpoint, but was {value} in training")
    if found["undetected"]:
        return Verdict(FAIL, f"a flipped bit was not detected in {', '.join(found['undetected'])}")
    return Verdict(PASS, f"same accuracy after loading; {found['flipped']} of {found['flipped']} flipped bits detected")


def time_split(run: Figures) -> Verdict:
    """The parts of the time split compared with the wall time between records."""
    for name, seconds in ((name, value) for split in run["split"] for name, value in split.items()):
        if seconds < 0:
            return Verdict(FAIL, f"{name} has a negative time: {seconds:.4f} s")
    times, wall, parts = run["times"], 0.0, 0.0
    for number, before in enumerate(run["steps"][:-1]):
        if before % CHECKPOINT_EVERY:  # no checkpoint or evaluation follows that step
            wall += times[number + 1] - times[number]
            parts += sum(run["split"][number + 1].values())
    text = f"the parts add up to {parts:.3f} s of {wall:.3f} s wall time"
    off = abs(parts - wall) > SPLIT_TOLERANCE * wall + SPLIT_SECONDS
    return Verdict(SLOW if off else PASS, f"{text}: off by more than {SPLIT_TOLERANCE:.0%}" if off else text)


def step_time(found: Figures) -> Verdict:
    """A training step compared with one of a plain PyTorch loop."""
    own, plain = found["seconds"]["own"], found["seconds"]["plain"]
    ratio = own / plain
    rate = f"{1000 * own:.1f} ms per step, {found['batch'] / own:,.0f} images/s per rank in {found['precision']}"
    text = f"{rate}: {ratio:.2f} x the time of a plain PyTorch loop with the same model"
    return Verdict(SLOW if ratio > SLOW_STEP else PASS, text)


def rank_speed(found: Figures) -> Verdict:
    """The ranks compared with each other, each computing on its own."""
    times = found["alone_per_rank"]
    usual = statistics.median_low(times)
    slowest = max(range(len(times)), key=times.__getitem__)
    if times[slowest] > SLOW_RANK * usual:
        text = f"rank {slowest} takes {1000 * times[slowest]:.1f} ms per step, the others {1000 * usual:.1f} ms"
        return Verdict(SLOW, f"{text}. Check its host for other processes, clock limits and thermal throttling")
    return Verdict(PASS, f"{1000 * min(times):.1f} to {1000 * max(times):.1f} ms per step")


def loading(found: Figures) -> Verdict:
    """What the loader feeds compared with what the device consumes, for the rank where it is closest."""
    pairs = list(zip(found["fed_per_rank"], found["consumed_per_rank"], strict=True))
    fed, consumed = min(pairs, key=lambda pair: pair[0] / pair[1])
    text = f"the loader decodes {fed:,.0f} images/s per rank, the device trains on {consumed:,.0f}"
    return Verdict(SLOW if fed < consumed else PASS, text)


def bandwidth(found: Figures) -> Verdict:
    """The all-reduce, and the slowest pair, compared with the links."""
    nodes, text = found["node_of_rank"], f"all-reduce of all ranks {_gigabytes(found['all'])}"
    several = len(set(nodes)) > 1
    link, kind = (found["network_link"], "network") if several else (found["gpu_link"], "GPU")
    # pairs that use the link: of different nodes if there are several
    pairs = [pair for pair in found["pairs"] if (nodes[pair[0]] != nodes[pair[1]]) == several]
    if pairs:
        low, high, slowest = min(pairs, key=lambda pair: float(pair[2]))
        usual = statistics.median_low([rate for *_, rate in pairs])
        text += f", slowest pair {_gigabytes(slowest)} (ranks {low} and {high})"
        if slowest < SLOW_PAIR * usual:
            return Verdict(SLOW, f"{text}, others {_gigabytes(usual)}")
    if not link:
        return Verdict(PASS, f"{text}; the speed of the link is unknown")
    measured = max([found["all"], *(rate for *_, rate in pairs)])
    text += f"; {measured / link:.0%} of the {kind} link's {_gigabytes(link)}"
    return Verdict(SLOW if measured < SLOW_LINK * link else PASS, text)


def memory(found: Figures) -> Verdict:
    """The peak memory, and whether steps use more and more."""
    peak = size_text(max(found["peak_per_rank"]))
    for rank, (before, after) in enumerate(found["memory_per_rank"]):
        growth = after - before
        if growth > max(MAX_GROWTH * before, MAX_GROWTH_BYTES):
            each = size_text(growth // found["memory_steps"])
            return Verdict(FAIL, f"rank {rank} uses {each} more with every step ({size_text(before)} before)")
    return Verdict(PASS, f"peak {peak} per rank, no growth over {found['memory_steps']} steps")


def syncs(found: Figures) -> Verdict:
    """What waits for the device within a step."""
    per_rank: Sequence[Sequence[str]] = found["per_rank"]
    for rank, places in enumerate(per_rank):
        if places:
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            return Verdict(FAIL, f"a step on rank {rank} waits for the device: {places[0]}{more}")
    return Verdict(PASS, f"nothing in {found['steps']} steps waits for the device")


def _difference(one: float, other: float) -> float:
    difference = abs(one - other) / max(1.0, abs(other))
    return difference if difference == difference else float("inf")  # NaN


def _largest_difference(losses: Sequence[float], reference: Sequence[float]) -> tuple[int, float]:
    """Return the step with the largest relative difference, and that difference."""
    differences = [_difference(one, other) for one, other in zip(losses, reference, strict=True)]
    step = max(range(len(differences)), key=differences.__getitem__)
    return step, differences[step]


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
