"""How do I write a threshold, a residual rule and a callback of my own?

Run:  python examples/own_strategies.py
"""

import math
from dataclasses import dataclass

import torch
from dask.distributed import Client, LocalCluster
from sklearn.datasets import load_digits

import daskdl


# --8<-- [start:threshold]
@dataclass(frozen=True)
class LargestShare(daskdl.ThresholdAlgorithm):
    """Send the given share of the parameters, those that moved farthest."""

    share: float = 0.01

    def next_threshold(self, residual, last):
        moved = residual.tensor().abs()
        kept = max(1, round(self.share * len(moved)))
        threshold = moved.topk(kept).values[-1].item()
        return threshold or 1e-6  # 0, if nothing has moved yet, is not allowed


# --8<-- [end:threshold]
# --8<-- [start:residual]
@dataclass(frozen=True)
class ClipAfterWarmUp(daskdl.ResidualPostProcessor):
    """Keep the whole residual at first, and a few quanta of it later."""

    exchanges: int = 50
    multiple: float = 3.0

    def bound(self, exchange, threshold):
        if exchange < self.exchanges:
            return math.inf
        return self.multiple * threshold


# --8<-- [end:residual]
# --8<-- [start:callback]
class Budget(daskdl.Callback):
    """Stop when the replicas have sent more than a given number of bytes."""

    class Over(Exception):
        """Raised by `fit`; `trainer.model_` is then the last agreed model."""

    def __init__(self, size_bytes):
        self.size_bytes = size_bytes
        self.sent_bytes = 0

    def on_epoch_end(self, row):
        self.sent_bytes += row["sent_bytes"]
        if self.sent_bytes > self.size_bytes:
            raise self.Over(f"{self.sent_bytes} of {self.size_bytes} bytes were sent")


# --8<-- [end:callback]
def main():
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype("float32")
    with (
        LocalCluster(n_workers=2, threads_per_worker=1) as cluster,
        Client(cluster) as client,
    ):
        trainer = daskdl.Trainer(
            model=lambda: torch.nn.Sequential(
                torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
            ),
            loss=torch.nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
            master=daskdl.GradientSharing(
                threshold=LargestShare(0.02),
                residual=ClipAfterWarmUp(),
                exchange_every=2,
            ),
            client=client,
            callbacks=[Budget(50_000)],
        )
        try:
            trainer.fit(X[:1400], y[:1400], epochs=30, validation=(X[1400:], y[1400:]))
        except Budget.Over as over:
            print(f"stopped: {over}")
        score = trainer.evaluate(X[1400:], y[1400:])

    densities = trainer.history_.column("density")
    mean = sum(densities) / len(densities)
    print(f"{len(densities)} epochs, mean density {mean:.4f}")
    print(f"test accuracy {score['accuracy']:.4f}")


if __name__ == "__main__":
    main()
