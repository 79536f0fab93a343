"""What a user asks of a trainer, on real worker processes."""

import json
import math
import os
import threading
from dataclasses import dataclass

import dask.array as da
import numpy as np
import pytest
import torch
from distributed import Client, LocalCluster
from torch import nn

from daskdl import (
    AdaptiveThreshold,
    Callback,
    GradientSharing,
    KeepResidual,
    ThresholdAlgorithm,
    Trainer,
)
from daskdl.history import COLUMNS
from tests.cluster.problems import adam, mlp, normalised, parameters_of, rows, sgd

X, Y = rows()
SIZE = 20 * 32 + 32 + 32 * 4 + 4  # parameters of `mlp`
RAGGED = (30, 0, 97, 61, 150, 142)


def trainer(client, **options):
    options = {"model": mlp, "optimizer": sgd, "progress": False, **options}
    options = {"loss": nn.CrossEntropyLoss(), "master": kept(), **options}
    return Trainer(client=client, **options)


def kept(**options):
    """Sharing that loses nothing on purpose: no clipping."""
    threshold = AdaptiveThreshold(initial=1e-3)
    return GradientSharing(
        **{"threshold": threshold, "residual": KeepResidual()} | options
    )


def plain(parameters):
    return torch.optim.SGD(parameters, lr=0.02)


def vector(module):
    return torch.cat([p.detach().double().reshape(-1) for p in module.parameters()])


def start_of(model, seed=0):
    torch.manual_seed(seed)
    return model()


def blocks():
    return da.from_array(X, chunks=(RAGGED, 20)), da.from_array(Y, chunks=(RAGGED,))


class Notes(Callback):
    """Writes a line of JSON for each step into a file of its replica."""

    def __init__(self, folder):
        self.folder = str(folder)

    def on_step(self, step):
        path = os.path.join(self.folder, f"{step.replica}.jsonl")
        line = {
            **step._asdict(),
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
        }
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def read(self):
        lines = []
        for name in sorted(os.listdir(self.folder)):
            with open(os.path.join(self.folder, name)) as file:
                lines += [json.loads(line) for line in file]
        return lines


KINDS = {
    "numpy": lambda: (X, Y),
    "torch": lambda: (torch.from_numpy(X), torch.from_numpy(Y)),
    "dask": blocks,
}


class TestKindsOfData:
    @pytest.mark.parametrize("kind", KINDS)
    def test_learns_scores_and_predicts(self, client, kind):
        x, y = KINDS[kind]()
        own = trainer(client)

        own.fit(x, y, epochs=5, batch_size=8)

        score = own.evaluate(x, y)
        assert score["accuracy"] > 0.9
        outputs = own.predict(x)
        assert type(outputs) is type(x)
        if kind == "dask":
            outputs = client.compute(outputs).result()
        guesses = np.asarray(outputs).argmax(axis=1)
        assert (guesses == Y).mean() == pytest.approx(score["accuracy"], abs=1e-12)

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_row_is_trained_on_once_in_each_epoch(self, client, kind, tmp_path):
        x, _ = KINDS[kind]()
        numbers = np.arange(480, dtype=np.float32) ** 2
        targets = {"numpy": numbers, "torch": torch.from_numpy(numbers)}
        targets["dask"] = da.from_array(numbers, chunks=(RAGGED,))
        notes = Notes(tmp_path)

        history = trainer(
            client, loss=lambda o, y: y.mean() + 0 * o.sum(), callbacks=[notes]
        ).fit(x, targets[kind], epochs=2, batch_size=7)

        # The mean of numbers of which no two are equal: one too few would show.
        assert history.column("loss") == pytest.approx([numbers.mean()] * 2, rel=1e-6)
        assert history.column("examples") == [480, 480]
        assert {line["replica"] for line in notes.read()} == {0, 1}

    def test_numpy_and_torch_are_the_same_data(self, client):
        results = []
        for kind in ("numpy", "torch"):
            own = trainer(client, master=kept(max_staleness=0))
            own.fit(*KINDS[kind](), epochs=2)
            results.append(vector(own.model_))

        assert torch.equal(*results)

    def test_a_regression_of_floats(self, client):
        targets = (X @ np.linspace(-1, 1, 20)[:, None]).astype("float64")
        own = trainer(
            client,
            model=lambda: nn.Linear(20, 1),
            loss=nn.MSELoss(),
            optimizer=plain,
            master=kept(threshold=AdaptiveThreshold(initial=1e-2)),
        )

        history = own.fit(
            X, targets, epochs=8, batch_size=16, validation=(X[:50], targets[:50])
        )

        assert history[-1]["val_loss"] < 0.05 * targets.var()
        assert "val_accuracy" not in history[-1]
        assert own.evaluate(X, targets).keys() == {"loss"}


def tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(20, 20)
            self.second = nn.Linear(20, 20)
            self.last = nn.Linear(20, 4)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.last(torch.relu(self.second(torch.relu(self.first(x)))))

    return Tied()


def bfloat16():
    return mlp().bfloat16()


class TestModels:
    @pytest.mark.parametrize("model", [normalised, bfloat16, tied])
    @pytest.mark.parametrize("apply", ["eager", "strict"])
    def test_it_learns(self, client, model, apply):
        # No momentum: strict and late, it would overshoot.
        own = trainer(client, model=model, optimizer=plain, master=kept(apply=apply))

        history = own.fit(X, Y, epochs=6, batch_size=8)

        # Guessing is right once in four.
        assert own.evaluate(X, Y)["accuracy"] > 0.6
        assert history[-1]["loss"] < 0.8 * history[0]["loss"]

    def test_a_built_one_is_not_changed(self, client):
        given = normalised().eval()
        before = parameters_of(given)
        own = trainer(client, model=given)

        own.fit(X, Y, batch_size=16)

        for name, value in parameters_of(given).items():
            np.testing.assert_array_equal(value, before[name])
        assert not any(part.training for part in given.modules())
        assert own.model_ is not given
        assert not torch.equal(vector(own.model_), vector(given))

    def test_what_is_frozen_stays_as_it_is(self, client):
        def partly():
            model = mlp()
            model[0].requires_grad_(False)
            return model

        own = trainer(client, model=partly)
        own.fit(X, Y, epochs=2)

        start = start_of(partly)
        assert torch.equal(own.model_[0].weight, start[0].weight)
        assert not own.model_[0].weight.requires_grad
        assert (own.model_[2].weight - start[2].weight).abs().max() > 1e-3

    def test_what_is_tied_stays_tied(self, client):
        own = trainer(client, model=tied)
        own.fit(X, Y)

        assert own.model_.first.weight is own.model_.second.weight
        assert not torch.equal(own.model_.first.weight, start_of(tied).first.weight)

    def test_dtypes_stay_and_nothing_is_a_view_of_a_flat_vector(self, client):
        own = trainer(client, model=bfloat16)
        own.fit(X, Y)

        for parameter in own.model_.parameters():
            assert parameter.dtype == torch.bfloat16
            assert parameter.untyped_storage().nbytes() == 2 * parameter.numel()

    def test_groups_made_in_two_passes_over_the_parameters_are_both_trained(
        self, client
    ):
        def in_groups(parameters):
            weights = [p for p in parameters if p.ndim > 1]
            biases = [p for p in parameters if p.ndim == 1]
            return torch.optim.SGD([{"params": weights}, {"params": biases}], lr=0.1)

        own = trainer(client, optimizer=in_groups)
        own.fit(X, Y, epochs=2)

        start = start_of(mlp)
        assert (own.model_[0].bias - start[0].bias).abs().max() > 1e-3
        assert len(own.optimizer_.param_groups[1]["params"]) == 2

    def test_seeds_make_the_start(self, client):
        class Stop(Callback):
            def on_step(self, step):
                raise RuntimeError

        state = torch.get_rng_state()
        starts = []
        for seed in (0, 5):
            own = trainer(client, seed=seed, callbacks=[Stop()])
            with pytest.raises(RuntimeError):
                own.fit(X, Y)
            starts.append(vector(own.model_))

        for seed, start in zip((0, 5), starts, strict=True):
            expected = vector(start_of(mlp, seed))
            torch.testing.assert_close(start, expected, rtol=0, atol=2.0**-25)
        torch.set_rng_state(state)


