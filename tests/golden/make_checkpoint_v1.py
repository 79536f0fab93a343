"""What the checkpoints in ``checkpoint_v1/`` are of, and how they were made.

Run ``python -m tests.golden.make_checkpoint_v1``; it writes nothing over what is there.
Later releases must go on from them.
"""

from pathlib import Path

import torch
from torch import nn

import daskdl
from tests.golden.make_trainer_v1 import inputs, labels

FOLDER = Path(__file__).parent / "checkpoint_v1"
EPOCHS = 3  # of these fits, of six steps of each of two replicas


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


MASTERS = {
    "sharing": daskdl.GradientSharing(
        threshold={
            "*.bias": daskdl.FixedThreshold(1e-2),
            "*": daskdl.AdaptiveThreshold(initial=1e-2, max_density=0.05),
        },
        residual=daskdl.ResidualClipping(4.0, 3),
        update_scale="sum",
        max_staleness=0,
        replicas_per_worker=2,
    ),
    "averaging": daskdl.ParameterAveraging(
        frequency=4, average_optimizer=False, outer=nesterov, replicas_per_worker=2
    ),
    "one": daskdl.GradientSharing(),
}
# By folder: the second after the first epoch, the third in the middle of the next one.
WRITTEN = {
    "sharing/checkpoint-000002": "sharing",
    "sharing/checkpoint-000003": "sharing",
    "averaging/checkpoint-000003": "averaging",
    "one/checkpoint-000003": "one",
}


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def trainer(master: str, *callbacks: daskdl.Callback) -> daskdl.Trainer:
    return daskdl.Trainer(
        model,
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        master=MASTERS[master],
        client=False,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        callbacks=[daskdl.EarlyStopping("loss", patience=9), *callbacks],
        progress=False,
    )


def fits(trainer: daskdl.Trainer, epochs: int = EPOCHS, **options) -> None:
    # Not shuffled, as generators may change.
    trainer.fit(
        inputs(), labels(), epochs=epochs, batch_size=4, shuffle=False, **options
    )


def resumed(name: str) -> daskdl.Trainer:
    """What goes on from one of them."""
    fitted = trainer(WRITTEN[name])
    fits(fitted, resume=FOLDER / name)
    return fitted


def main() -> None:
    if FOLDER.exists():
        raise SystemExit(f"{FOLDER} exists, and is kept as it is")
    for master in MASTERS:
        every = "8 steps" if master == "one" else "4 steps"
        # In the second epoch, and the one before.
        rule = daskdl.Checkpoint(FOLDER / master, every, keep_last=3)
        fits(trainer(master, rule), epochs=2)
        for path in (FOLDER / master).iterdir():
            if f"{master}/{path.name}" not in WRITTEN:
                for file in path.iterdir():
                    file.unlink()
                path.rmdir()


if __name__ == "__main__":
    main()
