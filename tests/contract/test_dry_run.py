"""What is refused before a worker is touched: model, loss, optimizer, labels, rows."""

import csv
import functools
import lzma
import pickle
import random
import re
import struct
import tarfile
import threading
import zipfile
import zlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from daskdl.data import batching
from daskdl.data.batching import Weighted
from daskdl.data.checks import (
    LabelCheck,
    WeightedLoss,
    check_loss,
    check_training,
    dry_run,
    ignored_label,
    is_classification,
    of_validation,
    preserved_random_state,
)
from daskdl.data.tables import InMemory
from daskdl.data.unreadable import UNREADABLE, blames_data, is_left_out
from daskdl.errors import (
    ChannelError,
    DataError,
    LostPieceError,
    ModelError,
    OptionError,
    WaitTimeoutError,
)
from daskdl.keras.compiled import OutputLosses
from daskdl.objective import OwnStep
from daskdl.serialization import copied
from daskdl.training.fit_spec import starting_model
from tests.support.sources import Parts

X = np.arange(12.0).reshape(6, 2)
CLASSES = np.array([0, 1, 2, 0, 1, 2])
CROSS_ENTROPY = nn.CrossEntropyLoss()
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def linear(outputs=3):
    return nn.Linear(2, outputs)


def run(loss=CROSS_ENTROPY, y=CLASSES, *, model=None, x=X, transform=None):
    return dry_run(model or linear(), (x, y), transform, loss)


