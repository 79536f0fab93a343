"""Writes the gallery of examples, docs/examples.md, and draws its pictures.

The text of the page is the examples' docstrings. The pictures come from real runs: an
example is run as a script, and what its trainers did is recorded and drawn.

Run:  python docs/gallery.py                       # the page
      python docs/gallery.py NAME [ARGUMENT ...]   # the picture of an example
      python docs/gallery.py landing               # the picture of the landing page
"""

import ast
import contextlib
import functools
import io
import os
import re
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
IMAGES = DOCS / "images"
PAGE = DOCS / "examples.md"

GROUPS = {
    "First steps": ["digits", "dask_array", "evaluate"],
    "Data": [
        *("image_folder", "bigger_than_memory", "xarray_forecast", "fashion_mnist"),
        *("cifar10", "tiny_imagenet"),
    ],
    "Models": ["keras_model", "transformers_finetune", "score_anomalies"],
    "Strategies of your own": ["own_strategies", "own_master"],
    "Clusters and trackers": ["slurm", "mlflow_tracking", "wandb_tracking"],
}

INTRODUCTION = """\
Each example is a script that runs as it is, and is run by the tests. The pictures were
drawn from what the scripts computed.
"""


# ---- the page


class Example(NamedTuple):
    """An example as its docstring describes it."""

    name: str
    question: str
    text: str  # paragraphs
    command: str

    @property
    def picture(self) -> str | None:
        """The picture as Markdown, if there is one."""
        draw = PICTURES.get(self.name)
        if draw is None:
            return None
        return f"![{draw.__doc__.rstrip('.')}](images/examples/{self.name}.png)"


def anchor(heading: str) -> str:
    """The anchor that MkDocs gives to a heading."""
    words = re.sub(r"[^\w\s-]", "", heading).strip().lower()
    return re.sub(r"[-\s]+", "-", words)


def read(name: str) -> Example:
    """Read the docstring of an example: a question, paragraphs, and the command."""
    docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    question, *paragraphs, run = (docstring or "").split("\n\n")
    if not question.endswith("?") or not run.startswith("Run:  "):
        raise ValueError(f"{name}.py must begin with a question, and end with Run:")
    text = "\n\n".join(paragraphs)
    return Example(name, " ".join(question.split()), text, run.removeprefix("Run:  "))


def shown_on(name: str) -> list[str]:
    """Links to the pages that show the code of an example."""
    places = []
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text()
        before, include, _ = text.partition(f'--8<-- "examples/{name}.py')
        if include:
            title = re.match("# (.*)", text)[1]
            heading = re.findall("^##+ (.*)$", before, re.MULTILINE)[-1]
            places.append(f"[{title}]({path.name}#{anchor(heading)})")
    return places


def page() -> str:
    """The gallery as Markdown: small pictures first, then each example."""
    groups = {title: [read(name) for name in names] for title, names in GROUPS.items()}
    cards = "\n".join(
        f"[{example.picture} {example.question}](#{anchor(example.question)})\n"
        for examples in groups.values()
        for example in examples
        if example.picture
    )
    parts = ["# Examples\n", INTRODUCTION]
    parts.append(f'<div class="gallery" markdown>\n\n{cards}\n</div>\n')
    for title, examples in groups.items():
        parts.append(f"## {title}\n")
        for example in examples:
            parts += entry(example)
    return "\n".join(parts)


def entry(example: Example) -> Iterator[str]:
    """The parts of the page about one example."""
    yield f"### {example.question}\n"
    if example.text:
        yield f"{example.text}\n"
    if example.picture:
        yield f"{example.picture}\n"
    yield f"```bash\n{example.command}\n```\n"
    yield f"Code: {', '.join(shown_on(example.name))}\n"


# ---- runs


