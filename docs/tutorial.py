"""The code of the tutorial, tutorial.md. Dask's workers import this script."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn, optim
import daskdl
from dask.distributed import Client, LocalCluster


def network():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def optimizer(params):
    return optim.SGD(params, lr=0.1, momentum=0.9)


class Grow(daskdl.Callback):
    """Starts a third worker after the first epoch."""

    def on_epoch_end(self, row):  # in this process
        if row["epoch"] == 0:
            cluster.scale(3)


class UntilThree(daskdl.Callback):
    """Ends the fit when three replicas train."""

    def on_epoch_begin(self, epoch):  # on the workers, in each replica
        self.replicas = epoch.replicas

    def on_step_end(self, step):
        if self.replicas == 3:
            step.stop("the third replica has joined")


if __name__ == "__main__":
    # 1. A loop in one process
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype("float32")
    X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)

    torch.manual_seed(0)
    model, loss = network(), nn.CrossEntropyLoss()
    steps = optimizer(model.parameters())
    rows = torch.utils.data.TensorDataset(
        torch.from_numpy(X_train), torch.from_numpy(y_train)
    )
    for epoch in range(5):
        for x, label in torch.utils.data.DataLoader(rows, batch_size=32, shuffle=True):
            steps.zero_grad()
            loss(model(x), label).backward()
            steps.step()
    right = model(torch.from_numpy(X_test)).argmax(1) == torch.from_numpy(y_test)
    print(f"accuracy {right.float().mean():.3f}")

    # 2. A trainer instead of the loop
    trainer = daskdl.Trainer(network, loss, optimizer, client=False)
    history = trainer.fit(X_train, y_train, epochs=5, validation=(X_test, y_test))
    print(np.round(history.column("val_accuracy"), 3))

    # 3. Two processes
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    client = Client(cluster)

    trainer = daskdl.Trainer(network, loss, optimizer, client=client)
    history = trainer.fit(X_train, y_train, epochs=5, validation=(X_test, y_test))
    print(history.column("replicas"), np.round(history.column("val_accuracy"), 3))
    sent, dense = history[-1]["sent_bytes"], history[-1]["dense_bytes"]
    print(f"sent {sent / 1e3:.0f} kB; whole updates would be {dense / 1e3:.0f} kB")

    # 4. Data that the client never sees
    folder = Path(tempfile.mkdtemp())
    for part in range(8):
        np.savez(folder / f"{part}.npz", x=X_train[part::8], y=y_train[part::8])

    trainer = daskdl.Trainer(network, loss, optimizer, client=client)
    trainer.fit(f"{folder}/*.npz", epochs=5)
    print(f"accuracy {trainer.evaluate(X_test, y_test)['accuracy']:.3f}")

    # 5. Early stopping, saving, resuming
    callbacks = [
        daskdl.EarlyStopping(patience=3),
        daskdl.Checkpoint(folder / "checkpoints"),
    ]
    trainer = daskdl.Trainer(network, loss, optimizer, client=client, callbacks=callbacks)
    data = f"{folder}/*.npz"
    trainer.fit(data, epochs=4, validation=(X_test, y_test))

    # In another process, tomorrow: `epochs` includes those of the checkpoint.
    trainer = daskdl.Trainer(network, loss, optimizer, client=client, callbacks=callbacks)
    history = trainer.fit(data, epochs=6, validation=(X_test, y_test), resume=True)
    print(history.column("epoch"))

    trainer.history_.report(folder / "run.html")  # curves, and what each replica did
    trainer.save(folder / "digits")
    again = daskdl.Trainer.load(folder / "digits", model=network, optimizer=optimizer)

    # 6. A cluster that grows
    callbacks = [Grow(), UntilThree()]
    trainer = daskdl.Trainer(network, loss, optimizer, client=client, callbacks=callbacks)
    history = trainer.fit(f"{folder}/*.npz", epochs=10_000)
    replicas = history.column("replicas")
    print(f"{replicas[0]} replicas in the first epoch, {replicas[-1]} in the last")
    client.close()
    cluster.close()
