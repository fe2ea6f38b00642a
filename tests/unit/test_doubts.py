"""Warnings about suspicious results: at the start, during and at the end of a run, and in comparisons."""

import json
from pathlib import Path

import pytest
from conftest import TINY
from made_runs import make_run

from paceline.analysis.compare import compare
from paceline.analysis.read import read
from paceline.analysis.tables import markdown
from paceline.engine.evaluation.sanity import sanity_warnings
from paceline.track.other_work import OtherWork, is_disturbed


def _evaluated(**figures: float) -> dict[str, float]:
    return {"loss": 1.0, "top1": 0.5, "chance": 0.1, "samples": 1000, "predicted": 10} | figures


def test_good_evaluation_has_no_warnings() -> None:
    assert sanity_warnings(_evaluated(), 10, 1.0) == {}
    assert sanity_warnings(_evaluated(top1=0.1), 10, 0.1) == {}  # normal early in training


@pytest.mark.parametrize(
    ("figures", "reason"),
    [({"loss": 40.0}, "diverging"), ({"top1": 0.1}, "chance"), ({"top1": 0.9, "chance": 0.9}, "chance")],
)
def test_divergence_and_chance_level_are_detected(figures: dict[str, float], reason: str) -> None:
    assert list(sanity_warnings(_evaluated(**figures), 10, 1.0)) == [reason]


def test_training_at_chance_level_warns_twice(here, monkeypatch) -> None:
    counts = {"correct": 100, "correct5": 500, "top5": 0.5}
    monkeypatch.setattr(
        "paceline.engine.evaluation.measure.evaluate", lambda *_: _evaluated(top1=0.1, predicted=1, **counts)
    )
    answer = here("train", "digits", *TINY, "--train.duration", "20ba", "--evaluate.every", "5ba")
    assert answer.returncode == 0, answer.stderr
    warnings = [line for line in answer.stderr.splitlines() if "the model predicts 1 of 10 classes" in line]
    assert len(warnings) == 2  # once it is clear, and at the end


def test_first_log_lines_describe_the_training(here) -> None:
    answer = here(
        "train", "digits", *TINY, "--train.duration", "10ba", "--train.global_batch", "480", "--precision", "fp32"
    )
    first = [line.split(" ", 1)[1] for line in answer.stderr.splitlines()]
    assert first[0] == "recipe: digits, run folder runs/digits"
    assert first[1].startswith(
        "data: digits (built in), 1,437 training and 360 validation images, 10 classes, fingerprint "
    )
    assert first[2] == "classes: 133 to 154 training images per class, imbalance ratio 1.16"
    assert first[3].startswith("model: airbench, ")
    assert first[3].endswith(" parameters, random weights")
    assert first[4] == "device: 1 cpu rank on this machine (1 thread), fp32"
    assert first[5] == "training: 2 steps per epoch, 10 in total (10ba), images 8x8 px, validated at 8x8 px"
    assert first[6] == "batch: per-rank batch 480 x 1 rank x accumulation 1 = global batch 480"
    assert first[7] == "optimizer: sgd, peak learning rate 0.05, schedule one-cycle, warmup 4ep"
    assert "an epoch has only 2 steps (1,437 images, global batch 480)" in answer.stderr
    scaled = (
        "--optim.head_lr_mult",
        "10",
        "--ema",
        "{decay: 0.9, lookahead: true}",
        "--optim.schedule",
        "{name: constant, warmup: 0ep}",
    )
    answer = here("train", "digits", *TINY, "--train.duration", "2ba", "--name", "scaled", *scaled)
    line = "optimizer: sgd, peak learning rate 0.05 (head x 10), schedule constant, EMA decay 0.9 with lookahead\n"
    assert line in answer.stderr


def test_settings_without_effect_and_slow_ones_are_warned_about(here) -> None:
    words = ("--train.duration", "2ba", "--fsdp.mesh", "flat", "--device", "cpu", "--precision", "fp16")
    answer = here("train", "digits", *TINY, *words, "--model.activation_checkpointing", "full")
    assert answer.returncode == 0, answer.stderr
    assert " strategy: full activation checkpointing\n" in answer.stderr
    assert "the settings of `fsdp` have no effect: the model is not sharded" in answer.stderr
    assert "precision=fp16: most CPUs emulate fp16" in answer.stderr


def test_a_schedule_that_the_run_does_not_finish_is_warned_about(here) -> None:
    points = "[{at: 0ba, factor: 0.0}, {at: 40ba, factor: 1.0}]"
    for duration, is_cut in (("20ba", True), ("40ba", False)):
        words = ("--optim.schedule", f"{{name: piecewise, points: {points}}}", "--train.duration", duration)
        answer = here("train", "digits", *TINY, *words, "--name", duration)
        assert answer.returncode == 0, answer.stderr
        assert ("optim.schedule.points end at 40ba" in answer.stderr) == is_cut


def test_a_first_epoch_without_learning_is_warned_about(here) -> None:
    for start, is_idle in (("0", True), ("0.01", False)):
        words = ("--optim.schedule.interval", "epoch", "--optim.schedule.start_factor", start, "--name", start)
        answer = here("train", "digits", *TINY, *words, "--train.duration", "2ba")
        assert answer.returncode == 0, answer.stderr
        assert ("the learning rate is 0 during the whole first epoch" in answer.stderr) == is_idle


