"""What a training process has in memory, with daskdl and without.

Question: how much memory does daskdl take beside a plain loop of PyTorch's?
Counted:  MiB of a process of its own after it has imported torch and Dask, and after
          a small fit: resident, and those that no other process has (the rest are
          pages of libraries, which all workers of a machine have together).
Run:      python -m benchmarks process-memory
"""

import argparse
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator

from benchmarks.results import Question

WAYS = {
    "a plain loop": 0,
    "a fit, one replica": 1,
    "a fit, two replicas in the process": 2,
}


def measured() -> tuple[float, float]:
    """MiB of this process: resident, and its own."""
    import psutil

    gc.collect()
    found = psutil.Process().memory_full_info()
    return found.rss / 2**20, found.uss / 2**20


def trained(replicas: int) -> Callable[[], None]:
    """What trains 21,000 parameters for a few hundred steps."""
    import distributed  # noqa: F401
    import numpy as np
    import torch
    from torch import nn

    torch.set_num_threads(1)
    x = np.random.default_rng(0).random((4000, 32), np.float32)
    y = np.random.default_rng(1).integers(0, 10, 4000)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))

    def sgd(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]

    def plain() -> None:
        model, loss = make(), nn.CrossEntropyLoss()
        optimizer = sgd(model.parameters())
        for start in range(0, len(x), 32):
            optimizer.zero_grad()
            own = slice(start, start + 32)
            loss(model(torch.from_numpy(x[own])), torch.from_numpy(y[own])).backward()
            optimizer.step()

    def fit() -> None:
        import daskdl

        master = daskdl.GradientSharing(replicas_per_worker=replicas)
        trainer = daskdl.Trainer(
            make, nn.CrossEntropyLoss(), sgd, master=master, client=False
        )
        trainer.fit(x, y, epochs=3)

    return fit if replicas else plain


def rows(_: argparse.Namespace) -> Iterator[dict[str, object]]:
    for name, replicas in WAYS.items():
        program = (
            "from benchmarks.process_memory import measured, trained; "
            f"train = trained({replicas}); before = measured(); train(); "
            "print(*before, *measured())"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        imported, own, after, own_after = map(float, done.stdout.split())
        yield {
            "what": name,
            "resident_mib": after,
            "own_mib": own_after,
            "imported_resident_mib": imported,
            "imported_own_mib": own,
        }


QUESTION = Question(
    "process-memory",
    __doc__,
    lambda parser: None,
    rows,
    {"what": "", "resident_mib": ".0f", "own_mib": ".0f"}
    | {"imported_resident_mib": ".0f", "imported_own_mib": ".0f"},
)
