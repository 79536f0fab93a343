"""Replicas that share a device, each with a stream of its own."""

import threading

import pytest
import torch

from daskdl import process_settings
from daskdl.process_settings import device_for
from tests.support.devices import needs_cuda
from tests.support.recording import parameters_in_step


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
    ends = []
    for separate in (False, True):
        monkeypatch.setattr(process_settings, "separate_streams", separate)
        ends.append(parameters_in_step(device, apply))

    assert torch.equal(*ends)
