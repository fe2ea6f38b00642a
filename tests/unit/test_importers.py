"""Import logs of other programs."""

from pathlib import Path

import pytest
from conftest import raises
from made_runs import make_run

from paceline.analysis.compare import compare
from paceline.analysis.page import report
from paceline.analysis.read import read
from paceline.analysis.tables import markdown, table
from paceline.analysis.verdict import verdict

ONE_VM = """# global_batch: 1024
# data.decode_threads: 1
Epoch: [0][1200/1252]\tTime  6.123 ( 6.500)\tData  5.50 ( 5.930)\tLoss 4.1e+00 (5.2e+00)\tAcc@1  20.00 ( 12.00)
Test: [ 10/49]\tTime  1.0 ( 1.0)\tLoss 3.0 (3.0)\tAcc@1 30.0 (30.0)\tAcc@5 55.0 (55.0)
 * Acc@1 35.120 Acc@5 60.500
Epoch: [1][1251/1252]\tTime  6.100 ( 6.500)\tData  5.50 ( 5.930)\tLoss 3.1e+00 (3.2e+00)\tAcc@1  38.00 ( 36.00)
Epoch: [1][12
 * Acc@1 46.854 Acc@5 72.586
Training complete in: 4:42:47
"""
TWO_VMS = ONE_VM.replace("1024", "512").replace("threads: 1", "threads: 2").replace("/1252]", "/1251]")
TWO_VMS = TWO_VMS.replace("46.854", "51.552").replace("72.586", "77.380").replace("4:42:47", "1:16:49")


def test_published_logs_of_one_and_two_nodes_are_not_the_same_experiment(tmp_path: Path) -> None:
    for name, text in (("one.log", ONE_VM), ("two.log", TWO_VMS)):
        (tmp_path / name).write_text(text)
    runs = [read(tmp_path / name) for name in ("one.log", "two.log")]
    assert (runs[0].final["top1"], runs[0].final["top5"]) == pytest.approx((0.46854, 0.72586))
    assert runs[0].facts["seconds"] == 4 * 3600 + 42 * 60 + 47
    assert runs[0].seconds["data"] / runs[0].train_seconds == pytest.approx(5.93 / 6.5)
    comparison = compare(runs)
    assert not comparison.fairness.same
    assert "global batch" in comparison.fairness.summary
    assert not comparison.is_comparable
    bottleneck = verdict(runs[0])[0]
    assert bottleneck.cause == "input-bound"
    assert "91%" in bottleneck.text


def test_logs_of_other_programs(tmp_path: Path) -> None:
    (tmp_path / "dawn.tsv").write_text(
        "epoch\thours\ttop1Accuracy\ttop5Accuracy\n1\t0.5\t40.5\t65.0\n2\t1.0\t50.0\t75.0\n3\t1."
    )
    dawn = read(tmp_path / "dawn.tsv")
    assert dawn.points("top5") == [(1.0, 0.65), (2.0, 0.75)]
    assert dawn.seconds_to(0.5) == pytest.approx(3600)
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "metrics.csv").write_text(
        "epoch,step,train_loss,val_loss,val_acc\n0,9,2.0,,\n0,10,,1.5,0.4\n"
    )
    lightning = read(tmp_path / "lightning")
    assert (lightning.trained[0]["loss"], lightning.final["top1"]) == (2.0, 0.4)
    (tmp_path / "percent.csv").write_text("epoch,step,val_acc\n0,1,0.9\n1,2,93.5\n")
    assert [record["top1"] for record in read(tmp_path / "percent.csv").evaluated] == pytest.approx([0.009, 0.935])
    (tmp_path / "odd.log").write_text(
        "# ranks: two\nEpoch: [0][0/0]\tTime 1.0 (1.0)\nEpoch: [0][1/2]\tTime 0.5.3 (0.5)\n * Acc@1 5.0\n"
    )
    assert any("# ranks: two" in note for note in read(tmp_path / "odd.log").notes)
    (tmp_path / "other.csv").write_text("name,stepmother,loss\na,b,1\n")
    with raises("not-a-run"):
        read(tmp_path / "other.csv")
    make_run(tmp_path / "many", "one")
    with raises("folder-of-runs") as caught:
        read(tmp_path / "many")
    assert "many contains runs (one)" in str(caught.value)
    (tmp_path / "both.log").write_text(
        "Epoch: [0][9/10]\tTime 1.0 (1.0)\n * Acc@1 90.0 Acc@5 99.0\n * Val Acc@1 60.0 Acc@5 80.0\n"
    )
    assert [record["top1"] for record in read(tmp_path / "both.log").evaluated] == [0.6]


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("# seconds: 100\n * Acc@1 60.0 Acc@5 80.0\n", "no times in the log"),
        (" * Acc@1 60.0 Acc@5 80.0\n", "no times in the log"),
        (" * Acc@1 40.0 Acc@5 80.0\n", "no times in the log"),
        ("# seconds: 100\n * Acc@1 40.0 Acc@5 80.0\n", "not reached"),
        ("Epoch: [0][9/10]\tTime 2.0 (2.0)\n * Acc@1 40.0 Acc@5 80.0\n", "not reached"),
        ("Epoch: [0][9/10]\tTime 2.0 (2.0)\n * Acc@1 60.0 Acc@5 80.0\n", "20.0 s"),
    ],
)
def test_time_to_accuracy_is_unknown_without_times(tmp_path: Path, text: str, cell: str) -> None:
    (tmp_path / "run.log").write_text(text)
    comparison = compare([read(tmp_path / "run.log")], target=0.5)
    assert ["time to 50% top-1", cell] in table(comparison)
    assert f">{cell}<" in report(comparison, "title")


