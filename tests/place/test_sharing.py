"""Gradient sharing among threads: nothing is lost, all agree; its options."""

import functools
import time

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import (
    AdaptiveThreshold,
    Callback,
    FixedThreshold,
    GradientSharing,
    ResidualClipping,
)
from daskdl.codec import Kind
from tests.support import promises
from tests.support.problems import (
    SIZE,
    kept,
    mlp,
    parameters_of,
    plain,
    rows,
    start_of,
    trainer,
)
from tests.support.promises import Place
from tests.support.recording import (
    ATOL,
    Recorded,
    check_barrier,
    delivered,
    records,
    vector,
)

X, Y = rows()


@pytest.fixture
def place():
    """Several replicas among threads of this process."""
    return Place(False, replicas=3, per_worker=3)


@pytest.fixture
def lone(one_thread):
    """One replica, with one thread of torch."""
    return Place(False, replicas=1)


LAYERS = {"*.bias": FixedThreshold(1e-3), "*": AdaptiveThreshold(initial=1e-3)}
OPTIONS = [
    {},
    {"exchange_every": 3},
    {"max_staleness": 0},
    {"max_staleness": None},
    {"warmup_steps": 6},
    {"warmup_steps": 6, "exchange_every": 4},
    {"warmup_steps": 6, "max_staleness": 0},
    {"threshold": LAYERS},
    {"threshold": LAYERS, "max_staleness": 0},
    {"threshold": LAYERS, "warmup_steps": 6, "max_staleness": None},
    {"warmup_steps": 10**6},
    {"warmup_steps": 10**6, "max_staleness": 0},
    {"momentum": 0.75},
    {"momentum": 0.5, "warmup_steps": 6, "threshold": LAYERS, "max_staleness": 0},
]


class TestConservation(promises.Conservation):
    atol = ATOL

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_at_every_step_and_at_the_end(self, place, tmp_path, options):
        super().test_at_every_step_and_at_the_end(place, tmp_path, options)

        for epoch in range(3):
            check_barrier(records(tmp_path, epoch))


class TestAgreement(promises.Agreement):
    def test_nobody_is_further_ahead_than_allowed(self, place, tmp_path):
        master = Recorded(str(tmp_path), place.sharing(max_staleness=2))

        place.trainer(master=master).fit(X, Y, epochs=2, batch_size=8)

        leads = np.concatenate([e["leads"] for e in records(tmp_path, 1).values()])
        assert len(leads) > 50
        assert leads.max() <= 2


class TestFitAgain(promises.FitAgain):
    @pytest.fixture
    def place(self):
        return Place(False, replicas=2, per_worker=2)


def shared_out(replicas=3, **options):
    """Return a master of some replicas among threads."""
    return kept(replicas_per_worker=replicas, **options)


IN_STEP = [options for options in OPTIONS if options.get("max_staleness") == 0]


@pytest.mark.parametrize("options", IN_STEP, ids=str)
def test_lockstep_runs_repeat_bit_for_bit(options):
    runs = []
    for _ in range(2):
        fitted = trainer(False, master=shared_out(**options), seed=7)
        history = fitted.fit(X, Y, epochs=2, batch_size=16)
        runs.append((parameters_of(fitted.model_), history.column("loss")))

    for name, value in runs[0][0].items():
        np.testing.assert_array_equal(value, runs[1][0][name])
    assert runs[0][1] == runs[1][1]


def test_strict_sharing_with_momentum_is_the_heavy_ball_method():
    x, y = rows(count=64)
    options = {"max_staleness": 0, "apply": "strict", "warmup_steps": 10**6}
    model, shared = mlp(), {}
    for momentum in (0.0, 0.75):
        master = shared_out(2, momentum=momentum, **options)
        optimizer = functools.partial(torch.optim.SGD, lr=0.2)
        fitted = trainer(False, model=model, master=master, optimizer=optimizer)
        fitted.fit(x, y, epochs=12, batch_size=32)  # one step of each is all rows
        shared[momentum] = vector(fitted.model_)

    heavy_ball = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.75)
    for _ in range(12):
        heavy_ball.zero_grad()
        nn.CrossEntropyLoss()(model(torch.tensor(x)), torch.tensor(y)).backward()
        heavy_ball.step()

    apart = (shared[0.75] - vector(model)).norm()  # eight bits round
    assert apart < 0.02 * (shared[0.0] - vector(model)).norm()


class Slowed(Callback):
    """Makes the steps of one replica longer."""

    def __init__(self, replica):
        self.replica = replica

    def on_step_end(self, step):
        if step.replica == self.replica:
            time.sleep(0.01)


@pytest.mark.parametrize("every", [1, 4, "auto"])
def test_in_lockstep_it_does_not_matter_who_is_slower(every, one_thread):
    x, y = rows(count=81)  # one replica makes a step more in each epoch
    runs = []
    for slow in (0, 1):
        master = shared_out(2, max_staleness=0, exchange_every=every)
        fitted = trainer(False, master=master, seed=7, callbacks=[Slowed(slow)])
        history = fitted.fit(x, y, epochs=2, batch_size=2)
        runs.append((parameters_of(fitted.model_), history.column("loss")))

    np.testing.assert_equal(runs[0], runs[1])


