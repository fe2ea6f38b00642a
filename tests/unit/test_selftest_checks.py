"""Selftest: verdicts about given figures, and what is removed from reports."""

import getpass
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.launch.groups import reason_of
from paceline.selftest import judges, links, page
from paceline.selftest.checks import Row
from paceline.selftest.scrub import Scrubber
from paceline.selftest.settings import Settings, exact_recipe, speed_recipe

LOSSES = [2.3, 2.2, 2.1]
RUN = {
    "first_step": 4,
    "steps": list(range(1, 13)),
    "losses": [1.0 / step for step in range(1, 13)],
    "digest": "same",
    "split": [{"data": 0.1, "compute": 0.8, "sync": 0.05, "optimizer": 0.05}] * 12,
    "times": [float(step) for step in range(12)],
    "ddp_ranks": 0,
}
STEPS = {
    "precision": "bf16",
    "batch": 64,
    "seconds": {"own": 0.105, "plain": 0.1},
    "alone_per_rank": [0.1, 0.11, 0.1, 0.1],
    "peak_per_rank": [3_000_000_000] * 4,
    "memory_per_rank": [[2_000_000_000, 2_001_000_000]] * 4,
    "memory_steps": 20,
}
RATES = {
    "all": 180e9,
    "pairs": [[0, 1, 200e9], [0, 2, 190e9], [1, 2, 195e9]],
    "node_of_rank": [0, 0, 0],
    "network_link": None,
    "gpu_link": 300e9,
}
KILLED = {"error": "rank 0 was killed [rank-killed]"}


def _check(verdict: judges.Verdict, status: str, *words: str) -> None:
    assert verdict.status == status, verdict
    assert all(word in verdict.reason for word in words), verdict


def test_losses_of_each_precision_have_their_tolerance() -> None:
    near = {"reference": LOSSES, "fp32": [loss + 1e-5 for loss in LOSSES], "bf16": [loss + 1e-2 for loss in LOSSES]}
    _check(judges.precision(near), "pass", "fp32", "bf16")
    _check(judges.precision(near | {"fp32": near["bf16"]}), "fail", "fp32", "step")
    _check(judges.precision(near | {"fp16": [float("nan")] * 3}), "fail", "fp16")


def test_ranks_must_have_the_losses_of_one() -> None:
    single, many = {"single": LOSSES, "same_images": 2.0}, {"ddp": LOSSES, "fsdp": LOSSES, "same_images": [2.0, 2.0]}
    _check(judges.same_losses(single, many), "pass", "DDP", "FSDP")
    _check(judges.same_losses(single, many | {"fsdp": [2.3, 2.25, 2.1]}), "fail", "fsdp", "step 2")
    _check(judges.same_losses(single, many | {"same_images": [2.0, 2.1]}), "fail", "rank 1")
    del many["fsdp"]
    _check(judges.same_losses(single, many | {"not_sharded": "no blocks"}), "pass", "FSDP was not tried")


def test_a_resumed_run_must_be_bit_identical() -> None:
    """On one rank, on two, whose sum has one order, and between ranks that share memory."""
    _check(judges.resume(RUN, KILLED, RUN), "pass", "bit-identical")
    _check(judges.resume(RUN, {"error": "rank 1 lost the connection [rank-lost]"}, RUN), "fail", "lost")
    _check(judges.resume(RUN, {"losses": []}, RUN), "fail", "finished")
    _check(judges.resume(RUN, KILLED, RUN | {"first_step": 0}), "fail", "step 0")
    other = [*RUN["losses"][:6], RUN["losses"][6] + 1e-9, *RUN["losses"][7:]]
    _check(judges.resume(RUN, KILLED, RUN | {"losses": other}), "fail", "step 7")
    _check(judges.resume(RUN, KILLED, RUN | {"digest": "other"}), "fail", "weights")
    _check(judges.resume(RUN | {"ddp_ranks": 2}, KILLED, RUN | {"losses": other}), "fail", "step 7")
    late = {"steps": RUN["steps"][1:], "losses": RUN["losses"][1:]}
    _check(judges.resume(RUN, KILLED, RUN | late), "fail", "missing")


