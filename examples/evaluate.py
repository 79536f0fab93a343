"""How good is my model, class by class?

This example trains on handwritten digits, evaluates the test digits on two workers in
one pass, prints the report, and writes its pictures into a folder.

Run:  python examples/evaluate.py [folder]
"""

import sys
from pathlib import Path

import torch
from dask.distributed import Client, LocalCluster
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import daskdl


def network():
    """One hidden layer, for images of 64 pixels."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "pictures")
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype("float32")
    X_train, X_test, y_train, y_test = train_test_split(
        X, y, test_size=0.4, stratify=y, random_state=0
    )
    with (
        LocalCluster(n_workers=2, threads_per_worker=1) as cluster,
        Client(cluster) as client,
    ):
        trainer = daskdl.Trainer(
            model=network,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            client=client,
            seed=0,
            progress=False,
        )
        trainer.fit(X_train, y_train, epochs=6, batch_size=32)
        evaluation = trainer.evaluate(
            X_test, y_test, metrics=["classification", "calibration"]
        )

    print(evaluation)
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ("confusion_matrix", "roc", "precision_recall", "reliability"):
        evaluation.plot(kind).savefig(folder / f"{kind}.png")
    evaluation.plot().savefig(folder / "all.png")
    (folder / "evaluation.json").write_text(evaluation.to_json())
    print(f"\n{len(list(folder.glob('*.png')))} pictures in {folder}")


if __name__ == "__main__":
    main()