class Run(NamedTuple):
    """What an example did."""

    lines: list[str]  # that it printed
    names: dict[str, Any]  # of the script
    calls: list[
        tuple[str, Any, tuple[Any, ...], Any]
    ]  # method, trainer, arguments, result

    def trainers(self) -> list[Any]:
        """The trainers in the order of their fits."""
        return [trainer for method, trainer, _, _ in self.calls if method == "fit"]

    def results(self, method: str) -> list[tuple[tuple[Any, ...], Any]]:
        """Arguments and result of each call of a method."""
        return [call[2:] for call in self.calls if call[0] == method]


def run(name: str, *arguments: str) -> Run:
    """Run an example as a script, and record what its trainers do."""
    import daskdl

    calls = []

    def recorded(method: str) -> Callable[..., Any]:
        function = getattr(daskdl.Trainer, method)

        @functools.wraps(function)
        def call(trainer: Any, *args: Any, **options: Any) -> Any:
            result = None
            try:
                result = function(trainer, *args, **options)
            finally:
                calls.append((method, trainer, args, result))
            return result

        return call

    printed = io.StringIO()
    path = EXAMPLES / f"{name}.py"
    with contextlib.ExitStack() as stack:
        for method in ("fit", "evaluate", "predict"):
            patched = mock.patch.object(daskdl.Trainer, method, recorded(method))
            stack.enter_context(patched)
        stack.enter_context(mock.patch.object(sys, "argv", [str(path), *arguments]))
        stack.enter_context(contextlib.redirect_stdout(printed))
        names = runpy.run_path(str(path), run_name="__main__")
    return Run(printed.getvalue().splitlines(), names, calls)


# ---- pictures

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
STYLE = {
    "font.size": 12,  # points of a picture that is shown 350 to 600 pixels wide
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12,
    "lines.linewidth": 2,
    "legend.frameon": False,
    "legend.handlelength": 1,
    "legend.columnspacing": 1,
    "legend.handletextpad": 0.4,
}


def figure(width: float = 4.8, height: float = 3.2) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=160)


