"""Replicas that share a device, each with a stream of its own."""

import threading

import pytest
import torch

from daskdl import GradientSharing, process_settings
from daskdl.process_settings import device_for
from tests.support.devices import needs_cuda
from tests.support.problems import rows, trainer

X, Y = rows()


@needs_cuda
def test_replicas_in_threads_have_streams_of_their_own(device, monkeypatch):
    monkeypatch.setattr(process_settings, "separate_streams", True)
    streams, all_there = (
        [torch.cuda.default_stream(device)],
        threading.Barrier(2, timeout=30),
    )

    def enter():
        with device_for(str(device)) as chosen:
            streams.append(torch.cuda.current_stream(chosen))
            all_there.wait()

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert len({stream.cuda_stream for stream in streams}) == 3
    assert torch.cuda.current_stream(device) == streams[0]


@pytest.mark.parametrize("apply", ["eager", "strict"])
def test_with_streams_of_their_own_replicas_end_with_the_same_bits(
    device, apply, monkeypatch
):
    models = []
    for separate in (False, True):
        monkeypatch.setattr(process_settings, "separate_streams", separate)
        master = GradientSharing(replicas_per_worker=2, max_staleness=0, apply=apply)
        fitted = trainer(False, device=device, master=master)
        fitted.fit(X, Y, epochs=2, batch_size=8)
        models.append(fitted.model_.state_dict())

    assert fitted.history_[-1]["sent_bytes"] > 0
    for name, parameter in models[0].items():
        assert torch.equal(parameter, models[1][name]), name
