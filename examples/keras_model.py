"""How do I train a Keras model, and use it in Keras afterwards?

`model.to_json()` of Keras 2 wrote `keras_model.json`; JSON of Keras 3 works too. The
model ends in a softmax, so the loss takes probabilities.

Run:  python examples/keras_model.py
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from dask.distributed import Client
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import daskdl
from daskdl.keras import CrossEntropyOfProbabilities, from_config

JSON = Path(__file__).with_name("keras_model.json")


def main():
    digits = load_digits()
    X = (digits.images[..., np.newaxis] / 16).astype("float32")  # channels last
    # The last digits of the file were written by other people, so split at random.
    X, X_test, y, y_test = train_test_split(
        X, digits.target, test_size=0.2, stratify=digits.target, random_state=0
    )
    model = from_config(JSON)
    print(
        f"{model.name}: {len(model.layers)} layers, {model.count_params()} parameters"
    )

    with Client(n_workers=2, threads_per_worker=1) as client:
        trainer = daskdl.Trainer(
            model=model,
            loss=CrossEntropyOfProbabilities(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
            client=client,
        )
        for row in trainer.fit(X, y, epochs=8, batch_size=32):
            print(f"epoch {row['epoch']}  loss {row['loss']:.4f}")
        print(f"test accuracy {trainer.evaluate(X_test, y_test)['accuracy']:.4f}")
        predicted = trainer.predict(X_test)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.keras"
        trainer.model_.save(path)

        import keras  # on the backend that daskdl chose

        by_keras = keras.saving.load_model(path).predict(X_test, verbose=0)
    print(f"Keras predicts the same: {np.allclose(predicted, by_keras, atol=1e-5)}")


if __name__ == "__main__":
    main()