def write(drawn: Any, path: Path) -> None:
    """Write a picture with few colors, which makes its file small."""
    from PIL import Image

    buffer = io.BytesIO()
    drawn.savefig(buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.open(buffer).convert("RGB")
    image.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def digits(ran: Run) -> Any:
    """Test accuracy and megabytes sent, by epoch."""
    history = ran.trainers()[0].history_
    drawn = figure()
    accuracy, sizes = drawn.subplots(2, 1, sharex=True)
    accuracy.plot(history.column("epoch"), history.column("val_accuracy"), color=BLUE)
    accuracy.set(title="test accuracy", ylim=(0, 1.05))
    megabytes = {
        "dense": np.array(history.column("dense_bytes")) / 1e6,
        "sent": np.array(history.column("sent_bytes")) / 1e6,
    }
    for color, (label, size) in zip(
        ("#BBBBBB", ORANGE), megabytes.items(), strict=True
    ):
        sizes.bar(history.column("epoch"), size, color=color, label=label)
    sizes.set(title="MB of an epoch", xlabel="epoch", yscale="log", ylim=(5e-3, 20))
    sizes.legend(ncols=2, loc="upper right")
    return drawn


def dask_array(ran: Run) -> Any:
    """Predicted classes of points, and the four rings that they should be."""
    import torch

    side = np.linspace(-2.4, 2.4, 200)
    points = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    with torch.no_grad():
        scores = ran.trainers()[0].model_(torch.tensor(points, dtype=torch.float32))
    classes = scores.argmax(dim=1).reshape(200, 200)
    actual = ran.names["rings"](points).reshape(200, 200)
    drawn = figure()
    axes = drawn.subplots()
    axes.imshow(classes, cmap="viridis", extent=(-2.4, 2.4, -2.4, 2.4), origin="lower")
    levels = [0.5, 1.5, 2.5]
    axes.contour(
        side, side, actual, levels, colors="white", linestyles="--", linewidths=1
    )
    axes.set(title="predicted class; dashed: the rings", xticks=(), yticks=())
    return drawn


def evaluate(ran: Run) -> Any:
    """Confusion matrix of ten digits."""
    ((_, evaluation),) = ran.results("evaluate")
    drawn = evaluation.plot("confusion_matrix")
    drawn.set_dpi(130)
    return drawn


def image_folder(ran: Run) -> Any:
    """Test images with the predicted digits, the wrong ones in red."""
    from PIL import Image

    (((test,), outputs),) = ran.results("predict")
    guesses = np.argmax(outputs, axis=1)
    labels = np.asarray(test.labels)
    wrong = np.flatnonzero(guesses != labels)[:5]
    right = np.flatnonzero(guesses == labels)[: 15 - len(wrong)]
    drawn = figure()
    cells = drawn.subplots(3, 5).flatten()
    with tempfile.TemporaryDirectory() as folder:
        ran.names["make_folder"](Path(folder))
        tests = Path(folder, "test")
        for cell, row in zip(cells, [*wrong, *right], strict=True):
            (path,) = tests.rglob(Path(test.paths[row]).name)
            cell.imshow(Image.open(path), cmap="gray")
            color = "black" if guesses[row] == labels[row] else "red"
            cell.set_title(f"{guesses[row]}", color=color)
            cell.axis("off")
    return drawn


def bigger_than_memory(ran: Run) -> Any:
    """Size of the data, and the memory that a worker may use and used."""
    size, _, peak = ran.lines
    gigabytes = {
        "data": float(size.split()[0]) * 1.073741824,
        "a worker may use": 0.9,
        "a worker used": float(re.search(r"peak was (\S+) MiB", peak)[1]) * 2**20 / 1e9,
    }
    drawn = figure(height=2.4)
    axes = drawn.subplots()
    bars = axes.barh(
        [*gigabytes], [*gigabytes.values()], color=[BLUE, "#BBBBBB", ORANGE]
    )
    axes.bar_label(bars, fmt="%.2f", padding=4)
    axes.set(xlabel="GB", xlim=(0, 4.4))
    axes.invert_yaxis()
    return drawn


def xarray_forecast(ran: Run) -> Any:
    """A map of today, and the map of tomorrow as it was and as it was forecast."""
    import torch
    import xarray as xr

    with tempfile.TemporaryDirectory() as folder:
        ran.names["write_maps"](f"{folder}/maps.zarr")
        stored = xr.open_zarr(f"{folder}/maps.zarr", consolidated=False)
        today, tomorrow = torch.from_numpy(stored.temperature[-2:].to_numpy())
    with torch.no_grad():
        (forecast,) = ran.trainers()[0].model_(today[None])
    maps = {"today": today, "tomorrow": tomorrow, "forecast of tomorrow": forecast}
    drawn = figure()
    for axes, (title, values) in zip(drawn.subplots(3), maps.items(), strict=True):
        axes.imshow(values, cmap="RdBu_r", vmin=-4, vmax=4, origin="lower")
        axes.set_title(title)
        axes.axis("off")
    return drawn


def fashion_mnist(ran: Run) -> Any:
    """Test accuracy of each class."""
    lines = [line for line in ran.lines if " images  accuracy " in line]
    names = [re.split(r"  +", line)[0] for line in lines]
    accuracies = [float(line.split()[-1]) for line in lines]
    drawn = figure(height=3.8)
    axes = drawn.subplots()
    colors = [ORANGE if share == min(accuracies) else BLUE for share in accuracies]
    bars = axes.barh(names, accuracies, color=colors)
    axes.bar_label(bars, fmt="%.2f", padding=4)
    axes.set(xlabel="test accuracy", xlim=(0, 1.15))
    axes.invert_yaxis()
    return drawn


def keras_model(ran: Run) -> Any:
    """Three digits with the predicted probabilities of each class."""
    (((X,), predicted),) = ran.results("predict")
    predicted = np.asarray(predicted)
    doubtful = np.argsort(predicted.max(axis=1))[:1]
    drawn = figure()
    pairs = drawn.subplots(3, 2, width_ratios=(1, 4))
    for (image, bars), row in zip(pairs, [*doubtful, 0, 1], strict=True):
        image.imshow(X[row, ..., 0], cmap="gray_r")
        image.axis("off")
        bars.bar(range(10), predicted[row], color=BLUE)
        bars.set(ylim=(0, 1), xticks=range(10), yticks=(0, 1))
    pairs[0][1].set_title("predicted probabilities")
    return drawn


def transformers_finetune(ran: Run) -> Any:
    """Losses of both trainings, by epoch."""
    drawn = figure()
    titles = ["hidden words", "good or bad"]
    for axes, title, trainer in zip(
        drawn.subplots(1, 2), titles, ran.trainers(), strict=True
    ):
        losses = trainer.history_.column("loss")
        axes.plot(losses, color=BLUE, marker="o")
        axes.set(title=title, xlabel="epoch", ylim=(0, None))
    drawn.axes[0].set_ylabel("loss")
    return drawn


def score_anomalies(ran: Run) -> Any:
    """The digits with the largest losses, fours in color."""
    import torch
    from sklearn.datasets import load_digits

    X, labels = load_digits(return_X_y=True)
    X = torch.tensor(X / 16, dtype=torch.float32)
    with torch.no_grad():
        losses = ((ran.trainers()[0].model_(X) - X) ** 2).mean(dim=1)
    drawn = figure()
    cells = drawn.subplots(3, 6).flatten()
    for cell, row in zip(cells, losses.argsort(descending=True), strict=False):
        cell.imshow(X[row].reshape(8, 8), cmap="gray_r")
        color = ORANGE if labels[row] == 4 else "black"
        cell.set_title(f"{labels[row]}", color=color)
        cell.axis("off")
    return drawn


def own_strategies(ran: Run) -> Any:
    """Density and kilobytes sent, by epoch, and their limits."""
    history = ran.trainers()[0].history_
    drawn = figure()
    density, sent = drawn.subplots(2, 1, sharex=True)
    density.plot(history.column("density"), color=BLUE)
    density.axhline(0.02, color="#BBBBBB", linestyle="--")
    density.set(title="density; dashed: the chosen share", ylim=(0, 0.03))
    sent.plot(np.cumsum(history.column("sent_bytes")) / 1e3, color=ORANGE)
    sent.axhline(50, color="#BBBBBB", linestyle="--")
    sent.set(title="kB sent; dashed: the budget", xlabel="epoch", ylim=(0, None))
    return drawn


def own_master(ran: Run) -> Any:
    """Losses of the steps of four replicas."""
    steps = ran.trainers()[0].history_.steps
    rows = np.array([(row["replica"], row["step"], row["loss"]) for row in steps])
    drawn = figure()
    axes = drawn.subplots()
    for replica, color in enumerate((BLUE, ORANGE, GREEN, PINK)):
        _, step, loss = rows[rows[:, 0] == replica].T
        axes.plot(step, loss, color=color, label=f"replica {replica}", linewidth=1.5)
    axes.set(title="loss of single steps", xlabel="step", yscale="log")
    axes.legend()
    return drawn


PICTURES = {
    draw.__name__: draw
    for draw in (
        *(digits, dask_array, evaluate, image_folder, bigger_than_memory),
        *(xarray_forecast, fashion_mnist, keras_model, transformers_finetune),
        *(score_anomalies, own_strategies, own_master),
    )
}

# ---- the picture of the landing page

KINDS = {
    "training": BLUE,
    "exchanging": GREEN,
    "waiting": "#E69F00",
    "other": "#999999",
}
KILLED_AFTER, EPOCHS = 3, 10
BINS = 160


def network() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))


