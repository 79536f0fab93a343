"""How do I train on SLURM jobs that end before the training does?

This example trains on two jobs at a time. Before its time is over, a job hands its work
to the other one, and another job is submitted. If none is left, or this program ends,
run it again: it goes on from the last checkpoint.

Needs dask-jobqueue, and a folder that the jobs can reach.

Run:  python examples/slurm.py [folder]
"""

import sys

import torch
from dask.distributed import Client
from dask_jobqueue import SLURMCluster
from sklearn.datasets import load_digits
from torch import nn

import daskdl


def network():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def main(folder):
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype("float32")
    with (
        SLURMCluster(
            cores=1,
            memory="2GB",
            walltime="00:30:00",
            worker_extra_args=["--lifetime", "25m", "--lifetime-stagger", "4m"],
            log_directory=f"{folder}/logs",
        ) as cluster,
        Client(cluster) as client,
    ):
        # Unlike `scale`, `adapt` submits a job again whose time is over.
        cluster.adapt(minimum_jobs=2, maximum_jobs=2)
        client.wait_for_workers(1)
        trainer = daskdl.Trainer(
            model=network,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
            client=client,
            callbacks=[daskdl.Checkpoint(f"{folder}/checkpoints")],
        )
        trainer.fit(X, y, epochs=30, batch_size=32, resume=True)
        print(f"training accuracy {trainer.evaluate(X, y)['accuracy']:.4f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "run")
