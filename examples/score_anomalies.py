"""Which examples do not belong?

This autoencoder is trained on all digits except fours. It cannot reconstruct what it
has not seen, so fours have the largest losses.

Run:  python examples/score_anomalies.py [digit]
"""

import sys
from collections import Counter

import dask.array as da
import numpy as np
import torch
from dask.distributed import Client, LocalCluster
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from torch import nn

import daskdl

EPOCHS = 30
TOP = 50
SHADES = " .:-=+*#%@"


def autoencoder():
    """Encode 64 pixels as 10 numbers, and decode them."""
    return nn.Sequential(
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
        nn.Linear(10, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.Sigmoid(),
    )


def picture(pixels):
    """Draw an image of 8 by 8 pixels as text."""
    shades = np.round(pixels * (len(SHADES) - 1)).astype(int).reshape(8, 8)
    return "\n".join("".join(2 * SHADES[shade] for shade in row) for row in shades)


def main():
    odd = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    X, digits = load_digits(return_X_y=True)
    X = (X / 16).astype("float32")
    train, X_test, train_digits, test_digits = train_test_split(
        X, digits, test_size=0.3, stratify=digits, random_state=0
    )
    known = train[train_digits != odd]
    with (
        LocalCluster(n_workers=2, threads_per_worker=1) as cluster,
        Client(cluster) as client,
    ):
        trainer = daskdl.Trainer(
            model=autoencoder,
            loss=nn.MSELoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=2, momentum=0.9),
            client=client,
        )
        trainer.fit(known, known, epochs=EPOCHS, batch_size=32)

        blocks = da.from_array(X_test, chunks=(90, 64))
        lazy = trainer.score_examples(blocks, blocks)  # computes each block where it is
        scores = lazy.compute()

    worst = np.argsort(-scores)[:TOP]
    is_odd = test_digits == odd
    print(
        f"{len(known)} digits without {odd}, {is_odd.sum()} of {len(X_test)} are {odd}"
    )
    print(f"mean loss of {odd}: {scores[is_odd].mean():.4f}")
    print(f"mean loss of others: {scores[~is_odd].mean():.4f}")
    counts = Counter(test_digits[worst].tolist())
    print(f"digits of the {TOP} largest losses: {dict(counts.most_common())}")
    print(f"row {worst[0]}, a {test_digits[worst[0]]}, has the largest loss:")
    print(picture(X_test[worst[0]]))
    print(f"ROC AUC {roc_auc_score(is_odd, scores):.4f}")


if __name__ == "__main__":
    main()