def test_last_log_line_names_the_last_and_the_best_checkpoint(here, tmp_path: Path) -> None:
    """A learning rate that is too high at the end makes an earlier checkpoint the best."""
    points = "[{at: 0ba, factor: 1.0}, {at: 40ba, factor: 1.0}, {at: 40ba, factor: 300.0}]"
    words = ("--optim.schedule", f"{{name: piecewise, points: {points}}}", "--optim.clip_grad_norm", 1)
    answer = here("train", "digits", *TINY, *words, "--precision", "fp32")
    assert answer.returncode == 0, answer.stderr
    last = answer.stderr.splitlines()[-1]
    assert "(step-00000060); best top-1 " in last
    assert ", step-00000040); " in last
    assert (tmp_path / "runs" / "digits" / "checkpoints" / "step-00000040").is_dir()


# ---- load from other processes ----


def _samples(run: Path, **figures: float) -> None:
    lines = [{"kind": "sample", "time": float(second), "memory_bytes": 1} | figures for second in range(10)]
    (run / "telemetry" / "host-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_run_is_disturbed_only_on_a_full_host() -> None:
    assert is_disturbed({"cpu_percent": 100.0, "other_cpu_percent": 40.0})
    assert not is_disturbed({"cpu_percent": 60.0, "other_cpu_percent": 40.0})  # there are idle cores
    assert not is_disturbed({"cpu_percent": 100.0, "other_cpu_percent": 2.0})
    assert is_disturbed({"cpu_percent": 10.0, "other_gpu_processes": 1})


def test_other_load_is_the_total_minus_that_of_the_run(monkeypatch) -> None:
    used, now = iter([10.0, 12.0, 12.0]), iter([0.0, 0.0, 2.0, 4.0])
    monkeypatch.setattr("paceline.track.other_work._seconds", lambda _: next(used))
    monkeypatch.setattr("paceline.track.other_work.time.perf_counter", lambda: next(now))
    monkeypatch.setattr("paceline.track.other_work.psutil.cpu_count", lambda: 2)
    work = OtherWork([1])
    work.cpu_percent(0.0)
    assert work.cpu_percent(80.0) == 30.0  # 2 CPU seconds on 2 cores within 2 seconds: half of the capacity
    assert work.cpu_percent(80.0) == 80.0
    assert work.on_gpus([1, 7]) == [7]
    assert work.on_gpus([7]) == []  # a container hides the run's process ids


def test_other_load_is_logged_once(caplog, monkeypatch) -> None:
    from paceline.system.logs import log

    monkeypatch.setattr(log, "propagate", True)
    work = OtherWork([1])
    for _ in range(30):
        work.warn({"cpu_percent": 100.0, "other_cpu_percent": 40.0})
    (message,) = [record.message for record in caplog.records]
    assert "other processes use 40% of its CPU" in message


def test_comparison_reports_a_disturbed_run(tmp_path: Path) -> None:
    quiet, loaded = make_run(tmp_path, "quiet"), make_run(tmp_path, "loaded")
    _samples(quiet, cpu_percent=100.0, other_cpu_percent=1.0)
    _samples(loaded, cpu_percent=100.0, other_cpu_percent=45.0)
    runs = [read(quiet), read(loaded)]
    assert runs[0].disturbance == ""
    assert runs[1].disturbance in runs[1].notes
    comparison = compare(runs)
    assert [row["other_load"] for row in comparison.rows] == [0.01, 0.45]
    assert "| other CPU load | 1% | 45% |" in markdown(comparison)
    assert comparison.is_comparable
    assert not comparison.is_reliable
    assert (
        "loaded was disturbed: other processes used 45% of the CPU of host-0 during 100% of the run"
        in comparison.summary
    )


def test_compare_prints_a_disturbance_once(here, tmp_path: Path) -> None:
    quiet, loaded = make_run(tmp_path, "quiet"), make_run(tmp_path, "loaded")
    _samples(loaded, cpu_percent=100.0, other_cpu_percent=45.0)
    assert here("compare", quiet, loaded).stdout.count("disturbed") == 1


def _comparison(tmp_path: Path, ranks: int, first: dict[str, float], second: dict[str, float]):
    one = make_run(tmp_path, "one", seconds=first)
    return compare([read(one), read(make_run(tmp_path, "two", ranks=ranks, seconds=second))])


def test_speed_up_larger_than_the_number_of_devices_is_unreliable(tmp_path: Path) -> None:
    comparison = _comparison(tmp_path, 2, {"compute": 0.3}, {"compute": 0.1})
    assert not comparison.is_reliable
    expected = "two is 2.81x as fast as one on 2x the devices, more than expected; likely cause: one was slower"
    assert expected in comparison.summary
    assert "| speed-up (unreliable) |" in markdown(comparison)
    assert "two is 2.81x as fast as one" in compare(comparison.runs[::-1]).summary  # in any order


def test_waiting_for_data_is_named_as_the_cause(tmp_path: Path) -> None:
    comparison = _comparison(tmp_path, 2, {"compute": 0.1, "data": 0.3}, {"compute": 0.1, "data": 0.0})
    assert "one waited for input 75% of the time, two 0%" in comparison.summary


def test_speed_up_from_other_settings_is_accepted(tmp_path: Path) -> None:
    """On the same number of devices a run may be faster with other settings."""
    one = make_run(tmp_path, "one", "--train.grad_accumulation", "4", seconds={"compute": 0.3})
    assert compare([read(one), read(make_run(tmp_path, "two"))]).is_reliable


def test_slower_run_on_fewer_devices_is_plausible(tmp_path: Path) -> None:
    two = make_run(tmp_path, "two", ranks=2, seconds={"compute": 0.1})
    assert compare([read(two), read(make_run(tmp_path, "one", seconds={"compute": 0.15}))]).is_reliable


def test_plausible_speed_up_is_reliable(tmp_path: Path) -> None:
    comparison = _comparison(tmp_path, 2, {"compute": 0.19}, {"compute": 0.1})
    assert comparison.is_reliable
    assert comparison.summary == "the same experiment"
