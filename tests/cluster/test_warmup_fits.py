"""Warm-up and thresholds by layer on a cluster, and what frames of some MB do there."""

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import AdaptiveThreshold, FailureInjection, FixedThreshold, OptionError
from daskdl.codec import Kind
from tests.support.problems import kept, parameters_of, plain, rows, trainer
from tests.support.promises import check_agreed
from tests.support.recording import Recorded, delivered, records, vector

pytestmark = pytest.mark.slow

X, Y = rows()
LAYERS = {"*.bias": FixedThreshold(1e-3), "*": AdaptiveThreshold(initial=1e-3)}
ROUTINGS = pytest.mark.parametrize("routing", ["plain", "mesh"])
OPTIONS = [
    {"warmup_steps": 6, "exchange_every": 4},
    {"threshold": LAYERS},
    {"threshold": LAYERS, "warmup_steps": 6, "max_staleness": 0},
]
MIB = 2**20


def wide():
    """5.8 million parameters: 23 MB, 5.9 MB in eight bits."""
    return nn.Sequential(nn.Linear(20, 2370), nn.Linear(2370, 2400), nn.Linear(2400, 4))


def heavy():
    """1.2 million parameters: in eight bits more than an outbox holds."""
    return nn.Sequential(nn.Linear(20, 48_000), nn.Linear(48_000, 4))


@ROUTINGS
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nothing_is_lost_and_all_agree(client, tmp_path, routing, options):
    master = Recorded(str(tmp_path), kept(routing=routing, **options))
    own = trainer(client, master=master)

    own.fit(X, Y, epochs=3, batch_size=16)

    ends = records(tmp_path, epoch=2)
    expected = ends[0]["start"] + sum(end["progress"] for end in ends.values())
    np.testing.assert_allclose(delivered(own), expected, rtol=0, atol=6e-6)
    for epoch in range(3):
        check_agreed(records(tmp_path, epoch))


@ROUTINGS
def test_runs_in_step_repeat_bit_for_bit(client, routing):
    runs = []
    for _ in range(2):
        master = kept(routing=routing, **OPTIONS[2])
        own = trainer(client, master=master, seed=7)
        history = own.fit(X, Y, epochs=2, batch_size=16)
        runs.append((parameters_of(own.model_), history.column("loss")))

    for name, value in runs[0][0].items():
        np.testing.assert_array_equal(value, runs[1][0][name])
    assert runs[0][1] == runs[1][1]


@pytest.mark.slow
@ROUTINGS
@pytest.mark.parametrize("max_staleness", [0, 8])
def test_frames_of_some_megabytes_go_through(client, tmp_path, routing, max_staleness):
    options = {"routing": routing, "max_staleness": max_staleness, "warmup_steps": 1000}
    master = Recorded(str(tmp_path), kept(**options), atol=4e-6)
    own = trainer(client, model=wide, optimizer=plain, master=master)
    x, y = rows(96)

    [row] = own.fit(x, y, batch_size=8)

    ends = records(tmp_path, epoch=0)
    size = len(ends[0]["start"])
    check_agreed(ends)
    expected = ends[0]["start"] + sum(end["progress"] for end in ends.values())
    np.testing.assert_allclose(delivered(own), expected, rtol=0, atol=8e-6)
    kinds = [kind for end in ends.values() for kind in end["kinds"]]
    assert set(kinds) == {Kind.DENSE8}
    assert 5_700_000 < size < 5_900_000
    assert row["sent_bytes"] <= len(kinds) * (1.02 * size + 64)
    if max_staleness == 0:  # then nothing is put off
        assert (len(kinds), row["withheld"]) == (12, 0)
    assert row["refused_messages"] == 0


@pytest.mark.slow
@ROUTINGS
def test_a_dense_update_that_is_dropped_is_asked_for(client, tmp_path, routing):
    rule = FailureInjection("drop", replicas=[0], steps=[1])
    master = Recorded(str(tmp_path), kept(routing=routing, warmup_steps=4))
    own = trainer(client, model=heavy, optimizer=plain, master=master, callbacks=[rule])

    [row] = own.fit(*rows(96), batch_size=8)

    check_agreed(records(tmp_path, epoch=0))
    assert row["repaired_updates"] > 0


@pytest.mark.slow
def test_a_small_inbox_repeats_runs_in_step(client, monkeypatch):
    monkeypatch.setattr("daskdl.training.fit.INBOX_BYTES", 1)
    models = []
    for _ in range(2):
        own = trainer(client, master=kept(max_staleness=0, warmup_steps=6), seed=7)
        own.fit(X, Y, batch_size=16)
        models.append(vector(own.model_))

    assert torch.equal(*models)


def test_a_mapping_that_does_not_fit_is_told_before_a_worker_is_touched(untouched):
    own = trainer(untouched, master=kept(threshold={"*.bias": FixedThreshold()}))

    with pytest.raises(OptionError, match="no pattern that parameter '0"):
        own.fit(X, Y)