def own_step(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


class Twice(nn.Module):
    def forward(self, x):
        return x, x


class TestALoss:
    @pytest.mark.parametrize(
        ("loss", "y", "expected"),
        [
            (CROSS_ENTROPY, CLASSES, LabelCheck(3, -100)),
            (nn.CrossEntropyLoss(ignore_index=5), CLASSES, LabelCheck(3, 5)),
            (functional.cross_entropy, CLASSES, LabelCheck(3, -100)),
            (CROSS_ENTROPY, np.eye(6)[:, :3], LabelCheck()),
            (nn.MSELoss(), np.zeros((6, 3)), LabelCheck()),
            (lambda out, y: functional.cross_entropy(out, y), CLASSES, LabelCheck()),
            (OwnStep(own_step), CLASSES, LabelCheck()),
            (None, None, LabelCheck()),
        ],
        ids=["classes", "ignored", "function", "shares", "values", "own", "step", "no"],
    )
    def test_decides_which_labels_are_accepted(self, loss, y, expected):
        outcome = run(loss, y)

        assert outcome.labels == expected
        assert outcome.classes == expected.classes

    def test_labels_that_a_transform_makes_are_not_checked(self):
        outcome = run(y=CLASSES + 7, transform=lambda batch: (batch[0], batch[1] * 0))

        assert (outcome.classes, outcome.labels) == (3, None)

    def test_of_trees_gets_them(self):
        def loss(output, y):
            first, second = output
            return (first - y["a"]).mean() + (second - y["b"]).mean()

        y = {"a": X.astype(np.float32), "b": X.astype(np.float32)}

        assert run(loss, y, model=Twice()).classes is None

    @pytest.mark.filterwarnings("ignore:Using a target size")  # as in a user's program
    @pytest.mark.parametrize(
        ("loss", "y", "message"),
        [
            (nn.MSELoss(reduction="none"), np.zeros((6, 3)), "loss must return one "
             "floating number for a batch, got shape (2, 3) and dtype torch.float32 "
             'for two rows; use reduction="mean"'),
            (lambda out, y: out.sum().long(), CLASSES, "shape () and dtype torch.int6"),
            (lambda out, y: float(len(out)), CLASSES, "must return a tensor, got 2.0"),
            (lambda out, y: out @ y, np.zeros(6), "loss failed on two rows, the output "
             "being shape (2, 3) and dtype torch.float32 and the labels shape (2,) and "
             "dtype torch.float32: "),
            (CROSS_ENTROPY, CLASSES[:, None] + 9, "the labels shape (2, 1) and dtype"),
            # torch only warns, and then takes the mean over all pairs of rows
            (nn.MSELoss(), np.zeros((6, 1)), "the labels shape (2, 1)"),
            (OwnStep(lambda model: 0), CLASSES, "step failed on two rows, x being shape"
             " (2, 2) and dtype torch.float32 and y shape (2,) and dtype torch.int64"),
            (OwnStep(lambda model, batch: model(batch[0])), CLASSES, "step must return "
             "one floating number for a batch, got shape (2, 3)"),
            (OwnStep(lambda model, batch: 2.0), CLASSES, "step must return a tensor"),
        ],
        ids=["no mean", "not floating", "no tensor", "fails", "column", "pairs",
             "step fails", "step no mean", "step no tensor"],
    )  # fmt: skip
    def test_that_does_not_fit_is_refused(self, loss, y, message):
        with pytest.raises(ModelError, match=re.escape(message)):
            run(loss, y)

    def test_needs_labels_but_a_step_does_not(self):
        with pytest.raises(DataError, match="y must be given, or data of pairs"):
            run(y=None)
        assert run(OwnStep(lambda model, batch: batch[0].mean()), None).output is None

    @pytest.mark.parametrize(
        ("loss", "label"),
        [
            (CROSS_ENTROPY, 3),
            (nn.NLLLoss(), -1),
            (functools.partial(functional.nll_loss, ignore_index=4), -100),
        ],
        ids=["too large", "negative", "not ignored"],
    )
    def test_refuses_a_label_without_an_output(self, loss, label):
        with pytest.raises(DataError, match=re.escape(f"y[0] is {label}, but the mo")):
            run(loss, np.array([label, 1]))

    def test_counts_the_classes_of_pixels_along_dimension_1(self):
        y = np.full((6, 4, 4), 5)

        with pytest.raises(DataError, match=r"y\[0, 0, 0\] is 5.* 5 outputs"):
            run(y=y, x=np.zeros((6, 1, 4, 4)), model=nn.Conv2d(1, 5, 1))

    @pytest.mark.parametrize(
        ("loss", "label"),
        [
            (nn.NLLLoss(ignore_index=2), 2),
            (functional.nll_loss, -100),
            (functools.partial(functional.cross_entropy, ignore_index=1), 1),
            (functools.partial(functional.mse_loss), None),
            (nn.BCELoss(), None),
        ],
        ids=["module", "function", "partial", "other partial", "other"],
    )
    def test_may_ignore_a_label(self, loss, label):
        assert ignored_label(loss) == label

    @pytest.mark.parametrize(
        ("loss", "y", "transform", "expected"),
        [
            (CROSS_ENTROPY, CLASSES.astype("int32"), None, True),
            (CROSS_ENTROPY, np.eye(6)[:, :3], None, False),
            (nn.MSELoss(), np.zeros((6, 3)), None, False),
            (OwnStep(own_step), CLASSES, None, False),
            (CROSS_ENTROPY, np.eye(6)[:, :3], lambda b: (b[0], b[1].argmax(1)), True),
        ],
        ids=["classes", "shares", "numbers", "step", "transform"],
    )
    def test_there_is_an_accuracy_for_class_indices(self, loss, y, transform, expected):
        outcome = run(loss, y, transform=transform)

        assert is_classification(outcome.output, outcome.batch[1]) is expected


def squares(output, y):
    return (output - y).square().mean()


def poisson_by_hand(output, y):
    return (output.exp() - y * output).sum()


class Flat(nn.Linear):
    def forward(self, x):
        return super().forward(x).squeeze(-1)


def logged_rmse(model, batch):
    return {"loss": squares(model(batch[0])[:, 0], batch[1]).sqrt(), "a": 1.0}


def ranking(out, y):
    better = (y[:, None] > y[None]).float()
    return (functional.softplus(out.T - out) * better).mean()


COLUMN, LABELS = linear(1), np.zeros(6, np.float32)  # all labels are equal
BROADCAST = {
    "own": (squares, COLUMN, LABELS),
    "(n,) and (n, 1)": (squares, Flat(2, 1), LABELS[:, None]),
    "integers": (squares, COLUMN, LABELS.astype(int)),
    "sum": (poisson_by_hand, COLUMN, LABELS),
    "of torch": (nn.PoissonNLLLoss(), COLUMN, LABELS),
    "weights": (
        *(WeightedLoss(nn.PoissonNLLLoss()), COLUMN),
        Weighted(LABELS, LABELS + 1),
    ),
    "rmse": (lambda out, y: squares(out, y).sqrt(), COLUMN, LABELS),
    "median": (lambda out, y: (out - y).abs().median(), COLUMN, LABELS),
    "ratio": (
        lambda out, y: 1 - (out * y.float()).mean() / (y**2).mean(),
        *(COLUMN, LABELS),
    ),
    "largest": (
        lambda out, y: torch.log(torch.cosh(out.exp() - y)).max(),
        *(COLUMN, LABELS),
    ),
    "step": (
        OwnStep(lambda model, batch: squares(model(batch[0]), batch[1])),
        *(COLUMN, LABELS),
    ),
    "step with logs": (OwnStep(logged_rmse), COLUMN, LABELS[:, None]),
}
ALONE = {
    "columns": (squares, COLUMN, LABELS[:, None]),
    "flat": (squares, Flat(2, 1), LABELS),
    "squeezes": (lambda out, y: squares(out.squeeze(-1), y), COLUMN, LABELS),
    "flattens": (
        lambda out, y: squares(out.flatten(), y.flatten()),
        *(COLUMN, LABELS),
    ),
    "of pairs": (
        lambda out, y: ((out - out.T) * (y - y[:, None])).mean(),
        *(COLUMN, LABELS),
    ),
    "classes": (functional.cross_entropy, linear(3), CLASSES),
    # All pairs of outputs, with all pairs of labels.
    "ranking": (ranking, COLUMN, LABELS),
    "rmse": (lambda out, y: squares(out, y[:, None]).sqrt(), COLUMN, LABELS),
    "class weights": (
        lambda out, y: (out * y.bincount(minlength=2)).mean(),
        *(linear(2), CLASSES % 2),
    ),
    "one-hot": (
        lambda out, y: (out * functional.one_hot(y, 3)).mean(),
        *(linear(3), CLASSES),
    ),
    "step": (
        OwnStep(lambda model, batch: squares(model(batch[0])[:, 0], batch[1])),
        *(COLUMN, LABELS),
    ),
    "step of classes": (OwnStep(own_step), linear(3), CLASSES),
}


class TestBroadcasting:
    """Outputs (n, 1) and labels (n,) make a matrix of (n, n) pairs."""

    @pytest.mark.parametrize(("loss", "model", "y"), BROADCAST.values(), ids=BROADCAST)
    @pytest.mark.parametrize("count", [1, 6])
    def test_is_warned_of(self, loss, model, y, count):
        y = batching.rows(y, slice(count))

        with pytest.warns(UserWarning, match="each row with the labels of all rows"):
            run(loss, y, model=model, x=X[:count])

    def test_is_warned_of_for_one_output_of_several(self):
        class Two(nn.Linear):
            def forward(self, x):
                return {"a": super().forward(x), "b": super().forward(x)}

        loss = OutputLosses([nn.MSELoss(), nn.PoissonNLLLoss()], ["a", "b"], [1, 1])
        y = {"a": LABELS[:, None], "b": LABELS}

        with pytest.warns(UserWarning, match="each row with the labels of all rows"):
            run(loss, y, model=Two(2, 1))

    @pytest.mark.parametrize(("loss", "model", "y"), ALONE.values(), ids=ALONE)
    @pytest.mark.filterwarnings("error")
    def test_is_not_suspected_where_rows_are_compared_alone(self, loss, model, y):
        run(loss, y, model=model)


class Squeezed(nn.Linear):
    def forward(self, x):
        return {"score": super().forward(x).squeeze()}


def test_a_model_that_drops_the_axis_of_a_single_row_is_warned_of():
    with pytest.warns(UserWarning, match=r"for one row, .* write squeeze\(-1\)"):
        run(None, None, model=Squeezed(2, 1))
    with pytest.warns(UserWarning, match="for one row"):
        run(lambda out, y: squares(out["score"], y), np.zeros(6), model=Squeezed(2, 1))


def test_an_error_says_that_the_dry_run_repeats_a_single_row():
    with pytest.raises(ModelError, match="repeats the first row of X, to have 2"):
        run(x=X[:1, :1], y=CLASSES[:1])
    with pytest.raises(ModelError) as caught:
        run(x=X[:, :1])
    assert "repeats" not in str(caught.value)


class TestAModel:
    def test_gets_two_rows_in_its_dtype(self):
        x = {"a": X[:1].astype(np.float32), "b": (CLASSES[:1],)}
        model = nn.ModuleList([linear().double()])
        model.forward = lambda tree: tree["a"]

        outcome = dry_run(model, (x, np.arange(1, dtype=np.uint8)))

        got, labels = outcome.batch
        assert got["a"].dtype == torch.float64
        assert got["a"].tolist() == [[0.0, 1.0], [0.0, 1.0]]
        assert (got["b"][0].dtype, got["b"][0].tolist()) == (torch.int64, [0, 0])
        assert (labels.dtype, labels.tolist()) == (torch.int64, [0, 0])
        assert outcome.rows[0]["a"].tolist() == [[0.0, 1.0], [0.0, 1.0]]

    def test_runs_in_evaluation_mode_without_gradients_on_rows_of_its_own(self):
        def step(model, batch):
            assert (model.training, torch.is_grad_enabled()) == (False, False)
            assert len(batch[0]) == 2
            return batch[0].mean()

        x = -X
        run(OwnStep(step), model=linear().train(), x=x)
        output = run(None, model=nn.Sequential(nn.ReLU(inplace=True), linear()), x=x)

        assert not output.output.requires_grad
        assert x.tolist() == (-X).tolist()
        assert output.batch[0].tolist() == x[:2].tolist()

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (np.zeros((2, 5)), "model failed on 2 rows of X, shape (2, 5) and dtype "
             "torch.float32: mat1 and mat2 shapes cannot be multiplied"),
            (np.zeros((2, 2), np.uint8), "; if these are quantities, not indices, use "
             "X.astype('float32')"),
        ],
        ids=["shape", "integers"],
    )  # fmt: skip
    def test_that_does_not_fit_is_refused_with_its_cause(self, rows, message):
        with pytest.raises(ModelError, match=re.escape(message)) as caught:
            run(None, None, x=rows)

        assert isinstance(caught.value.__cause__, RuntimeError)

    def test_and_its_loss_and_the_random_states_stay_as_they_were(self):
        class Counting(nn.Module):
            calls = 0

            def forward(self, output, labels):
                self.calls += 1
                return output.mean() * random.random() * np.random.rand()

        noisy = nn.Sequential(nn.Dropout(), nn.Linear(2, 3))
        loss, states = Counting(), (random.getstate(), torch.get_rng_state().tolist())
        legacy = np.random.get_state()[1].tolist()

        run(loss, model=copied(noisy))

        assert loss.calls == 0
        assert states == (random.getstate(), torch.get_rng_state().tolist())
        assert np.random.get_state()[1].tolist() == legacy

    def test_needs_rows(self):
        with pytest.raises(DataError, match="X must not be empty, got no rows in any"):
            dry_run(linear(), Parts().first_rows)


