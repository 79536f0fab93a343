"""What the save in ``trainer_v1/`` holds, and how it was made.

Call `main` of the imported module (a model of ``__main__`` has no name in a save); it
writes nothing over what is there.
Later releases must read it.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn

import daskdl
from daskdl.data import Normalization, Standardize

FOLDER = Path(__file__).parent / "trainer_v1"
MASTER = daskdl.GradientSharing(
    threshold={
        "*.bias": daskdl.FixedThreshold(1e-2),
        "*": daskdl.AdaptiveThreshold(initial=1e-2, max_density=0.05),
    },
    residual=daskdl.ResidualClipping(4.0, 3),
    update_scale="sum",
    max_staleness=0,
    replicas_per_worker=2,
)


def inputs(rows=48):
    """Rows of three numbers; not random, as generators may change."""
    return np.sin(np.arange(3.0 * rows, dtype=np.float32)).reshape(rows, 3)


def labels(rows=48):
    return (inputs(rows).sum(axis=1) > 0).astype(np.int64)


def normalizer() -> Normalization:
    return Standardize().fit(inputs(), client=False)


def model():
    return nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)
    )


def fitted() -> daskdl.Trainer:
    trainer = daskdl.Trainer(
        model,
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.5])),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        master=MASTER,
        client=False,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        telemetry_every=1,
        transform=normalizer(),
        progress=False,
    )
    trainer.fit(inputs(), labels(), epochs=2, batch_size=8)
    return trainer


def main() -> None:
    if FOLDER.exists():
        raise SystemExit(f"{FOLDER} exists, and is kept as it is")
    fitted().save(FOLDER)