def test_lightning_log_without_times_beside_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,step,val_acc\n0,1,0.3\n1,2,0.4\n")
    runs = [read(make_run(tmp_path, "one")), read(tmp_path / "metrics.csv")]
    cells = next(cells for label, *cells in table(compare(runs, target=0.8)) if label.startswith("time to"))
    assert cells[0].endswith(" s")
    assert cells[1] == "no times in the log"
    assert "no times in the log" in markdown(compare(runs, target=0.8))


def test_tensorboard_events(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "tb") as writer:
        for step in range(3):
            writer.add_scalar("Loss/train", 2.0 - step, step)
            writer.add_scalar("Accuracy/val", 50.0 + step, step)
            writer.add_scalar("something/else", 1.0, step)
    run = read(tmp_path / "tb")
    assert run.points("loss", "train", "step") == [(0, 2.0), (1, 1.0), (2, 0.0)]
    assert run.final["top1"] == pytest.approx(0.52)
    assert any("something/else" in note for note in run.notes)


def test_every_epoch_counts_to_its_end(tmp_path: Path) -> None:
    lines = [f"Epoch: [{epoch}][{batch}/110]\tTime 1.0 (1.0)\n" for epoch in (1, 2, 3) for batch in (0, 50, 100)]
    (tmp_path / "sparse.log").write_text("# global_batch: 10\n" + "".join(lines) + " * Acc@1 50.0 Acc@5 70.0\n")
    run = read(tmp_path / "sparse.log")
    assert run.train_seconds == pytest.approx(330)
    assert run.images_per_second == pytest.approx(10)
    assert [record["epoch"] for record in run.records] == [1, 2, 3, 3]
    assert compare([run, run]).rows[0]["has_total_time"] is False  # evaluation was not measured


def test_torchvision_log(tmp_path: Path) -> None:
    (tmp_path / "tv.log").write_text(
        "Epoch: [0]  [ 10/100]  eta: 0:01:00  lr: 0.5  img/s: 300.0  loss: 6.9536 (6.9611)  acc1: 0.0000 (0.2137)  "
        "acc5: 0.7812 (0.9000)  time: 0.5000  data: 0.1000  max mem: 7000\n"
        "Epoch: [0] Total time: 0:00:55\nTest:  Acc@1 12.500 Acc@5 30.000\n"
    )
    run = read(tmp_path / "tv.log")
    assert (run.trained[0]["loss"], run.final["top1"], run.final["top5"]) == (6.9611, 0.125, 0.3)
    assert run.seconds == pytest.approx({"data": 10.0, "compute": 45.0})


def test_unknown_settings_are_not_the_same_experiment(tmp_path: Path) -> None:
    facts = "# global_batch: 10\n# data: d\n# precision: fp32\n# code: 1\n# seed: 0\n"
    for name, more in (("one", "Namespace(arch='resnet18', lr=0.1, momentum=0.9)\n"), ("two", "")):
        (tmp_path / f"{name}.log").write_text(f"{facts}{more}Epoch: [0][9/10]\tTime 1.0 (1.0)\n * Acc@1 5.0\n")
    found = compare([read(tmp_path / "one.log"), read(tmp_path / "two.log")])
    assert not found.is_comparable
    assert found.fairness.unknown == ("model", "learning rate", "optim.momentum")
    assert all(row["cost"] is None for row in compare(found.runs, price=3.0).rows)  # the number of hosts is unknown


def test_log_with_a_restart(tmp_path: Path) -> None:
    def epoch(number: int, accuracy: float, batches: tuple[int, ...] = (0, 5, 9)) -> str:
        steps = [f"Epoch: [{number}][{batch}/10]\tTime 1.0 (1.0)\tData 0.5 (0.5)\n" for batch in batches]
        return "".join(steps) + (f" * Acc@1 {accuracy} Acc@5 90.0\n" if accuracy else "")

    log = tmp_path / "restarted.log"
    log.write_text(epoch(0, 10.0) + epoch(1, 20.0) + epoch(2, 0.0, (0, 5)) + epoch(1, 21.0) + epoch(2, 30.0))
    run = read(log)
    assert [record["top1"] for record in run.evaluated] == pytest.approx([0.1, 0.21, 0.3])
    assert [record["step"] for record in run.trained] == [10, 20, 30]
    assert run.train_seconds == pytest.approx(30)
    assert run.images_per_second is None
    assert not run.complete
    assert any("restarted at epoch 1" in note for note in run.notes)
    ranks = "".join(
        line + "\n" for line in epoch(0, 0.0, (0, 1, 2)).splitlines() for _ in range(2)
    )  # two ranks print the same log
    log.write_text(ranks + " * Acc@1 10.0 Acc@5 20.0\n")
    assert read(log).complete
