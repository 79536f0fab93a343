"""Whole fits on a device, on threads of this process."""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import (
    Checkpoint,
    EarlyStopping,
    OptionError,
    ReplicaError,
)
from daskdl.training import gradient_sharing
from tests.support import promises
from tests.support.devices import (
    DEVICE,
    OutOfMemory,
    SeenDevices,
    needs_cuda,
    tensor_bytes,
)
from tests.support.problems import (
    MASTERS,
    adam,
    kept,
    mlp,
    normalised,
    parameters_of,
    rows,
    start_of,
    trainer,
)
from tests.support.promises import Interrupt, Place
from tests.support.recording import vector

X, Y = rows()


# The same tests are in tests/place, on the CPU.
on_the_cpu_elsewhere = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread():
    """Of torch: sums of the CPU depend on how they are shared out."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


@pytest.fixture
def place():
    """Two replicas that share the device."""
    return Place(False, replicas=2, per_worker=2, device=DEVICE)


@pytest.fixture
def lone():
    """One replica on the device."""
    return Place(False, replicas=1, device=DEVICE)


@pytest.mark.parametrize("replicas", [1, 2])
@MASTERS
def test_replicas_on_one_device_learn(master, replicas):
    SeenDevices.seen.clear()
    fitted = trainer(
        *(False,),
        loss=SeenDevices(),
        device=DEVICE,
        master=master(replicas_per_worker=replicas),
    )

    history = fitted.fit(X, Y, epochs=4, batch_size=16, validation=(X, Y))

    assert SeenDevices.seen == {DEVICE.type}
    assert history.column("replicas") == [replicas] * 4
    assert history[-1]["loss"] < history[0]["loss"] / 2
    assert history[-1]["val_accuracy"] > 0.9
    assert {p.device.type for p in fitted.model_.parameters()} == {"cpu"}


def test_auto_is_one_replica_for_each_device():
    fitted = trainer(False, master=kept(replicas_per_worker="auto"))

    history = fitted.fit(X, Y, epochs=4, batch_size=16)

    assert history.column("replicas") == [max(1, torch.cuda.device_count())] * 4
    assert history[-1]["loss"] < history[0]["loss"] / 2


class TestOneReplica(promises.OneReplica):
    pass


@on_the_cpu_elsewhere
class TestConservation(promises.Conservation):
    pass


@on_the_cpu_elsewhere
class TestAgreement(promises.Agreement):
    pass


class TestPackingBesideSteps(promises.Conservation, promises.Agreement):
    @pytest.fixture(autouse=True)
    def one_entry_is_enough(self, monkeypatch):
        monkeypatch.setattr(gradient_sharing, "least_beside", lambda _: 1)


class TestInStep(promises.InStep):
    @pytest.fixture
    def model(self):
        """Without dropout: the replicas share the random generator of the device."""
        return mlp


@on_the_cpu_elsewhere
class TestFitAgain(promises.FitAgain):
    pass


@pytest.mark.parametrize("model", [mlp, normalised])
def test_a_fit_of_one_replica_depends_on_its_seed_alone(lone, model):
    models = []
    for seed in range(2):
        torch.manual_seed(seed)  # of the process
        fitted = lone.trainer(model=model, optimizer=adam, seed=7)
        fitted.fit(X, Y, epochs=2, batch_size=16)
        models.append(vector(fitted.model_))

    assert torch.equal(*models)


def test_a_resumed_fit_goes_on_with_the_random_numbers_of_the_device(lone, tmp_path):
    def fitted(epochs, **options):
        checkpoint = Checkpoint(tmp_path / f"{epochs}", keep_last=None)
        dropping = lone.trainer(model=normalised, callbacks=[checkpoint])
        dropping.fit(X, Y, epochs=epochs, batch_size=16, **options)
        return parameters_of(dropping.model_)

    fitted(2)
    resumed = fitted(4, resume=str(tmp_path / "2"))

    complete = fitted(4)
    for name, value in resumed.items():
        np.testing.assert_array_equal(value, complete[name], err_msg=name)


@needs_cuda
@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_a_fit_leaves_the_random_numbers_of_the_device_alone(where):
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()

    trainer(False, model=normalised, device=where).fit(X, Y, batch_size=16)

    assert torch.equal(torch.cuda.get_rng_state(), before)


@needs_cuda
def test_what_a_transform_puts_on_the_device_is_read_when_it_is_there():
    """It comes back for a model on the CPU, behind all that the device has to do."""

    def busy(batch):
        on_device = tuple(tensor.to(DEVICE) for tensor in batch)
        matrix = torch.eye(4096, device=DEVICE)
        for _ in range(20):
            torch.matmul(matrix, matrix)
        return tuple(tensor.clone() for tensor in on_device)

    losses = []
    for transform in (None, busy):
        fitted = trainer(False, device="cpu", transform=transform)
        losses.append(fitted.fit(X, Y, batch_size=48, shuffle=False).column("loss"))

    assert losses[0] == losses[1]


def moved(batch):
    """A transform that computes on the device."""
    x, y = batch
    return x.to(DEVICE) * 1.0, None if y is None else y.to(DEVICE)


class OnDevice(nn.Module):
    """A model that is made on the device."""

    def __init__(self):
        super().__init__()
        self.layers = mlp().to(DEVICE)

    def forward(self, x):
        return self.layers(x)


def parallel():
    """A model in DataParallel, as it is made where there are CUDA devices."""
    model = nn.DataParallel(mlp().to(DEVICE))
    model.device_ids = [0]
    model.src_device_obj = torch.device("cuda:0")
    return model


WEIGHTS = torch.tensor([1.0, 2.0, 1.0, 0.5])
ALREADY_THERE = {
    "a model": lambda: {"model": lambda: mlp().to(DEVICE)},
    "a module": lambda: {"model": start_of(mlp).to(DEVICE)},
    "a class": lambda: {"model": OnDevice},
    "a parallel model": lambda: {"model": parallel},
    "a parallel module": lambda: {"model": parallel()},
    "a loss": lambda: {"loss": nn.CrossEntropyLoss(weight=WEIGHTS.to(DEVICE))},
    "batches": lambda: {"transform": moved},
}


@pytest.mark.parametrize("options", ALREADY_THERE.values(), ids=ALREADY_THERE)
def test_what_is_on_the_device_already_is_as_welcome(place, options):
    fitted = place.trainer(**options())

    history = fitted.fit(X, Y, epochs=4, batch_size=16, validation=(X, Y))

    assert history[-1]["val_accuracy"] > 0.9
    assert fitted.evaluate(X, Y)["accuracy"] > 0.9
    assert fitted.predict(X).argmax(axis=1).tolist().count(3) > 0
    assert {p.device.type for p in fitted.model_.parameters()} == {"cpu"}


def test_a_module_that_is_on_the_device_stays_there(lone):
    module = start_of(mlp).to(DEVICE)
    before = vector(module)

    lone.trainer(model=module).fit(X, Y, batch_size=16)

    assert {p.device.type for p in module.parameters()} == {DEVICE.type}
    assert torch.equal(vector(module), before)


def test_scores_and_predictions_are_those_of_the_cpu(place):
    fitted = place.trainer(model=normalised)
    fitted.fit(X, Y, epochs=4, batch_size=16)
    with torch.no_grad():
        expected = fitted.model_(torch.from_numpy(X))
        loss = float(nn.functional.cross_entropy(expected, torch.from_numpy(Y)))

    scores = fitted.evaluate(X, Y)
    predicted = fitted.predict(X)
    with fitted.predictor() as predictor:
        answered = predictor(X[:3])

    assert scores["loss"] == pytest.approx(loss, rel=1e-4)
    right = expected.argmax(dim=1).numpy() == Y
    assert scores["accuracy"] == pytest.approx(right.mean(), abs=2 / len(X))
    np.testing.assert_allclose(predicted, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(answered, expected[:3], rtol=1e-3, atol=1e-4)


def test_the_best_model_is_restored(place):
    """Each epoch of this schedule learns less: the rate of the second is negative."""
    stopping = EarlyStopping(patience=2)
    fitted = place.trainer(
        callbacks=[stopping],
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: 1.0 if epoch == 0 else -1.0
        ),
    )

    history = fitted.fit(X, Y, epochs=10, batch_size=16, validation=(X, Y))

    assert len(history) == 3
    assert history.stopping.best_epoch == 0
    best = history[0]["val_loss"]
    assert fitted.evaluate(X, Y)["loss"] == pytest.approx(best, rel=1e-4)


@MASTERS
def test_out_of_memory_ends_the_fit_and_a_later_one_goes_on(place, master):
    """Only the data of the second fit have a batch of 15 rows."""
    fitted = place.trainer(
        model=lambda: OutOfMemory(mlp(), rows=15),
        master=master(replicas_per_worker=2),
    )
    fitted.fit(X, Y, epochs=2, batch_size=16)

    with pytest.raises(ReplicaError, match="OutOfMemoryError") as caught:
        fitted.fit(X[:-1], Y[:-1], epochs=2, batch_size=16)

    assert "allocate_too_much" in str(caught.value)
    assert "use a smaller batch_size" in str(caught.value)
    assert fitted.evaluate(X, Y)["accuracy"] > 0.8
    history = fitted.fit(X, Y, epochs=2, batch_size=16)
    assert history.column("replicas") == [2, 2]


class Asserting(nn.Module):
    """A model that fails as one does whose indices are out of range on the device."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        if len(x) == 16:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.layers(x)