def landing_history() -> Any:
    """Train on three workers, of which one is killed, and started again by Dask."""
    import torch
    from dask.distributed import Client

    import daskdl

    class Kill(daskdl.Callback):
        def on_epoch_end(self, row: Any) -> None:
            if row["epoch"] == KILLED_AFTER:
                os.kill(victim, signal.SIGKILL)

    X = torch.randn(60_000, 64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    y = network()(X).argmax(dim=1)
    with Client(n_workers=3, threads_per_worker=1) as client:
        *_, victim = client.run(os.getpid).values()
        trainer = daskdl.Trainer(
            network, "cross_entropy", "sgd", lr=0.05, client=client, callbacks=[Kill()]
        )
        return trainer.fit(X, y, epochs=EPOCHS, validation=0.1)


def kind_of(activity: str) -> str:
    if activity.startswith("wait_"):
        return "waiting"
    return {"compute": "training", "exchange": "exchanging"}.get(activity, "other")


def shares(history: Any, replica: int, edges: Any) -> dict[str, Any]:
    """The share of each interval of time that a replica spends on each kind."""
    spans = [row for row in history.timeline if row["replica"] == replica]
    seconds = {kind: np.zeros(len(edges) - 1) for kind in KINDS}
    for row in spans:
        start, end = row["start"], row["end"]
        within = np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1])
        for activity, spent in row.items():
            if activity not in ("replica", "start", "end"):
                seconds[kind_of(activity)] += spent * within.clip(0) / (end - start)
    return {kind: spent / np.diff(edges) for kind, spent in seconds.items()}


