"""What a notebook shows, in a real kernel: pictures, tables, short errors."""

import re

import nbclient
import nbformat
import pytest

CELLS = {
    "set-up": """
import daskdl, numpy as np, torch
from torch import nn
X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = (X[:, 0] > 0).astype("int64")
def trainer(model, **options):
    return daskdl.Trainer(
        model, "cross_entropy", "sgd", lr=0.1, client=False, **options
    )
""",
    "fit": """
trained = trainer(nn.Linear(4, 2), progress=True)
history = trained.fit(X, y)
""",
    "history": "history",
    "plot of a history": "history.plot()",
    "plot of an evaluation": 'trained.evaluate(X, y, metrics="classification").plot()',
    "trainer": "trained",
    "error in the dry run": """
class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x):
        return self.layer(x) @ torch.zeros(3, 2)  # the fault
trainer(Wrong()).fit(X, y)
""",
    "error in a step": """
class Late(nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls > 3:
            raise RuntimeError("late")  # the fault
        return super().forward(x)
trainer(Late(4, 2), progress=False).fit(X, y, batch_size=4)
""",
}


@pytest.fixture(scope="module")
def outputs():
    """The outputs of each cell."""
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, allow_errors=True, timeout=120).execute()
    return {
        name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)
    }


def text_of_error(outputs):
    (error,) = (output for output in outputs if output.output_type == "error")
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))


def test_a_progress_bar_needs_no_widgets(outputs):
    text = "".join(output.text for output in outputs["fit"])

    assert "64/64" in text
    assert "Warning" not in text


@pytest.mark.parametrize("cell", ["plot of a history", "plot of an evaluation"])
def test_a_plot_is_a_picture_without_a_magic_command(outputs, cell):
    (output,) = outputs[cell]

    assert "image/png" in output.data


def test_history_and_trainer_are_tables(outputs):
    (history,), (trainer,) = outputs["history"], outputs["trainer"]

    assert "1 epoch," in history.data["text/html"]
    for row in ("<th>model</th><td>Linear<", "<th>lr</th><td>0.1<", "History(1 epoch,"):
        assert row in trainer.data["text/html"]
    assert "seed" not in trainer.data["text/html"]  # is the default


@pytest.mark.parametrize("cell", ["error in the dry run", "error in a step"])
def test_an_error_of_forward_shows_the_line_and_no_internals(outputs, cell):
    text = text_of_error(outputs[cell])

    assert "# the fault" in text
    assert "daskdl/" not in text
    assert len(text.splitlines()) < 40