class TestSharing:
    """Options of `GradientSharing`: each changes what it says."""

    @pytest.mark.parametrize(
        ("scale", "factor"), [("mean", 0.5), ("sum", 1), (0.25, 0.25)]
    )
    def test_update_scale_multiplies_the_learning_rate(self, client, scale, factor):
        # One step of each replica, from the same start, on half of the rows each.
        own = trainer(
            client,
            optimizer=plain,
            master=kept(update_scale=scale, max_staleness=0),
        )
        own.fit(X, Y, batch_size=240)

        start = start_of(mlp)
        outputs = start(torch.from_numpy(X))
        nn.functional.cross_entropy(outputs, torch.from_numpy(Y)).backward()
        gradient = torch.cat([p.grad.double().reshape(-1) for p in start.parameters()])
        # The two halves' means add up to twice the mean of all.
        expected = vector(start) - 0.02 * factor * 2 * gradient
        torch.testing.assert_close(
            vector(own.model_), expected, rtol=0, atol=4 * 2.0**-24
        )

    def test_a_number_scales_one_replica_too(self, lone_client):
        moved = []
        for scale in ("mean", 0.5):
            own = trainer(
                lone_client,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                master=kept(update_scale=scale),
            )
            own.fit(X, Y, batch_size=480)
            moved.append(vector(own.model_) - vector(start_of(mlp)))

        torch.testing.assert_close(moved[1], moved[0] / 2, rtol=0, atol=1e-7)

    @pytest.mark.parametrize(("every", "exchanges"), [(1, 15), (4, 4), (5, 3), (99, 1)])
    def test_exchange_every_so_many_steps(self, client, every, exchanges):
        # 30 batches, 15 for each of two: and what is left over at the end.
        master = kept(exchange_every=every, max_staleness=0)

        history = trainer(client, master=master).fit(X, Y, batch_size=16)

        assert history[0]["dense_bytes"] == 2 * exchanges * 4 * SIZE

    def test_several_replicas_on_each_worker(self, client, tmp_path):
        notes = Notes(tmp_path)
        own = trainer(client, master=kept(replicas_per_worker=2), callbacks=[notes])

        history = own.fit(X, Y, epochs=6, batch_size=8)

        lines = notes.read()
        pids = {line["replica"]: line["pid"] for line in lines}
        assert sorted(pids) == [0, 1, 2, 3]
        assert len(set(pids.values())) == 2
        assert pids[0] == pids[2] != pids[1] == pids[3]
        assert history.column("replicas") == [4] * 6
        assert own.evaluate(X, Y)["accuracy"] > 0.85

    @pytest.mark.parametrize(
        "option", [{"replicas_per_worker": "auto"}, {"routing": "plain"}]
    )
    def test_other_choices_train(self, client, option):
        expected = max(2, 2 * torch.cuda.device_count())

        history = trainer(client, master=kept(**option)).fit(X, Y, epochs=2)

        assert history.column("replicas") == [expected] * 2
        assert history[1]["loss"] < history[0]["loss"]

    def test_clipping_is_counted_and_keeping_is_not(self, client):
        small = AdaptiveThreshold(initial=1e-5)
        clipped = [
            sum(
                trainer(client, master=master)
                .fit(X, Y, batch_size=16)
                .column("clipped")
            )
            for master in (GradientSharing(small), kept(threshold=small))
        ]

        assert clipped[0] > 0.01
        assert clipped[1] == 0

    def test_no_more_replicas_than_batches(self, client):
        history = trainer(client).fit(X[:20], Y[:20], epochs=2, batch_size=32)

        assert history.column("replicas") == [1, 1]
        assert history.column("examples") == [20, 20]

    def test_a_replica_without_a_piece_waits_for_the_others(self, client):
        x, y = da.from_array(X, chunks=(480, 20)), da.from_array(Y, chunks=480)

        history = trainer(client).fit(x, y, epochs=2, batch_size=16)

        assert history.column("examples") == [480, 480]
        assert history.column("replicas") == [2, 2]