def test_a_resumed_run_of_many_ddp_ranks_may_add_in_another_order() -> None:
    whole = RUN | {"ddp_ranks": 4}
    near, far = ([loss + difference for loss in RUN["losses"]] for difference in (1e-6, 1e-4))
    _check(judges.resume(whole, KILLED, RUN | {"losses": near, "digest": "other"}), "pass", "1.0e-06", "4 ranks")
    _check(judges.resume(whole, KILLED, RUN | {"losses": far}), "fail", "step 1", "1e-05")


def test_a_checkpoint_must_survive_and_flipped_bits_must_not() -> None:
    found = {
        "recorded": {"loss": 1.0, "top1": 0.5},
        "loaded": {"loss": 1.0, "top1": 0.5},
        "flipped": 5,
        "undetected": [],
    }
    _check(judges.round_trip({}, found), "pass", "5 of 5")
    _check(judges.round_trip({}, found | {"loaded": {"loss": 1.1, "top1": 0.5}}), "fail", "loss")
    _check(judges.round_trip({}, found | {"undetected": ["state.json"]}), "fail", "state.json")


def test_times_are_never_failures_unless_impossible() -> None:
    _check(judges.time_split(RUN), "pass")
    _check(judges.time_split(RUN | {"split": [{"compute": 0.5}] * 12}), "slow", "off by more")
    _check(judges.time_split(RUN | {"split": [{"compute": 1.2, "data": -0.2}] * 12}), "fail", "negative", "data")
    _check(judges.step_time(STEPS), "pass", "1.05 x")
    _check(judges.step_time(STEPS | {"seconds": {"own": 0.13, "plain": 0.1}}), "slow", "1.30 x")
    _check(judges.rank_speed(STEPS), "pass")
    _check(judges.rank_speed(STEPS | {"alone_per_rank": [0.1, 0.1, 0.3, 0.1]}), "slow", "rank 2")
    fed = {"fed_per_rank": [900.0, 800.0], "consumed_per_rank": [700.0, 700.0]}
    _check(judges.loading(fed), "pass", "800", "700")
    _check(judges.loading(fed | {"fed_per_rank": [900.0, 600.0]}), "slow", "600")


def test_bandwidth_is_compared_with_the_link_that_ranks_use() -> None:
    _check(judges.bandwidth(RATES), "pass", "67%", "GPU link")
    _check(judges.bandwidth(RATES | {"gpu_link": 450e9}), "slow", "44%")
    _check(judges.bandwidth(RATES | {"gpu_link": None}), "pass", "unknown")
    slow_pair = [[0, 1, 200e9], [0, 2, 20e9], [1, 2, 195e9]]
    _check(judges.bandwidth(RATES | {"pairs": slow_pair}), "slow", "ranks 0 and 2")
    # between nodes only their pairs count, compared with the network
    nodes = {"node_of_rank": [0, 0, 2], "network_link": 12.5e9, "all": 10e9}
    across = [[0, 1, 200e9], [0, 2, 11e9], [1, 2, 11e9]]
    _check(judges.bandwidth(RATES | nodes | {"pairs": across}), "pass", "88%", "network link")
    _check(judges.bandwidth(RATES | nodes | {"pairs": across, "network_link": 50e9}), "slow", "22%")


def test_memory_must_not_grow() -> None:
    _check(judges.memory(STEPS), "pass", "3.0 GB")
    grown = [*STEPS["memory_per_rank"][:3], [2_000_000_000, 2_200_000_000]]
    _check(judges.memory(STEPS | {"memory_per_rank": grown}), "fail", "rank 3", "10.0 MB")