def landing(history: Any, background: str) -> Any:
    """Draw losses over time, and what each replica does."""
    times = np.cumsum(history.column("seconds"))
    edges = np.linspace(0, times[-1], BINS + 1)
    replicas = sorted(history.run.replicas.items())
    drawn = figure(height=4.6)
    drawn.set_facecolor(background)
    losses, lanes = drawn.subplots(2, 1, sharex=True, height_ratios=(3, 4))
    losses.plot(times, history.column("loss"), color=BLUE, label="training")
    losses.plot(times, history.column("val_loss"), color=ORANGE, label="validation")
    losses.set(title="loss", ylim=(0, None))
    losses.legend()
    for lane, (replica, record) in enumerate(replicas):
        bottom = np.full(BINS, -lane, float)
        for kind, share in shares(history, replica, edges).items():
            top = bottom + 0.8 * share
            lanes.bar(
                edges[:-1],
                top - bottom,
                np.diff(edges),
                bottom,
                align="edge",
                color=KINDS[kind],
                label=kind if lane == 0 else None,
            )
            bottom = top
        middle = 0.4 - lane
        if record["joined"] > times[0]:
            lanes.text(record["joined"], middle, "joins ", ha="right", va="center")
        if record["left"] is not None and record["left"] < times[-2]:
            lanes.text(record["left"], middle, " killed", va="center")
    lanes.set_yticks(
        [0.4 - lane for lane in range(len(replicas))],
        [f"replica {replica}" for replica, _ in replicas],
    )
    lanes.set(xlabel="seconds", xlim=(0, times[-1]))
    lanes.tick_params(left=False)
    lanes.spines["left"].set_visible(False)
    handles, labels = lanes.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=len(KINDS))
    for axes in drawn.axes:
        axes.set_facecolor(background)
    return drawn


SCHEMES = {"light": ("#24292f", "#ffffff"), "dark": ("#d5d9e2", "#1e2129")}
COLORED = (
    *("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color"),
    "ytick.color",
)


def main(name: str | None = None, *arguments: str) -> None:
    import matplotlib as mpl

    if name is None:
        PAGE.write_text(page())
    elif name == "landing":
        history = landing_history()
        for scheme, (color, background) in SCHEMES.items():
            with mpl.rc_context(STYLE | dict.fromkeys(COLORED, color)):
                drawn = landing(history, background)
                write(drawn, IMAGES / f"landing_{scheme}.png")
    else:
        with mpl.rc_context(STYLE):
            drawn = PICTURES[name](run(name, *arguments))
            write(drawn, IMAGES / "examples" / f"{name}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
