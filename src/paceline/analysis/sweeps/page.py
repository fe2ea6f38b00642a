from paceline.analysis.sweeps.record import SweepRecord


def sweep_page(record: SweepRecord) -> str:
    return "x"