class TestATransform:
    def test_comes_before_the_dtype_of_the_model(self):
        seen = []

        def transform(batch):
            seen.append((batch[0].dtype, batch[1]))
            return batch[0].div_(2), torch.tensor([3, 4])

        x, y = run(None, None, transform=transform).batch

        assert seen == [(torch.float64, None)]
        assert (x.dtype, x.tolist()) == (torch.float32, [[0.0, 0.5], [1.0, 1.5]])
        assert y.tolist() == [3, 4]
        assert X[0].tolist() == [0.0, 1.0]

    @pytest.mark.parametrize(
        ("transform", "message"),
        [
            (lambda batch: batch[0]["image"], "transform failed on two rows, x being "
             "shape (2, 2) and dtype torch.float64 and y shape (2,) and dtype "
             "torch.int64: "),
            (lambda batch: batch[0], "transform must return a pair (x, y), got a "
             "Tensor; y is None where there are no labels"),
            (lambda batch: (*batch, 1), "a pair (x, y), got a tuple"),
        ],
        ids=["fails", "no pair", "three"],
    )  # fmt: skip
    def test_that_makes_no_batch_is_refused(self, transform, message):
        with pytest.raises(ModelError, match=re.escape(message)):
            run(transform=transform)


class TestTraining:
    @pytest.mark.parametrize(
        ("model", "loss", "optimizer", "message"),
        [
            (nn.Linear, nn.MSELoss(), SGD, "model must be a torch.nn.Module or a "
             "function that returns one, got <class"),
            (nn.ReLU(), nn.MSELoss(), SGD, "model has no trainable parameters: ReLU"),
            (nn.LazyLinear(1), nn.MSELoss(), SGD, "model.weight is not known yet; run"),
            (nn.LazyBatchNorm1d(affine=False), nn.MSELoss(), SGD, "of model.running_"),
            (linear(), "mse", SGD, "loss must be a function of (output, labels), such "
             "as MSELoss(); got 'mse'"),
            (linear(), CROSS_ENTROPY, lambda params: torch.optim.SGD(params, lr=-1),
             "optimizer failed on a list of 2 parameters: Invalid learning rate: -1"),
            (linear(), CROSS_ENTROPY, lambda params: params, "optimizer must return "
             "one torch.optim.Optimizer, got several (Parameter, Parameter)"),
            (linear(), CROSS_ENTROPY, torch.optim.LBFGS, "LBFGS needs a closure"),
        ],
        ids=["class", "none", "lazy", "lazy buffer", "text", "fails", "returns",
             "closure"],
    )  # fmt: skip
    @pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
    def test_says_what_is_wrong_and_what_to_do(self, model, loss, optimizer, message):
        with pytest.raises(ModelError, match=re.escape(message)):
            check_training(model, loss, optimizer)

    def test_an_optimizer_gets_a_list_of_the_trainable_parameters(self):
        model, seen = linear(), []
        model.bias.requires_grad_(False)

        def optimizer(params):
            optimizer = SGD(list(params))
            seen.extend(p.shape for p in params)
            params.clear()  # it may use the list up
            return optimizer

        check_training(model, lambda out, y: out, optimizer)

        assert seen == [(3, 2)]
        assert check_loss(functional.mse_loss) is None

    def test_what_workers_could_not_unpickle_is_found_by_copying(self):
        model = linear()
        model.handle = threading.Lock()

        with pytest.raises(ModelError, match=r"model\.handle \(a _thread\.lock\)"):
            copied(model)


