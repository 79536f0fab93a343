"""Every example, and the code on every page, runs without a warning."""

import functools
import importlib.util
import json
import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from daskdl.compression.thresholds import Outcome
from tests.support.pages import Code, alike, code_of, prints
from tests.support.public_files import (
    write_cifar10,
    write_fashion_mnist,
    write_tiny_imagenet,
)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Pages show no output of them: they need data that have to be downloaded, SLURM, or
# minutes.
WITHOUT_OUTPUT = {
    *("cifar10.py", "fashion_mnist.py", "tiny_imagenet.py", "slurm.py"),
    "bigger_than_memory.py",
}

LIMIT_S = 600  # a busy machine may take many times as long as an idle one
pytestmark = pytest.mark.timeout(LIMIT_S + 30)

# Starts of messages: another cluster on this machine has the dashboard's port; Keras
# 3.15 warns on NumPy 2 at each weight that it writes or reads; Dask 2026.8 writes
# Parquet with an argument that pandas 3.1 deprecates.
IGNORED = ["Port", "__array__ implementation", "The inplace keyword"]


def run(script: Path, *arguments: str, cwd: Path = ROOT) -> list[str]:
    """Run a script with warnings as errors; return the lines that it prints.

    What a page shows as the output of an example is compared with them.
    """
    ignore = [f"-Wignore:{message}" for message in IGNORED]
    done = subprocess.run(
        [sys.executable, "-Werror", *ignore, script, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if (shown := outputs().get(script)) is not None:
        assert alike(shown, done.stdout), done.stdout
    return done.stdout.splitlines()


@functools.cache
def outputs() -> dict[Path, str]:
    """What pages show as the outputs of examples."""
    return {
        ROOT / code.file: code.output
        for page in PAGES
        for code in code_of(page)
        if code.file and prints(code.text) and code.output is not None
    }


def runnable(page: Path) -> list[Code]:
    """The code of a page that is run here, without included files."""
    return [code for code in code_of(page) if code.is_run]


def path_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def script_at(path: Path):
    """The module of a file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # pickle looks for classes there
    spec.loader.exec_module(module)
    return module


def included(page: Path) -> set[str]:
    return set(re.findall(r'^--8<-- "([^":]+)', page.read_text(), re.M))


def number(line: str) -> float:
    return float(line.split()[-1])


@pytest.fixture
def strategies():
    return script_at(EXAMPLES / "own_strategies.py")


def test_every_example_is_run_here():
    on_slurm = ROOT / "tests" / "jobqueue" / "test_jobs.py"
    here = Path(__file__).read_text() + on_slurm.read_text()

    missing = [p.name for p in EXAMPLES.glob("*.py") if f'"{p.name}"' not in here]

    assert missing == []


def test_digits_are_learned():
    *lines, summary, traffic, accuracy = run(EXAMPLES / "digits.py")

    assert len(lines) == 16  # a heading and 15 epochs
    assert summary.startswith("1437 digits, 2 replicas, ")
    sent, dense = re.fullmatch(
        r"sent (\S+) MB; dense updates would have been (\S+) MB", traffic
    ).groups()
    assert 0 < float(sent) < float(dense) / 20
    assert accuracy.startswith("test accuracy ")
    assert number(accuracy) >= 0.96


def test_a_dask_array_is_trained_on_block_by_block():
    heading, *epochs, accuracy = run(EXAMPLES / "dask_array.py")

    assert heading == "40000 rows in 8 blocks"
    assert len(epochs) == 6
    assert number(epochs[-1]) < number(epochs[0]) / 3
    assert number(accuracy) >= 0.95


def test_a_forecast_is_learned_from_maps_in_a_zarr_file():
    *epochs, forecasts, today = run(EXAMPLES / "xarray_forecast.py")

    assert len(epochs) == 6
    assert number(forecasts) < number(today) / 4


def test_a_folder_of_images_is_packed_and_learned():
    packed, *epochs, summary, accuracy, five = run(EXAMPLES / "image_folder.py")

    assert packed.startswith("2000 images in 20 files, ")
    assert len(epochs) == 10
    assert summary.startswith("1640 images, 10 classes, ")
    assert number(accuracy) >= 0.95
    assert number(five) >= 0.99


def test_public_datasets_are_learned_from_small_files_in_their_formats(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    cifar, clothes, tiny = (tmp_path / name for name in ("cifar", "clothes", "tiny"))
    write_cifar10(cifar, rows=100)
    write_fashion_mnist(clothes, train=500, test=100)
    write_tiny_imagenet(tiny, train=50, test=10)

    def learned(name, *arguments):
        lines = run(EXAMPLES / name, *map(str, arguments), "--epochs", "3")
        losses = [float(x.split()[3]) for x in lines if x.startswith("epoch ")]
        assert len(losses) == 3
        assert losses[2] < losses[0]
        return [line for line in lines if not line.startswith("epoch ")]

    heading, accuracy = learned("cifar10.py", "--data", cifar)
    assert heading == "500 images to train on, 100 to test with"
    assert 0 <= number(accuracy) <= 1
    lines = learned("fashion_mnist.py", clothes)
    assert [line.split()[0] for line in lines[:3]] == [
        *("T-shirt/top", "Trouser", "Pullover")
    ]
    assert learned("tiny_imagenet.py", tiny) == ["200 images of 4 classes in 1 files"]


def test_a_keras_model_is_trained_and_saved():
    heading, *epochs, accuracy, same = run(EXAMPLES / "keras_model.py")

    assert heading == "digits: 7 layers, 19578 parameters"
    assert len(epochs) == 8
    assert number(epochs[-1]) < number(epochs[0]) / 3
    assert number(accuracy) >= 0.9
    assert same == "Keras predicts the same: True"


def test_a_model_of_transformers_is_trained_and_fine_tuned():
    hidden, *epochs, accuracy, good = run(EXAMPLES / "transformers_finetune.py")

    first, last = re.fullmatch(r"hidden words: loss (\S+), then (\S+)", hidden).groups()
    assert float(last) < float(first)
    assert len(epochs) == 6
    assert number(accuracy) >= 0.95
    assert re.match(r"2\d\d of 500 are good, such as: the ", good)


def test_an_evaluation_is_printed_and_drawn(tmp_path):
    lines = run(EXAMPLES / "evaluate.py", cwd=tmp_path)

    facts = dict(re.findall(r"^(\S.*\S)  +([\d.]+)$", "\n".join(lines), re.MULTILINE))
    assert float(facts["accuracy"]) >= 0.7
    assert float(facts["ROC AUC (macro)"]) >= 0.95
    assert "Classification: 10 classes, 719 labels" in lines
    assert "Calibration: 719 predictions" in lines
    pictures = {path.name for path in (tmp_path / "pictures").glob("*.png")}
    kinds = {"all", "confusion_matrix", "roc", "precision_recall", "reliability"}
    assert pictures == {f"{kind}.png" for kind in kinds}
    written = json.loads((tmp_path / "pictures" / "evaluation.json").read_text())
    assert f"{written['mcc']:.4f}" == facts["MCC"]


def test_anomalies_have_the_largest_losses():
    heading, odd, others, digits, worst, *picture, area = run(
        EXAMPLES / "score_anomalies.py"
    )

    assert heading == "1130 digits without 4, 54 of 540 are 4"
    assert number(odd) > 2 * number(others)
    counts = re.search(r"largest losses: \{4: (\d+), ", digits)
    assert int(counts[1]) >= 25  # of 50, where chance would make it 5
    assert re.fullmatch(r"row \d+, a \d, has the largest loss:", worst)
    assert [len(line) for line in picture] == [16] * 8
    assert number(area) >= 0.93


def test_data_larger_than_memory_is_trained_on():
    size, losses, peak = run(EXAMPLES / "bigger_than_memory.py")

    assert size == "3.35 GiB in 439 blocks, 2 epochs"
    first, second = map(float, losses.removeprefix("loss ").strip("[]").split(", "))
    assert second < first
    most = re.search(r"may use 900MB; the largest peak was (\S+) MiB", peak)
    assert float(most[1]) * 2**20 < 900e6


def test_own_strategies_are_used():
    stopped, mean, accuracy = run(EXAMPLES / "own_strategies.py")

    assert re.fullmatch(r"stopped: \d+ of 50000 bytes were sent", stopped)
    density = number(mean)
    assert 0.015 < density <= 0.021  # the share it was asked to send
    assert number(accuracy) >= 0.8


def test_an_own_training_master_trains():
    summary, accuracy = run(EXAMPLES / "own_master.py")

    assert summary.startswith("4 replicas, ")
    assert number(summary) < 0.5
    assert number(accuracy) >= 0.8


@pytest.mark.parametrize(
    "last", [None, Outcome(1e-3, 0.0), Outcome(1e-3, 1.0)], ids=str
)
@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([0.5, -2.0, 0.0, 1.0], 0.25, 2.0),
        ([0.5, -2.0, 0.0, 1.0], 0.5, 1.0),
        ([0.0, 0.0, 0.0, 0.0], 0.5, 1e-6),
    ],
)
def test_the_own_threshold_sends_the_largest_share(
    strategies, values, share, expected, last
):
    class Residual:
        def tensor(self):
            return torch.tensor(values)

    algorithm = strategies.LargestShare(share)

    assert algorithm.next_threshold(Residual(), last) == expected
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm


def test_the_own_residual_rule_clips_after_the_warm_up(strategies):
    rule = strategies.ClipAfterWarmUp(exchanges=2)

    assert [rule.bound(exchange, 0.5) for exchange in (1, 2)] == [math.inf, 1.5]
    assert pickle.loads(pickle.dumps(rule)) == rule


def test_mlflow_tracks_a_fit(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # what needs no database

    lines = run(EXAMPLES / "mlflow_tracking.py", str(tmp_path / "store"))

    assert lines[-1].startswith("FINISHED, val_loss 0.")


def test_weights_and_biases_tracks_a_fit_offline(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")

    *_, lines = run(EXAMPLES / "wandb_tracking.py", str(tmp_path))

    assert lines.startswith("val_loss 0.")
    assert len([*tmp_path.glob("wandb/offline-run-*/*.wandb")]) == 1


def test_the_own_callback_stops_beyond_its_budget(strategies):
    budget = strategies.Budget(100)
    for _ in range(2):
        budget.on_epoch_end({"sent_bytes": 50})

    with pytest.raises(budget.Over, match="101 of 100 bytes were sent"):
        budget.on_epoch_end({"sent_bytes": 1})


def test_the_readme_trains(tmp_path):
    (code,) = runnable(ROOT / "README.md")
    script = tmp_path / "readme.py"
    script.write_text(code.text)

    *_, losses, accuracy = printed = run(script)

    assert alike(code.output, "\n".join(printed))
    first, *_, last = map(float, losses.strip("[]").split(", "))
    assert last < first / 2
    assert float(accuracy) >= 0.9


@pytest.mark.parametrize("page", [p for p in PAGES[1:] if runnable(p)], ids=path_of)
def test_the_code_on_a_page_runs_and_prints_what_the_page_shows(page, tmp_path):
    blocks = runnable(page)
    script = tmp_path / "page.py"
    script.write_text("\n".join(code.text for code in blocks))

    printed = "\n".join(run(script))

    shown = "\n".join(code.output for code in blocks if prints(code.text))
    assert alike(shown, printed), printed


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_a_page_shows_what_its_code_prints(page):
    silent = [
        code.file or code.text
        for code in code_of(page)
        if prints(code.text)
        and code.output is None
        and Path(code.file).name not in WITHOUT_OUTPUT
    ]

    assert silent == []


TUTORIAL = ROOT / "docs" / "tutorial.md"


def check_tutorial(printed):
    """Check the outputs of the steps: what the page shows, and what was learned."""
    shown = [code.output for code in code_of(TUTORIAL) if prints(code.text)]
    assert alike("".join(shown), "".join(printed)), printed
    loop, local, cluster, files, resumed, grown = printed
    assert number(loop) > 0.9
    assert min(map(float, re.findall(r"0\.\d+(?=\]$)", local + cluster, re.M))) > 0.9
    assert "[2, 2, 2, 2, 2]" in cluster
    assert number(files) > 0.9
    assert resumed == "[0, 1, 2, 3, 4, 5]\n"
    assert grown == "2 replicas in the first epoch, 3 in the last\n"


def test_the_notebook_is_the_tutorial_and_runs():
    notebook = nbformat.read(TUTORIAL.with_suffix(".ipynb"), 4)

    def printed():
        return [
            output.text
            for cell in notebook.cells
            for output in cell.get("outputs", [])
            if output.get("name") == "stdout"
        ]

    shown = printed()
    NotebookClient(
        notebook, timeout=LIMIT_S, resources={"metadata": {"path": ROOT}}
    ).execute()

    assert alike("".join(shown), "".join(printed()))
    check_tutorial(printed())


def test_the_script_of_the_tutorial_runs():
    lines = run(TUTORIAL.with_suffix(".py"))

    # Step 3 prints two lines.
    steps = [*lines[:2], "\n".join(lines[2:4]), *lines[4:]]
    check_tutorial([f"{text}\n" for text in steps])


def test_the_notebook_and_the_script_are_the_page():
    module = script_at(TUTORIAL.parent / "notebook.py")

    for suffix, write in ((".ipynb", module.notebook), (".py", module.script)):
        written = TUTORIAL.with_suffix(suffix).read_text()
        assert written == write(TUTORIAL.read_text()), "run docs/notebook.py"


def test_the_commands_on_their_page_run(tmp_path):
    page = (ROOT / "docs" / "command-line.md").read_text()
    (nets,) = re.findall(
        r'^```{ .python title="nets.py" }\n(.*?)^```$', page, re.M | re.S
    )
    (tmp_path / "nets.py").write_text(nets)
    commands = "".join(re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S))
    ours = f"""
    set -e
    python() {{ {sys.executable} -Werror "$@"; }}
    daskdl() {{ python -m daskdl "$@"; }}
    """

    done = subprocess.run(
        ["bash", "-c", ours + commands],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "digits.html").read_text().startswith("<!DOCTYPE html>")
    for text in (": ok (", "val_accuracy", "epoch 1 (2 of 2)", "workers  efficiency"):
        assert text in done.stdout
    assert "epoch 0 (1 of 2)" not in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_the_included_and_linked_files_of_a_page_exist(page):
    linked = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())

    missing = [name for name in included(page) if not (ROOT / name).is_file()]
    missing += [name for name in linked if not (page.parent / name).is_file()]

    assert missing == []


def test_messages_on_the_page_for_troubles_are_ours():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    first = re.findall(r"^\| ((?:`[^`]+`(?:, | after )?)+) \|", page, re.M)
    quoted = [text for cell in first for text in re.findall("`([^`]+)`", cell)]
    sources = (ROOT / "daskdl").rglob("*.py")
    # Strings that are split between lines are one.
    code = re.sub(r'"\n\s+f?"', "", "".join(p.read_text() for p in sources))

    assert len(quoted) > 10
    assert [text for text in quoted if text not in code] == []


def test_every_example_is_shown_on_a_page():
    shown = set().union(*(included(page) for page in PAGES))

    assert shown == {f"examples/{path.name}" for path in EXAMPLES.glob("*.py")}


def test_the_gallery_has_every_example_and_its_picture():
    gallery = script_at(ROOT / "docs" / "gallery.py")
    written = gallery.PAGE.read_text()

    listed = [name for names in gallery.GROUPS.values() for name in names]

    assert sorted(listed) == sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert written == gallery.page(), "run docs/gallery.py"
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", written)
    assert {Path(picture).stem for picture in pictures} == gallery.PICTURES.keys()
