"""Measuring here: what is refused, and what is left as it was."""

import asyncio
import copy
import dataclasses
import random
import re
import sys
import time

import dask.array as da
import numpy as np
import pytest
import torch
from torch import nn

import daskdl
from daskdl.planning import measure
from daskdl.planning.measure import request_costs
from daskdl.serialization import Packed

pytestmark = pytest.mark.slow

PLAN = sys.modules["daskdl.planning.plan"]  # the package has the function
NETWORK = daskdl.Network(1e9, 1e-3)
WORKERS = "workers must be a whole number >= 1, or several"
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(16, 6, generator=GENERATOR)
Y = torch.arange(16) % 3


threads_seen = []


def noting_threads(output, y):
    threads_seen.append(torch.get_num_threads())
    return output.square().mean()


class Net(nn.Module):
    """With what a copy has to leave alone: buffers, and random numbers drawn."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
        )

    def forward(self, x):
        random.random()
        np.random.random()
        return self.layers(x)


@pytest.fixture
def quick(monkeypatch):
    """Few steps: nothing here is about how long they take."""
    monkeypatch.setattr(measure, "TIMED_S", 0.0)
    monkeypatch.setattr("daskdl.planning.measure.TIMED", 3)
    monkeypatch.setattr("daskdl.planning.measure.WARM", 1)


def state():
    numpy_state = [str(part) for part in np.random.get_state()]
    threads = torch.get_num_threads()
    return torch.get_rng_state().tolist(), random.getstate(), numpy_state, threads


@pytest.mark.usefixtures("quick")
class TestLeftAlone:
    def test_the_model_and_every_generator_and_torchs_threads_are_as_they_were(self):
        model = Net()
        weights = copy.deepcopy(model.state_dict())
        before = state()

        daskdl.plan(model, (X, Y), 2, NETWORK, threads=torch.get_num_threads() + 1)

        assert state() == before
        assert model.training
        after = model.state_dict()
        assert all(torch.equal(weights[name], after[name]) for name in weights)
        assert all(p.grad is None for p in model.parameters())

    def test_the_batch_is_as_it_was(self):
        x, y = X.clone(), Y.clone()

        daskdl.plan(lambda: nn.Sequential(nn.ReLU(inplace=True), Net()), (x, y), 1)

        assert torch.equal(x, X)
        assert torch.equal(y, Y)

    def test_it_works_where_an_event_loop_runs(self):
        async def cell():
            return daskdl.plan(Net(), (X, Y), [2], NETWORK)

        assert asyncio.run(cell()).rows[0].workers == 2


@pytest.mark.usefixtures("quick")
class TestPlan:
    def test_costs_are_those_of_the_batch_and_the_model(self):
        plan = daskdl.plan(Net, (X.numpy(), Y.numpy()), 4, NETWORK, threads=1)

        costs = plan.measured.alone
        assert [row.workers for row in plan.rows] == [1, 2, 3, 4]
        assert (costs.rows, costs.threads) == (16, 1)
        assert costs.parameters == sum(p.numel() for p in Net().parameters())
        times = {
            name: value
            for name, value in dataclasses.asdict(costs).items()
            if name.endswith("_s")
        }
        assert {n: v for n, v in times.items() if not 0 < v < 1 and n != "item_s"} == {}

    def test_machines_of_their_own_are_measured_alone(self, monkeypatch):
        monkeypatch.setattr(PLAN, "CPU_COUNT", 4)
        monkeypatch.setattr(
            PLAN, "rehearse_together", lambda *_: pytest.fail("not alone")
        )

        plan = daskdl.plan(Net(), (X, Y), 2, NETWORK, threads=1)

        assert plan.measured.together is None

    def test_as_many_threads_as_torch_has_are_taken(self):
        plan = daskdl.plan(Net(), (X, Y), 1)

        assert plan.measured.alone.threads == torch.get_num_threads()

    def test_torch_computes_with_the_threads_that_were_asked_for(self):
        daskdl.plan(Net(), (X, Y), 1, loss=noting_threads, threads=3)

        assert threads_seen[-1] == 3

    def test_other_ways_of_sharing_make_other_updates(self):
        fine = daskdl.GradientSharing(threshold=daskdl.FixedThreshold(1e-6))
        coarse = daskdl.GradientSharing(threshold=daskdl.FixedThreshold(0.2))

        dense, sparse = (
            daskdl.plan(Net(), (X, Y), 2, NETWORK, master=master).measured.alone
            for master in (fine, coarse)
        )

        assert dense.density > 0.5
        assert dense.density > 10 * sparse.density
        assert dense.update_bytes > sparse.update_bytes

    @pytest.mark.parametrize("y", [Y, torch.rand(16, 3)], ids=["classes", "values"])
    def test_a_loss_follows_from_the_labels(self, y):
        assert daskdl.plan(Net(), (X, y), 2, NETWORK).rows[0].efficiency == 1.0

    def test_loss_and_optimizer_of_ones_own_are_used(self):
        called = []

        def loss(output, y):
            called.append("loss")
            return output.square().mean()

        def optimizer(params):
            called.append("optimizer")
            return torch.optim.Adam(params)

        with pytest.MonkeyPatch.context() as patch:  # the same objects, seen from here
            patch.setattr(Packed, "unpack", lambda self: self.kept)
            patch.setattr(Packed, "kept", None, raising=False)
            init = Packed.__init__

            def keep(self, content, argument, **options):
                init(self, content, argument, **options)
                self.kept = content

            patch.setattr(Packed, "__init__", keep)
            daskdl.plan(Net(), (X, Y), 1, loss=loss, optimizer=optimizer)

        assert set(called) == {"loss", "optimizer"}

    def test_several_updates_of_an_exchange_are_one(self):
        layers = {
            "*.bias": daskdl.FixedThreshold(1e-6),
            "*": daskdl.FixedThreshold(1e-5),
        }
        master = daskdl.GradientSharing(threshold=layers)

        costs = daskdl.plan(Net(), (X, Y), 2, NETWORK, master=master).measured.alone

        assert costs.update_bytes > 2 * 64  # two headers


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "options", "message"),
        [
            (
                (0,),
                {},
                "workers must be a whole number >= 1, or several of them, got 0",
            ),
            (
                ([],),
                {},
                "workers must be a whole number >= 1, or several of them, got []",
            ),
            (([2, 0],), {}, WORKERS),
            (([2, 1.5],), {}, WORKERS),
            ((True,), {}, WORKERS),
            (("2",), {}, WORKERS),
            (
                (2, 1e9),
                {},
                "link must be a daskdl.planning.cost_model.Network, got 1000",
            ),
            ((2, None), {"threads": 0}, "threads must be a whole number >= 1 or None"),
            (
                (2, None),
                {"master": "mesh"},
                "master must be a daskdl.training.gradient_sharing.",
            ),
            (
                (2, None),
                {"master": daskdl.GradientSharing(replicas_per_worker=2)},
                "replicas_per_worker must be 1 in the master of a plan, got 2; plan ",
            ),
            (
                (2, None),
                {"master": daskdl.GradientSharing(daskdl.LinkThreshold())},
                "threshold must not follow the link in the master of a plan, which ",
            ),
        ],
        ids=str,
    )
    def test_options(self, arguments, options, message):
        with pytest.raises(daskdl.OptionError, match=f"^{re.escape(message)}"):
            daskdl.plan(Net(), (X, Y), *arguments, **options)

    @pytest.mark.parametrize(
        ("batch", "error", "message"),
        [
            ([X, Y], daskdl.OptionError, "batch must be a tuple (X, y), got a list"),
            ((X,), daskdl.OptionError, "batch must be a tuple (X, y), got a tuple"),
            ((X, Y[:3]), daskdl.DataError, "batch: X and y must have the same length"),
            (
                (da.from_array(X.numpy()), Y),
                daskdl.DataError,
                "batch must be in memory, got a dask.array; use compute()",
            ),
            ((X[:, :2], Y), daskdl.ModelError, "model failed on 2 rows of X"),
        ],
        ids=["list", "one", "lengths", "dask", "shape"],
    )
    def test_batches(self, batch, error, message):
        with pytest.raises(error, match=f"^{re.escape(message)}"):
            daskdl.plan(Net(), batch, 2)

    def test_workers_that_would_share_a_cuda_device(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

        with pytest.raises(
            daskdl.OptionError, match=r"^link must be a daskdl\.Network"
        ):
            daskdl.plan(Net(), (X, Y), 2)

    @pytest.mark.usefixtures("quick")
    def test_a_loss_that_diverges(self):
        def sgd(params):
            return torch.optim.SGD(params, lr=1e30)

        with pytest.raises(daskdl.DivergedError, match="in a rehearsal of some steps"):
            daskdl.plan(Net(), (X, X[:, :3]), 2, NETWORK, optimizer=sgd)


def test_all_cores_are_measured_where_they_are_shared(monkeypatch):
    asked = []
    costs = daskdl.plan(Net(), (X, Y), 1).measured.alone
    monkeypatch.setattr(PLAN, "CPU_COUNT", 4)
    monkeypatch.setattr(
        PLAN,
        "rehearse_together",
        lambda script, n, patience_s: asked.append(n) or [costs] * n,
    )

    for workers, threads in [(1, 1), (2, 1), (9, 1), (9, 2), (9, 4)]:
        monkeypatch.setattr(
            PLAN,
            "rehearse",
            lambda s, t=threads: dataclasses.replace(costs, threads=t),
        )
        daskdl.plan(Net(), (X, Y), workers, threads=threads)

    assert asked == [2, 4, 2]


def test_larger_requests_cost_more():
    def idle():
        time.sleep(0.001)

    small = request_costs(np.zeros(100, np.uint8), idle)
    large = request_costs(np.zeros(2_000_000, np.uint8), idle)

    assert small.request_s > 0
    assert large.request_s > small.request_s
    assert large.item_s > small.item_s