class TestLabels:
    @pytest.mark.parametrize(
        ("check", "y"),
        [
            (LabelCheck(), None),
            (LabelCheck(), np.array([-1, 99])),
            (LabelCheck(), {"a": np.array([1.5]), "b": (np.array([7]),)}),
            (LabelCheck(3, 7), np.array([0, 2, 7])),
            (LabelCheck(3), np.array([0.5, 8.0, np.inf])),
            (LabelCheck(1), np.array([True, False])),
            (LabelCheck(3), np.array([], np.int64)),
        ],
        ids=["none", "integers", "tree", "ignored", "floats", "bool", "empty"],
    )
    def test_that_a_loss_accepts_pass(self, check, y):
        check.check(y)

    @pytest.mark.parametrize(
        ("check", "y", "message"),
        [
            (LabelCheck(3), np.array([0.5, np.nan, np.nan]),
             "y of part 3[1] is nan; remove such examples, or fill them in"),
            (LabelCheck(), torch.tensor([[0.0, float("nan")]]), "[0, 1] is nan"),
            (LabelCheck(), (np.zeros(1), np.array([np.nan])),
             "y[1] of part 3[0] is nan"),
            (LabelCheck(3), {"a": np.array([2]), "b": np.array([3])},
             "y['b'] of part 3[0] is 3, but the model gives 3 outputs: labels must be "
             "in [0, 3)"),
            (LabelCheck(3, -100), np.array([0, -100, -99]), "y of part 3[2] is -99"),
            (LabelCheck(3), np.array([0, 255], np.uint8), "y of part 3[1] is 255"),
        ],
        ids=["nan", "tensor", "tree", "class", "negative", "unsigned"],
    )  # fmt: skip
    def test_that_no_loss_can_use_are_named(self, check, y, message):
        with pytest.raises(DataError, match=re.escape(message)):
            check.check(y, "part 3")

    def test_in_memory_are_all_checked_before_training_others_when_they_are_loaded(
        self,
    ):
        with pytest.raises(DataError, match=r"^y\[5\] is 2, but the model"):
            LabelCheck(2).check_source(InMemory(X, np.array([0] * 5 + [2]), 2))
        LabelCheck(2).check_source(Parts((X, CLASSES)))


