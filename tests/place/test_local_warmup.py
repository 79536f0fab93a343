"""Warm-up and thresholds by layer among threads: the promises, and what is seen."""

import numpy as np
import pytest

from daskdl import AdaptiveThreshold, FixedThreshold, OptionError
from daskdl.codec import Kind
from tests.support.problems import kept, mlp, parameters_of, rows, trainer
from tests.support.recording import Recorded, delivered, records, vector

X, Y = rows()
LAYERS = {"*.bias": FixedThreshold(1e-3), "*": AdaptiveThreshold(initial=1e-3)}
OPTIONS = [
    {"warmup_steps": 6},
    {"warmup_steps": 6, "exchange_every": 4},
    {"warmup_steps": 6, "max_staleness": 0},
    {"threshold": LAYERS},
    {"threshold": LAYERS, "max_staleness": 0},
    {"threshold": LAYERS, "warmup_steps": 6, "max_staleness": None},
]


def shared_out(replicas=3, **options):
    """Sharing among so many threads."""
    return kept(replicas_per_worker=replicas, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nothing_is_lost_and_all_agree(tmp_path, options):
    own = trainer(False, master=Recorded(str(tmp_path), shared_out(**options)))

    own.fit(X, Y, epochs=3, batch_size=8)

    ends = records(tmp_path, epoch=2)
    moved = [end["progress"] for end in ends.values()]
    expected = ends[0]["start"] + sum(moved)
    np.testing.assert_allclose(delivered(own), expected, rtol=0, atol=6e-6)
    for epoch in range(3):
        for end in records(tmp_path, epoch).values():
            np.testing.assert_array_equal(end["shared"], end["expected"])
            np.testing.assert_array_equal(
                end["shared"], records(tmp_path, epoch)[0]["shared"]
            )


@pytest.mark.parametrize("options", [OPTIONS[2], OPTIONS[4]], ids=str)
def test_runs_in_step_repeat_bit_for_bit(options):
    runs = []
    for _ in range(2):
        own = trainer(False, master=shared_out(**options), seed=7)
        history = own.fit(X, Y, epochs=2, batch_size=16)
        runs.append((parameters_of(own.model_), history.column("loss")))

    for name, value in runs[0][0].items():
        np.testing.assert_array_equal(value, runs[1][0][name])
    assert runs[0][1] == runs[1][1]


def test_a_small_inbox_changes_no_run_in_step_that_it_is_large_enough_for(monkeypatch):
    """What is folded depends on what a step sends, not on when it comes."""
    monkeypatch.setattr(
        "daskdl.training.fit.INBOX_BYTES", 4 * 804
    )  # one of two that come
    runs = []
    for _ in range(2):
        master = shared_out(max_staleness=0, warmup_steps=1000)
        own = trainer(False, master=master, seed=7)
        history = own.fit(X, Y, epochs=2, batch_size=16)
        runs.append((vector(own.model_).tolist(), history.column("folds")))

    assert runs[0] == runs[1]
    assert min(runs[0][1]) > 0


def test_the_first_steps_of_a_trainer_are_sent_in_eight_bits(tmp_path):
    master = shared_out(2, max_staleness=0, warmup_steps=20)
    own = trainer(False, master=Recorded(str(tmp_path), master))

    kinds = []
    for _ in range(2):
        own.fit(X, Y, batch_size=16)  # 15 steps of each replica
        kinds.append([records(tmp_path, 0)[r]["kinds"].tolist() for r in (0, 1)])

    assert kinds[0] == [[Kind.DENSE8] * 15] * 2
    for second in kinds[1]:
        assert second[:5] == [Kind.DENSE8] * 5
        assert Kind.DENSE8 not in second[5:]
        assert len(second) > 10


def test_a_warm_up_is_dense_in_the_history():
    own = trainer(False, master=shared_out(2, warmup_steps=1000))

    [row] = own.fit(X, Y, batch_size=16)

    assert (row["density"], row["clipped"]) == (1.0, 0.0)
    assert row["sent_bytes"] < row["dense_bytes"] / 3


def test_one_replica_sends_nothing_and_is_plain_pytorch():
    models = []
    for options in ({}, {"warmup_steps": 9, "threshold": LAYERS}):
        own = trainer(False, master=shared_out(1, **options), seed=3)
        history = own.fit(X, Y, batch_size=16)
        models.append(vector(own.model_).tolist())

    assert models[0] == models[1]
    assert history.column("sent_bytes") == [0]


def test_each_layer_keeps_a_threshold_from_fit_to_fit():
    mapping = {
        "0.*": AdaptiveThreshold(initial=1e-3, min_density=1, max_density=1, decay=0.9),
        "*": FixedThreshold(1e-2),
    }
    own = trainer(False, master=shared_out(2, threshold=mapping, max_staleness=0))

    own.fit(X, Y, batch_size=16)
    first = own._state.compression
    own.fit(X, Y, batch_size=16)

    assert list(first.sent) == ["0.*", "*"]
    assert first.sent["*"].threshold == pytest.approx(1e-2)
    assert (
        own._state.compression.sent["0.*"].threshold
        < first.sent["0.*"].threshold
        < 1e-3
    )
    assert (first.steps, own._state.compression.steps) == (15, 30)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"*.bias": FixedThreshold()}, "no pattern that parameter '0.weight' matches"),
        ({"3.*": FixedThreshold(), **LAYERS}, "pattern '3.*' matches no trainable"),
    ],
    ids=["parameter", "pattern"],
)
def test_a_mapping_that_does_not_fit_is_told_before_anything_starts(mapping, message):
    own = trainer(False, model=mlp, master=shared_out(threshold=mapping))

    with pytest.raises(OptionError, match=message):
        own.fit(X, Y)

    assert not hasattr(own, "model_")