def test_nothing_identifies_a_user_or_a_host() -> None:
    scrub = Scrubber(["alice@gpu-a", "gpu-b.example.com"])
    text = f"gpu-a cannot reach gpu-b.example.com (10.0.0.7:29400, fe80::1) as alice@gpu-a: {Path.home()}/x/key.txt"
    found = scrub({"hosts": [text], "rate": 1.5, "none": None})
    assert found["rate"] == 1.5
    assert found["none"] is None
    (clean,) = found["hosts"]
    assert clean == "node 0 cannot reach node 1 (ADDRESS:29400, ADDRESS) as node 0: .../key.txt"
    own = scrub(f"{socket.gethostname()} of {getpass.getuser()}")
    assert own == "this host of USER"
    assert scrub("torch 2.13.0+cpu, 3/4 of 10 GB, 21:06:48 [rank-lost]") == (
        "torch 2.13.0+cpu, 3/4 of 10 GB, 21:06:48 [rank-lost]"
    )


def test_the_page_escapes_what_it_shows(tmp_path: Path) -> None:
    row = Row("sync", "title", "fail", "<script>alert(1)</script>", {"text": "</pre><b>"})
    data, written = page.write(
        tmp_path / "new", page.report([row], {"gpus": ["<b>"]}, {"ranks": 2}, lambda value: value)
    )
    assert json.loads(data.read_text())["checks"][0]["status"] == "fail"
    text = written.read_text()
    assert "<script>" not in text
    assert "<b>" not in text


def test_the_cause_is_told_from_its_consequences() -> None:
    lost = "paceline: error: rank 1 lost the connection [rank-lost]"
    assert (
        reason_of([1, 1], [[lost], ["paceline: error: too few GPUs [too-few-gpus]"]]) == "too few GPUs [too-few-gpus]"
    )
    assert "rank 1" in reason_of([1], [[lost]])
    assert "rank-killed" in reason_of([-9], [[]])
    failed = ["Traceback ...", "ValueError: as requested", "paceline: error: rank 1 failed [rank-failed]"]
    assert reason_of([1], [failed]) == "ValueError: as requested"


def test_link_speeds_come_from_the_system(tmp_path: Path, monkeypatch) -> None:
    for name, content in (("eth0", "100000\n"), ("virtual", "-1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(content)
    expected = {"eth0": 12.5e9, "=eth0": 12.5e9, "virtual": None, "lo": None}
    for name, speed in expected.items():
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        assert links.network_link(tmp_path) == speed


@pytest.mark.parametrize(("num_links", "expected"), [(12, 300e9), (0, 31.5e9)])
def test_gpus_are_linked_by_nvlink_or_pcie(monkeypatch, num_links: int, expected: float) -> None:
    class NVMLError(Exception): ...

    def state(_handle: Any, number: int) -> int:
        if number >= num_links:
            raise NVMLError
        return 1

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetNvLinkVersion=lambda *_: 3,
        nvmlDeviceGetMaxPcieLinkGeneration=lambda _: 4,
        nvmlDeviceGetMaxPcieLinkWidth=lambda _: 16,
    )
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1234"))
    assert links.gpu_link(torch.device("cuda", 0)) == pytest.approx(expected, rel=1e-3)
    assert links.gpu_link(torch.device("cpu")) is None


def test_ranks_default_to_the_gpus() -> None:
    assert Settings().resolved("cuda", 8).ranks == 8
    assert Settings(hosts=2).resolved("cuda", 8).ranks == 16
    assert Settings(procs=4).resolved("cuda", 8).ranks == 4
    assert Settings().resolved("cpu", 0).ranks == 2
    assert Settings().resolved("mps", 0).ranks == 1
    assert Settings(hosts=2).resolved("cpu", 0).ranks == 2


def test_recipes_are_valid_for_any_number_of_ranks_and_keep_the_users_model() -> None:
    for ranks in (1, 3, 6, 8, 16, 100):
        settings = Settings(procs=ranks, overrides=("--model.name", "resnet10t")).resolved("cuda", 8)
        for recipe in (exact_recipe(settings), speed_recipe(settings)):
            assert recipe.train.global_batch % ranks == 0
            assert (recipe.model.name, recipe.model.options) == ("resnet10t", {})
    assert Settings.from_text(settings.to_text()) == settings
    assert speed_recipe(Settings().resolved("cuda", 1)).model.name == "resnet50"