@pytest.mark.parametrize("kind", [DataError, ModelError, OptionError])
def test_an_error_says_that_it_is_about_validation(kind):
    with pytest.raises(kind, match=r"^validation: X is wrong$"), of_validation():
        raise kind("X is wrong")


def test_random_states_are_restored_after_an_error():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    @preserved_random_state()
    def fail():
        seen.append(draw())
        raise KeyError

    seen = []
    with pytest.raises(KeyError):
        fail()

    assert draw() == seen[0]


# ---- which parts are left out, and which end a run


BAD = (
    *(DataError, ValueError, RuntimeError, KeyError, OSError, EOFError, SyntaxError),
    *(csv.Error, lzma.LZMAError, pickle.UnpicklingError, struct.error, zlib.error),
    *(tarfile.ReadError, zipfile.BadZipFile),
)
NOT_BAD = (OptionError, ModelError, ChannelError, WaitTimeoutError, LostPieceError)


@pytest.mark.parametrize("kind", BAD)
def test_what_readers_raise_is_about_the_data(kind):
    assert issubclass(kind, UNREADABLE)
    assert not issubclass(NameError, UNREADABLE)
    assert blames_data(kind("torn"))


@pytest.mark.parametrize("kind", NOT_BAD)
def test_what_is_about_something_else_is_never_left_out(kind):
    error = kind("slow")

    assert not is_left_out(error, "box 3", True)
    assert error.__notes__ == ["in box 3"]


def test_a_bad_part_is_left_out_if_it_may_be_else_its_error_names_it(caplog):
    assert is_left_out(EOFError("torn"), "box 3", True)
    assert caplog.messages == ["box 3 is left out: torn"]

    error = EOFError("torn")
    assert not is_left_out(error, "box 3", False)
    assert error.__notes__ == ["in box 3"]


# ---- the model that a fit begins with


def drawn():
    """A module whose numbers are from the generators of torch and of Python."""
    module = nn.Linear(2, 1)
    nn.init.constant_(module.bias, random.random())
    return module


def test_a_module_is_copied():
    drawn_model = drawn()

    start = starting_model(drawn_model, seed=0)

    assert start is not drawn_model
    assert torch.equal(start.weight, drawn_model.weight)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_function_is_called_under_the_seed_and_generators_are_restored(name):
    before = torch.get_rng_state(), random.getstate()

    models = [starting_model(drawn, seed) for seed in (3, 3, 4)]

    first, same, different = (model.get_parameter(name) for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, different)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