def test_an_assert_of_the_device_says_what_to_do(place):
    """The model raises it: after a real one, this process could not use the device."""
    with pytest.raises(ReplicaError, match="device-side assert") as caught:
        place.trainer(model=Asserting).fit(X, Y, batch_size=16)

    assert "with device='cpu', the traceback shows the line" in str(caught.value)
    assert "client.restart()" in str(caught.value)


def test_ctrl_c_keeps_the_model_agreed_on_last(place, ctrl_c):
    interrupted = place.trainer(callbacks=[Interrupt()])

    with pytest.raises(KeyboardInterrupt):
        interrupted.fit(X, Y, epochs=10_000, batch_size=16, validation=(X, Y))

    (row,) = interrupted.history_
    assert interrupted.evaluate(X, Y)["loss"] < 1.5 * row["val_loss"]


FAILURES = {
    "a fit": {},
    "out of memory": {"model": lambda: OutOfMemory(mlp(), rows=16)},
    "Ctrl-C": {"callbacks": [Interrupt()]},
}


@pytest.mark.parametrize("options", FAILURES.values(), ids=FAILURES)
@MASTERS
def test_nothing_stays_on_the_device(place, master, options, ctrl_c):
    """The second time, so that what is made once for a process is there."""
    before = []
    for _ in range(2):
        before.append(tensor_bytes())
        fitted = place.trainer(
            optimizer=adam,
            **{"model": normalised, **options},
            master=master(replicas_per_worker=2),
        )
        with contextlib.suppress(ReplicaError, KeyboardInterrupt):
            fitted.fit(X, Y, epochs=4, batch_size=16, validation=(X, Y))
            fitted.evaluate(X, Y)
            fitted.predict(X)
            with fitted.predictor() as predictor:
                predictor(X[:3])
        del fitted
        predictor = None

    assert tensor_bytes() == before[1]