@dataclass(frozen=True)
class Growing(ThresholdAlgorithm):
    """Its value tells how often it has been asked."""

    def next_threshold(self, residual, last):
        return 1e-3 if last is None else last.threshold * 1.05


class TestFitAgain:
    """A second fit goes on from the first: model, optimizer and threshold."""

    @pytest.mark.parametrize("optimizer", [sgd, adam])
    def test_two_fits_of_one_replica_are_one(self, lone_client, optimizer):
        models = []
        for fits, epochs in ((1, 2), (2, 1)):
            own = trainer(lone_client, optimizer=optimizer)
            for _ in range(fits):
                own.fit(X, Y, epochs=epochs, batch_size=50, shuffle=False)
            models.append(vector(own.model_))

        assert torch.equal(*models)

    def test_the_threshold_goes_on(self, client):
        master = kept(threshold=Growing(), max_staleness=0)
        own = trainer(client, master=master)

        ends = [own.fit(X, Y, batch_size=16)[-1]["threshold"] for _ in range(2)]

        # 15 exchanges of each replica in each fit.
        assert ends == pytest.approx([1e-3 * 1.05**14, 1e-3 * 1.05**29])

    def test_the_optimizer_goes_on(self, client):
        own = trainer(client, optimizer=adam, master=kept(max_staleness=0))

        steps = []
        for _ in range(2):
            own.fit(X, Y, batch_size=16)
            state = own.optimizer_.state_dict()["state"]
            steps.append([int(entry["step"]) for entry in state.values()])

        assert steps == [[15] * 4, [30] * 4]
        moments = [entry["exp_avg_sq"] for entry in state.values()]
        assert all(moment.max() > 0 for moment in moments)
        known = {id(p) for p in own.model_.parameters()}
        assert {id(p) for p in own.optimizer_.param_groups[0]["params"]} == known

    def test_a_fit_that_fails_keeps_the_optimizer_of_the_one_before(self, client):
        own = trainer(client, optimizer=adam, master=kept(max_staleness=0))
        own.fit(X, Y, batch_size=16)
        model, state = vector(own.model_), own.optimizer_.state_dict()["state"]

        class Fail(Callback):
            def on_step(self, step):
                raise RuntimeError

        own.callbacks = [Fail()]
        with pytest.raises(RuntimeError):
            own.fit(X, Y, batch_size=16)

        torch.testing.assert_close(vector(own.model_), model, rtol=0, atol=2.0**-24)
        after = own.optimizer_.state_dict()["state"]
        assert all(torch.equal(after[i]["exp_avg"], state[i]["exp_avg"]) for i in state)


class TestHistory:
    def test_it_has_its_columns(self, client):
        own = trainer(client)

        history = own.fit(X, Y, epochs=3, batch_size=16)

        assert history is own.history_
        assert len(history) == 3
        assert all(row.keys() == COLUMNS.keys() for row in history)
        assert history.column("epoch") == [0, 1, 2]
        for row in history:
            assert row["examples_per_s"] == pytest.approx(480 / row["seconds"])
            assert 0 < row["density"] <= 1
            assert row["received_bytes"] == row["sent_bytes"] > 0  # of two replicas
            assert row["dense_bytes"] > row["sent_bytes"]
            assert row["waits"].keys() >= {"gather", "lease"}
            assert row["repeated_pieces"] == row["refused_messages"] == 0
        frame = history.to_pandas()
        assert list(frame.index) == [0, 1, 2]
        assert list(frame["loss"]) == history.column("loss")

    def test_validation_scores_the_model_of_each_epoch(self, lone_client):
        own = trainer(lone_client)

        history = own.fit(X[:400], Y[:400], epochs=2, validation=(X[400:], Y[400:]))

        score = own.evaluate(X[400:], Y[400:])
        assert history[-1]["val_accuracy"] == score["accuracy"]
        assert history[-1]["val_loss"] == pytest.approx(score["loss"], rel=1e-6)
        assert history[0]["val_loss"] != history[1]["val_loss"]

    @pytest.mark.parametrize("kind", KINDS)
    def test_validation_is_shared_by_the_workers(self, client, kind):
        own = trainer(client, model=normalised)

        history = own.fit(X, Y, epochs=5, batch_size=8, validation=KINDS[kind]())

        scores = history.column("val_accuracy")
        assert scores[-1] > 0.9
        # Every row is scored once: shares of 480.
        assert np.array(scores) * 480 == pytest.approx(np.rint(np.array(scores) * 480))
        assert all(math.isfinite(loss) for loss in history.column("val_loss"))


