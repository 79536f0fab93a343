"""A lazy array of four times what a worker may use is trained on within that.

A worker with torch, numba and one step made has 522 MB before there are any data, and
Dask pauses a worker at 80 % of its limit: it is 900 MB. Blocks are of one number,
because random ones take longer to make than to train on; each has another.
"""

import os

import dask.array as da
import numpy as np
import pytest
import torch
from dask.utils import parse_bytes
from torch import nn

from daskdl import Trainer
from tests.support.clusters import cluster_of
from tests.support.recording import peak_bytes
from tests.support.watched import note, notes

pytestmark = pytest.mark.slow

LIMIT, TIMES, EPOCHS = "900MB", 4, 2
ROWS, FEATURES = 1024, 2000  # of a block: 8 MB
BLOCKS = TIMES * parse_bytes(LIMIT) // (4 * ROWS * FEATURES)


def status_changes(client):
    """What the scheduler was told of its workers: running, paused, running again."""
    topics = [client.get_events(worker) for worker in client.nthreads()]
    told = [event for topic in topics for _, event in topic]
    return [event for event in told if event["action"] == "worker-status-change"]


def block(folder):
    def make(block_info):
        number = block_info[None]["chunk-location"][0]
        note(folder, "made", block=number)
        return np.full((ROWS, FEATURES), number / BLOCKS, np.float32)

    return make


@pytest.mark.timeout(180)
def test_no_worker_is_paused_or_killed(tmp_path, capsys, record_property):
    folder = str(tmp_path)
    x = da.map_blocks(
        block(folder), chunks=((ROWS,) * BLOCKS, (FEATURES,)), dtype=np.float32
    )
    y = da.zeros(x.shape[0], chunks=ROWS, dtype=np.int64)
    fitted = Trainer(
        model=lambda: nn.Linear(FEATURES, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        progress=False,
    )

    with cluster_of(2, memory_limit=LIMIT) as client:
        pids, before = client.run(os.getpid), status_changes(client)
        fitted.client = client
        history = fitted.fit(x, y, epochs=EPOCHS, batch_size=256)
        peaks = client.run(peak_bytes)
        assert client.run(os.getpid) == pids  # nobody was killed
        assert status_changes(client) == before

    assert x.nbytes >= 0.98 * TIMES * parse_bytes(LIMIT)
    assert history.column("examples") == [BLOCKS * ROWS] * EPOCHS
    blocks = [line["block"] for line in notes(folder, "made")]
    assert set(blocks) == set(range(BLOCKS))
    # At the end of an epoch one replica takes what the other has reserved, or shares.
    assert len(blocks) <= EPOCHS * (BLOCKS + 2)
    assert max(peaks.values()) < parse_bytes(LIMIT)
    record_property("peak_bytes", max(peaks.values()))
    with capsys.disabled():
        print(  # noqa: T201 - what was asked for
            f"\n{x.nbytes / 1e6:.0f} MB through workers of {LIMIT}: peak RSS "
            f"{', '.join(f'{peak / 1e6:.0f} MB' for peak in peaks.values())}"
        )
