"""The notebook for two GPUs runs, here on two CPU ranks, and says what its text says."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BACKEND", "aot_eager")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    notebook = nbformat.read(EXAMPLES / "two_gpus.ipynb", as_version=4)
    NotebookClient(notebook, timeout=180, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    _, looked, compared, left = ["".join(o.get("text", "") for o in cell.outputs) for cell in cells]
    assert "buckets 0-3 launched early: after the backward of a partition" in looked
    assert "10 steps of 2 ranks, 5 buckets" in looked
    losses = re.findall(r"losses ([\d.]+) to ([\d.]+)", compared)
    assert losses[0] == losses[1] and losses[0][1] < losses[0][0]
    assert len(re.findall(r" [1-9]\d* graphs", compared)) == 2  # both are compiled
    assert left.startswith("['layers.0.weight', 'layers.0.bias'") and (tmp_path / "two_gpus.pt").exists()
