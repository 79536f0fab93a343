"""How do I track fits with Weights & Biases?

A callback on the client reports each epoch, here offline. Needs wandb.

Run:  python examples/wandb_tracking.py [folder]
"""

import sys

import torch
import wandb

import daskdl


# --8<-- [start:callback]
class WandB(daskdl.Callback):
    """Runs on the client: one run of Weights & Biases for each fit."""

    def __init__(self, **options):
        self.options = options  # of `wandb.init`

    def on_fit_begin(self, fit):
        options = {"name": fit.name, **self.options}
        self.run = wandb.init(config=fit._asdict(), **options)

    def on_epoch_end(self, row):
        self.run.log(dict(row), step=row["epoch"])

    def on_fit_end(self, end):
        self.run.config["options"] = dict(end.history.run.options)
        self.run.finish(exit_code=0 if end.error is None else 1)


# --8<-- [end:callback]
def main(folder: str) -> None:
    X = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
    y = (X.sum(dim=1) > 0).long()
    tracker = WandB(mode="offline", dir=folder, project="daskdl")
    trainer = daskdl.Trainer(
        torch.nn.Linear(8, 2),
        torch.nn.CrossEntropyLoss(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        client=False,
        callbacks=[tracker],
        progress=False,
    )
    trainer.fit(X, y, epochs=3, validation=(X, y))
    print(f"val_loss {trainer.history_[-1]['val_loss']:.2f}, in {tracker.run.dir}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
