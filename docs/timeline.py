"""Draw the picture of the README: the timeline of a fit in which a worker dies.

The fit runs on three worker processes. One is killed after the second epoch; Dask
starts another one in its place, which joins. The picture is the timeline of the fit's
report, taken by Chromium.

Run:  python docs/timeline.py
"""

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from dask.distributed import Client
from torch import nn

import daskdl

PICTURE = Path(__file__).parent / "images" / "timeline.png"
WIDTH, HEIGHT = 900, 255  # pixels; without the caption


class Kill(daskdl.Callback):
    """Kills a worker at the end of the second epoch."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def on_epoch_end(self, row: Mapping[str, Any]) -> None:
        if row["epoch"] == 1:
            processes = self.client.run(os.getpid)
            os.kill(list(processes.values())[-1], signal.SIGKILL)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, 2),
    )  # fmt: skip


def main() -> None:
    X = np.random.default_rng(0).normal(size=(60_000, 64)).astype("float32")
    y = (X[:, 0] * X[:, 1] > 0).astype("int64")
    with (
        tempfile.TemporaryDirectory() as folder,
        Client(n_workers=3, threads_per_worker=1, dashboard_address=":0") as client,
    ):
        trainer = daskdl.Trainer(
            network, "cross_entropy", "sgd", lr=0.05, client=client,
            callbacks=Kill(client), progress=False,
        )  # fmt: skip
        trainer.fit(X[:600], y[:600])  # without the kill; imports and compiles
        history = trainer.fit(X, y, epochs=8)
        page = Path(folder, "timeline.html")
        history.report(page)
        text = page.read_text()
        head = re.search(r"^.*?<body[^>]*>", text, re.S)[0]
        timeline = re.search(r"<h2>Timeline</h2>(.*?)<h2>", text, re.S)[1]
        page.write_text(f"{head}{timeline}")
        subprocess.run(
            [
                "chromium", "--headless", "--no-sandbox", "--hide-scrollbars",
                f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={PICTURE}",
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
