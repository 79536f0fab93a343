import numba.core.event
import numpy as np
import torch

from daskdl import codec, kernels
from daskdl.channel.warmup import Warming, warm_up


class Compiled(numba.core.event.Listener):
    """Names what numba compiles, or loads from its cache, for a first call."""

    def __init__(self):
        self.names = []

    def on_start(self, event):
        self.names.append(event.data["dispatcher"].py_func.__name__)

    def on_end(self, event):
        pass


def test_afterwards_an_exchange_compiles_nothing():
    warm_up()
    local_N, shared_N = torch.zeros(10_000), torch.zeros(10_000, dtype=torch.int32)
    local_N[::50] = 1.0
    listener = Compiled()

    with numba.core.event.install_listener("numba:compile", listener):
        entries_K = kernels.find(local_N, shared_N, 2**20, 2.0**-24)
        stamp = codec.Stamp(1, 0, 1, 1)
        frame = codec.encode(stamp, 10_000, 2.0**-4, entries_K.numpy())
        kernels.take_(local_N, shared_N, entries_K, 2**20, 2.0**-24)
        received_K = kernels.from_counts(np.array(codec.decode(frame).entries_K))
        kernels.apply_(local_N, shared_N, received_K, 2**20, 2.0**-24)

    assert len(entries_K) == 200
    assert listener.names == []


def test_it_is_begun_once(monkeypatch):
    calls = []
    monkeypatch.setattr("daskdl.channel.warmup.warm_up", lambda: calls.append(1))
    warming = Warming()

    warming.begin()
    warming.begin()
    warming.wait()

    assert calls == [1]


def test_waiting_for_what_was_not_begun_returns():
    Warming().wait()
