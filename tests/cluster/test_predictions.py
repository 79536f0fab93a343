"""Predictions on a cluster: the copies of the model, and workers that die."""

import json
import os
import signal

import cloudpickle
import dask.array as da
import numpy as np
import pytest
import torch
from distributed import get_task_stream
from distributed.utils_test import poll_for
from torch import nn

import daskdl
from tests.support.clusters import Tracked, cluster_of, still_left_behind

ROWS = 240
X = np.arange(2.0 * ROWS, dtype=np.float32).reshape(ROWS, 2)


def lazy():
    return da.from_array(X, chunks=(20, 2))


def copies_there(name):
    """The number of different weights of modules of a class in this process."""
    return len({module.weight.data_ptr() for module in Tracked.held(name)})


def models_of(client):
    """The keys of models on a cluster, or of their blocks, and who holds each."""
    return {
        key: holders
        for key, holders in client.who_has().items()
        if str(key).startswith("daskdl-model-") and "block" not in str(key)
    }


def model_of(client):
    """The key of the only model on a cluster, and the workers that hold it."""
    ((key, holders),) = models_of(client).items()
    return key, holders


def test_rows_in_memory_are_sent_in_a_few_parts_per_thread(client):
    with get_task_stream(client) as stream:
        outputs = daskdl.predict(nn.Identity(), X, client=client, batch_size=2)

    assert type(outputs) is np.ndarray
    np.testing.assert_array_equal(outputs, X)
    threads = sum(client.nthreads().values())
    assert threads < len(stream.data) <= 4 * threads
    assert still_left_behind(client) == {}


def test_each_worker_gets_the_model_once_and_drops_it_with_the_result(client):
    class Wide(Tracked, nn.Linear):
        """200 kB."""

    model = Wide(2, 20_000)
    output = daskdl.predict(model, lazy(), client=client)[:, 0]
    graph = len(cloudpickle.dumps(dict(output.dask)))

    done = client.compute(output)
    np.testing.assert_allclose(
        done.result(), X @ model.weight[0].detach().numpy() + model.bias[0].item(), 1e-4
    )

    key, _ = model_of(client)

    def arrivals(dask_worker):
        log = dask_worker.transfer_incoming_log
        return sum(key in transfer["keys"] for transfer in log)

    assert graph < 100_000  # no weights in there
    assert max(client.run(arrivals).values()) <= 1
    assert max(client.run(copies_there, "Wide").values()) == 1
    del output, done
    assert still_left_behind(client) == {}
    assert set(client.run(copies_there, "Wide").values()) == {0}


def test_a_large_model_gives_no_warning_about_a_large_graph(client):
    model = nn.Linear(2, 1_600_000, bias=False)  # 12.8 MB; Dask warns at 10 MB

    output = daskdl.predict(model, da.from_array(X[:4], chunks=(2, 2)), client=client)

    assert client.compute(output[:, :2]).result().shape == (4, 2)


def test_each_worker_has_a_block_of_a_large_model_to_pass_on():
    model = nn.Linear(2, 2**19, bias=False)  # 4 MiB

    with cluster_of(4, processes=False) as client:
        rows = da.from_array(X[:4], chunks=(1, 2))
        output = daskdl.predict(model, rows, client=client)

        def all_made():
            held = models_of(client).values()
            return len(held) == 4 and all(held)

        poll_for(all_made, timeout=30)
        places = [worker for (worker,) in models_of(client).values()]
        values = client.compute(output[:, -2:]).result()
        workers = sorted(client.nthreads())
        del output

    assert sorted(places) == workers
    weight = model.weight[-2:].detach().numpy()
    np.testing.assert_allclose(values, X[:4] @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_lazy_result_survives_the_workers_that_hold_the_model(three):
    output = daskdl.predict(nn.Linear(2, 1), lazy(), client=three)
    before = three.compute(output[:20]).result()
    _, holders = model_of(three)
    pids, there = three.run(os.getpid), set(three.nthreads())

    for address in holders:
        os.kill(pids[address], signal.SIGKILL)
    poll_for(lambda: set(three.nthreads()) - there, timeout=60)
    newcomers = sorted(set(three.nthreads()) - there)
    after = three.compute(output).result()
    last = three.compute(output[-20:], workers=newcomers).result()

    assert len(after) == ROWS
    np.testing.assert_array_equal(after[-20:], last)
    np.testing.assert_array_equal(after[:20], before)
    del output


@pytest.mark.slow
def test_a_partition_of_a_dead_worker_is_computed_by_another(three, tmp_path):
    flag = str(tmp_path / "flag")

    class Ending(nn.Module):
        def forward(self, x):
            if x.max() > 300 and not os.path.exists(flag):
                open(flag, "w").close()
                os._exit(1)
            return 2 * x

    outputs = daskdl.predict(Ending(), lazy(), client=three)

    values = three.compute(outputs).result()
    assert os.path.exists(flag)
    np.testing.assert_array_equal(values, 2 * X)
    del outputs


def test_threads_of_a_worker_share_the_weights_and_leave_the_rows_alone():
    class Lone(Tracked):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x.add_(self.weight)

    with cluster_of(1, processes=False, threads_per_worker=4) as client:
        model, before = Lone(), X.copy()
        output = daskdl.predict(model, lazy(), client=client)
        small = daskdl.predict(model, X, client=client)

        outputs = client.compute(output).result()

        assert copies_there("Lone") == 2  # the user's own, and the worker's
        np.testing.assert_array_equal(outputs, before + 1)
        np.testing.assert_array_equal(small, before + 1)
        np.testing.assert_array_equal(X, before)
        del output
        assert still_left_behind(client) == {}
        assert copies_there("Lone") == 1


def test_the_workers_write_outputs_of_files_with_their_keys(client, tmp_path):
    for number in range(6):
        np.save(tmp_path / f"{number}.npy", X[40 * number : 40 * (number + 1)])

    bag = daskdl.predict(
        *(nn.Identity(), f"{tmp_path}/*.npy"), client=client, keyed=True
    )
    lines = bag.map(lambda pair: json.dumps([*pair[0], pair[1].tolist()]))
    written = client.compute(
        lines.to_textfiles(f"{tmp_path}/out/*.jsonl", compute=False)
    )
    client.gather(written)

    rows = [
        json.loads(line)
        for path in sorted((tmp_path / "out").iterdir())
        for line in path.read_text().splitlines()
    ]
    assert rows == [
        [f"{tmp_path}/{i // 40}.npy", i % 40, X[i].tolist()] for i in range(ROWS)
    ]
    del bag, lines, written
    assert still_left_behind(client) == {}