class Enough(Exception):
    """Raised by a callback on the client."""


class TestCallbacks:
    def test_on_step_is_run_on_the_workers_after_each_step(self, client, tmp_path):
        notes = Notes(tmp_path)

        history = trainer(client, callbacks=[notes]).fit(X, Y, epochs=2, batch_size=32)

        lines = notes.read()
        pids = client.run(os.getpid)
        assert {line["pid"] for line in lines} == set(pids.values())
        for epoch, row in enumerate(history):
            of_epoch = [line for line in lines if line["epoch"] == epoch]
            assert sum(line["examples"] for line in of_epoch) == 480
            loss = sum(line["loss"] * line["examples"] for line in of_epoch) / 480
            assert row["loss"] == pytest.approx(loss)
        for replica in (0, 1):
            numbers = [line["number"] for line in lines if line["replica"] == replica]
            assert numbers == list(range(1, len(numbers) + 1))

    def test_on_epoch_is_run_on_the_client_and_need_not_travel(self, client):
        class Keep(Callback):
            def __init__(self):
                self.rows = []
                self.lock = threading.Lock()  # cannot be pickled

            def on_epoch(self, row):
                with self.lock:
                    self.rows.append(row)

        keep = Keep()
        history = trainer(client, callbacks=[keep]).fit(X, Y, epochs=3)

        assert keep.rows == list(history)

    def test_what_on_epoch_raises_stops_the_run_and_reaches_the_caller(self, client):
        class Stop(Callback):
            def on_epoch(self, row):
                if row["epoch"] == 1:
                    raise Enough("after two")

        own = trainer(client, callbacks=[Stop()])
        with pytest.raises(Enough, match="after two"):
            own.fit(X, Y, epochs=10_000)

        assert len(own.history_) == 2
        assert own.evaluate(X, Y)["loss"] < 1.3


class TestProgress:
    def test_a_bar_counts_the_examples(self, client, capfd):
        trainer(client, progress=True).fit(X, Y, epochs=2)

        shown = capfd.readouterr().err
        assert "960/960" in shown
        assert "epoch=1" in shown

    @pytest.mark.parametrize("progress", [False, None])
    def test_none_is_shown_if_not_wanted_or_not_in_a_terminal(
        self, client, capfd, progress
    ):
        trainer(client, progress=progress).fit(X, Y)

        assert "/480" not in capfd.readouterr().err


class TestThreads:
    @pytest.mark.parametrize(("replicas", "share"), [(1, 3), (3, 1)])
    def test_replicas_share_their_workers_threads_and_put_them_back(
        self, tmp_path, replicas, share
    ):
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        notes = Notes(tmp_path)
        try:
            with (
                LocalCluster(
                    n_workers=1,
                    threads_per_worker=3,
                    processes=False,
                    dashboard_address=":0",
                ) as cluster,
                Client(cluster, set_as_default=False) as client,
            ):
                master = kept(replicas_per_worker=replicas)
                trainer(client, master=master, callbacks=[notes]).fit(X, Y)
            after = torch.get_num_threads()
        finally:
            torch.set_num_threads(before)

        lines = notes.read()
        assert {line["replica"] for line in lines} == set(range(replicas))
        assert {line["threads"] for line in lines} == {share}
        assert after == 2


class TestDevice:
    @pytest.mark.parametrize("device", ["auto", "cpu", torch.device("cpu")])
    def test_the_model_comes_back_on_the_cpu(self, client, device):
        own = trainer(client, device=device)

        own.fit(X, Y)

        assert {p.device.type for p in own.model_.parameters()} == {"cpu"}