def serve(fitted):
    with fitted.predictor() as predictor:
        predictor(X[:8])


USES = {
    "fit": lambda fitted: fitted.fit(X, Y),
    "evaluate": lambda fitted: fitted.evaluate(X, Y),
    "score_examples": lambda fitted: fitted.score_examples(X, Y),
    "predict": lambda fitted: fitted.predict(X),
    "predictor": serve,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_device_beside_those_that_are_there_is_refused(use, monkeypatch):
    fitted = trainer(False)
    fitted.fit(X, Y)
    fitted.device = "cuda:7"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    with pytest.raises(OptionError, match="device 'cuda:7' does not exist"):
        use(fitted)


def test_a_fit_is_refused_if_there_is_no_cuda_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(
        OptionError, match="device 'cuda' does not exist: torch finds 0"
    ):
        trainer(False, device="cuda").fit(X, Y)


def test_models_are_evaluated_where_they_are_trained(place):
    """On the device, or on the CPU beside it."""

    class Seen(nn.Module):
        """A model that notes where its rows are; a dry run has up to three."""

        seen = set()  # noqa: RUF012  # of all copies

        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, x):
            if len(x) > 3:
                self.seen.add(x.device.type)
            return self.layers(x)

    for device in (DEVICE, "cpu"):
        fitted = place.trainer(model=Seen, device=device)
        fitted.fit(X, Y)
        for use in USES.values():
            use(fitted)

            assert Seen.seen == {torch.device(device).type}
            Seen.seen.clear()