def test_the_first_steps_of_a_trainer_are_sent_in_eight_bits(tmp_path):
    master = shared_out(2, max_staleness=0, warmup_steps=20)
    fitted = trainer(False, master=Recorded(str(tmp_path), master))

    kinds = []
    for _ in range(2):
        fitted.fit(X, Y, batch_size=16)  # 15 steps of each replica
        kinds.append([records(tmp_path, 0)[r]["kinds"].tolist() for r in (0, 1)])

    assert kinds[0] == [[Kind.DENSE8] * 15] * 2
    for second in kinds[1]:
        assert second[:5] == [Kind.DENSE8] * 5
        assert Kind.DENSE8 not in second[5:]
        assert len(second) > 10


def test_each_layer_keeps_a_threshold_from_fit_to_fit():
    falling = AdaptiveThreshold(initial=1e-3, min_density=1, max_density=1, decay=0.9)
    mapping = {"0.*": falling, "*": FixedThreshold(1e-2)}
    master = shared_out(2, threshold=mapping, max_staleness=0)
    fitted = trainer(False, master=master, telemetry_every=1)

    means = [
        fitted.fit(X, Y, batch_size=16).steps.column("threshold") for _ in range(2)
    ]

    falls = sorted({2 * mean - 1e-2 for mean in (*means[0], *means[1])})
    assert falls == pytest.approx([1e-3 * 0.9**n for n in range(29, -1, -1)])


@pytest.mark.parametrize(("scale", "factor"), [("mean", 0.5), ("sum", 1), (0.25, 0.25)])
@pytest.mark.parametrize("apply", ["eager", "strict"])
def test_update_scale_multiplies_updates(apply, scale, factor):
    # One step of each replica, from the same start, on half of the rows each.
    options = {"apply": apply, "update_scale": scale, "max_staleness": 0}
    fitted = trainer(False, optimizer=plain, master=shared_out(2, **options))
    fitted.fit(X, Y, batch_size=240)

    start = start_of(mlp)
    outputs = start(torch.from_numpy(X))
    nn.functional.cross_entropy(outputs, torch.from_numpy(Y)).backward()
    gradient = torch.cat([p.grad.double().reshape(-1) for p in start.parameters()])
    # The two halves' means add up to twice the mean of all.
    expected = vector(start) - 0.02 * factor * 2 * gradient
    torch.testing.assert_close(delivered(fitted), expected, rtol=0, atol=4 * 2.0**-24)


def test_a_number_also_scales_a_single_replica():
    moved = []
    for scale in ("mean", 0.5):
        fitted = trainer(False, optimizer=plain, master=kept(update_scale=scale))
        fitted.fit(X, Y, batch_size=480)
        moved.append(vector(fitted.model_) - vector(start_of(mlp)))

    torch.testing.assert_close(moved[1], moved[0] / 2, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("every", "exchanges"), [(1, 15), (4, 4), (5, 3), (99, 1)])
def test_exchange_every_so_many_steps(every, exchanges):
    # 30 batches, 15 for each of two: and what is left over at the end.
    master = shared_out(2, exchange_every=every, max_staleness=0)

    history = trainer(False, master=master).fit(X, Y, batch_size=16)

    assert history[0]["dense_bytes"] == 2 * exchanges * 4 * SIZE


def test_clipping_is_counted_and_keeping_is_not():
    small = AdaptiveThreshold(initial=1e-5)
    masters = (
        GradientSharing(
            small, ResidualClipping(), exchange_every=1, replicas_per_worker=2
        ),
        shared_out(2, threshold=small, exchange_every=1),
    )

    clipped, nothing = (
        sum(trainer(False, master=m).fit(X, Y, batch_size=16).column("clipped"))
        for m in masters
    )

    assert clipped > 0.01
    assert nothing == 0


def test_a_full_outbox_leaves_the_update_in_the_residual(tmp_path, monkeypatch):
    monkeypatch.setattr("daskdl.training.fit.OUTBOX_BYTES", 1)
    fitted = trainer(
        False, master=Recorded(str(tmp_path), shared_out(max_staleness=None))
    )

    fitted.fit(X, Y, epochs=3, batch_size=4)

    ends = records(tmp_path, epoch=2)
    expected = ends[0]["start"] + sum(end["progress"] for end in ends.values())
    np.testing.assert_allclose(delivered(fitted), expected, rtol=0, atol=ATOL)


def test_the_grid_grows_with_the_parameters_at_sync_points():
    """Counts have 32 bits."""
    x = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
    weights = np.array([[300.0], [-1000.0], [2000.0], [500.0]], np.float32)
    fitted = trainer(
        False,
        model=lambda: nn.Linear(4, 1, bias=False),  # weights below 1/2
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        master=shared_out(2, warmup_steps=1000),  # sends what it has
    )

    fitted.fit(x, x @ weights, epochs=6, batch_size=8)

    np.testing.assert_allclose(fitted.model_.weight.detach().T, weights, rtol=1e-2)
