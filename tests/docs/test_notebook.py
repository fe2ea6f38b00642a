"""Execute the example notebook, and test the functions that it uses."""

from pathlib import Path

import nbformat
import pytest
from conftest import HANG, raises
from nbclient import NotebookClient

import paceline
from paceline.errors import ConfigError

NOTEBOOK = Path(__file__).parents[2] / "examples" / "one_node_or_two.ipynb"


def test_notebook_runs_and_writes_logbook_and_report(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=HANG, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        output["data"].get("text/html", output["data"].get("text/plain", ""))
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]
    assert sum("<svg" in text for text in shown) == 3
    assert any("The same experiment" in text for text in shown)
    assert any("'green'" in text for text in shown)
    displayed = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "display_data" in output.output_type
    ]
    assert displayed, "no live progress"
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "logbook" / "index.md").exists()


def test_errors_are_exceptions_with_codes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        paceline.load_recipe("digits", {"optim.lrr": 1})
    assert [problem.code for problem in caught.value.problems] == ["unknown-field"]
    assert "optim.lrr" in str(caught.value)
    with raises("run-not-found"):
        paceline.Run("nowhere")
    with pytest.raises(AttributeError):
        paceline.nothing  # noqa: B018
