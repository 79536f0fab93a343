import functools
import random
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from daskdl.data.checks import (
    ClassRange,
    forward,
    ignored_label,
    random_state_left_alone,
    rehearse,
    rehearsed_batch,
    transformed,
)
from daskdl.errors import DataError, ModelError
from daskdl.objective import OwnStep

X = np.arange(12.0).reshape(6, 2)
CLASSES = np.array([0, 1, 2, 0, 1, 2])


def linear(outputs=3):
    return nn.Linear(2, outputs)


class Twice(nn.Module):
    def forward(self, x):
        return x, x


class TestRehearse:
    @pytest.mark.parametrize(
        ("loss", "y", "expected"),
        [
            (nn.CrossEntropyLoss(), CLASSES, ClassRange(3, -100)),
            (nn.CrossEntropyLoss(ignore_index=5), CLASSES, ClassRange(3, 5)),
            (functional.cross_entropy, CLASSES, ClassRange(3, -100)),
            (nn.CrossEntropyLoss(), torch.rand(6, 3), None),
            (nn.MSELoss(), np.zeros((6, 3)), None),
            (lambda out, y: functional.cross_entropy(out, y), CLASSES, None),
        ],
        ids=["classes", "ignored", "function", "probabilities", "values", "own"],
    )
    def test_says_which_labels_the_loss_accepts(self, loss, y, expected):
        assert rehearse(linear(), loss, X, y) == expected

    def test_labels_that_a_transform_makes_are_not_held_to_the_outputs(self):
        def none_of_them(batch):
            return batch[0], batch[1] * 0

        accepted = rehearse(linear(), nn.NLLLoss(), X, CLASSES + 7, none_of_them)

        assert accepted == ClassRange(3, -100)

    def test_a_loss_of_trees_gets_them(self):
        def loss(output, y):
            first, second = output
            return (first - y["a"]).mean() + (second - y["b"]).mean()

        y = {"a": X.astype(np.float32), "b": X.astype(np.float32)}

        assert rehearse(Twice(), loss, X, y) is None

    def test_a_loss_needs_labels(self):
        with pytest.raises(DataError, match="y must be given, or data of pairs"):
            rehearse(linear(), nn.NLLLoss(), X, None)

    def test_a_step_of_the_users_own_does_not(self):
        step = OwnStep(lambda model, batch: model(batch[0]).mean())

        assert rehearse(linear(), step, X, None) is None

    def test_one_example_is_enough_to_see_that_a_loss_is_no_mean(self):
        loss = nn.MSELoss(reduction="none")

        with pytest.raises(ModelError, match=r"got shape \(2, 1\)"):
            rehearse(linear(1), loss, X[:1], np.zeros((1, 1)))

    @pytest.mark.parametrize(
        ("loss", "message"),
        [
            (lambda out, y: out, "loss must return one floating number for a batch, "
             "got shape (2, 3) and dtype torch.float32 for two rows; use reduction"),
            (lambda out, y: out.sum().long(), "shape () and dtype torch.int64"),
            (lambda out, y: float(len(out)), "loss must return a tensor, got 2.0"),
            (lambda out, y: out @ y, "loss failed on two rows, the output being shape "
             "(2, 3) and dtype torch.float32 and the labels shape (2,) and dtype "
             "torch.float32: "),
        ],
        ids=["not a mean", "not floating", "not a tensor", "fails"],
    )  # fmt: skip
    def test_a_loss_that_gives_no_number_is_refused(self, loss, message):
        with pytest.raises(ModelError, match=re.escape(message)):
            rehearse(linear(), loss, X, np.zeros(6))

    @pytest.mark.filterwarnings("ignore:Using a target size")  # as in a user's program
    def test_outputs_and_targets_of_different_shapes_are_refused(self):
        """Torch only warns, and then takes the mean over all pairs of rows."""
        with pytest.raises(ModelError, match=r"\(2, 1\).*labels shape \(2,\)"):
            rehearse(linear(1), nn.MSELoss(), X, np.zeros(6))

    @pytest.mark.parametrize(
        ("loss", "label"),
        [
            (nn.CrossEntropyLoss(), 3),
            (nn.NLLLoss(), -1),
            (functools.partial(functional.nll_loss, ignore_index=4), -100),
        ],
        ids=["too large", "negative", "not ignored"],
    )
    @pytest.mark.parametrize("at", [0, 5], ids=["rehearsed", "later"])
    def test_a_label_without_an_output_is_refused(self, loss, label, at):
        y = CLASSES.copy()
        y[at] = label

        with pytest.raises(DataError, match=re.escape(f"y[{at}] is {label}, but")):
            rehearse(linear(), loss, X, y)

    def test_an_ignored_label_passes(self):
        loss = functools.partial(functional.nll_loss, ignore_index=9)

        assert rehearse(linear(), loss, X, np.array([0, 1, 9, 2, 1, 0])).classes == 3

    def test_classes_of_pixels_are_counted_along_dimension_1(self):
        y = np.zeros((6, 4, 4), np.int64)
        y[3, 2, 1] = 5
        model = nn.Conv2d(1, 5, 1)

        with pytest.raises(DataError, match=r"y\[3, 2, 1\] is 5.* 5 outputs"):
            rehearse(model, nn.CrossEntropyLoss(), np.zeros((6, 1, 4, 4)), y)

    @pytest.mark.parametrize(
        ("model", "y", "message"),
        [
            (Twice(), CLASSES, "the output being [0]: shape (2, 2) and dtype "
             "torch.float32, [1]: shape (2, 2) and dtype torch.float32 and the labels "
             "shape (2,)"),
            (linear(), CLASSES[:, None] + 9, "the labels shape (2, 1) and dtype"),
        ],
        ids=["tuple", "column"],
    )  # fmt: skip
    def test_of_other_shapes_the_loss_itself_has_its_say(self, model, y, message):
        with pytest.raises(ModelError, match=re.escape(message)):
            rehearse(model, nn.CrossEntropyLoss(), X, y)

    def test_the_loss_of_the_caller_is_not_used_up(self):
        class Counting(nn.Module):
            calls = 0

            def forward(self, output, labels):
                self.calls += 1
                return output.mean()

        loss = Counting()

        rehearse(linear(), loss, X, CLASSES)

        assert loss.calls == 0


SEEN = []


def noting(model, batch):
    x, y = batch
    kinds = [part.dtype for part in batch]
    SEEN.append((model.training, torch.is_grad_enabled(), len(x), kinds))
    return model(x).mean() + y.sum()


class TestOwnStep:
    def test_it_is_run_as_it_will_be_scored(self):
        SEEN.clear()

        rehearse(linear().eval(), OwnStep(noting), X, CLASSES)

        assert [(False, False, 2, [torch.float32, torch.int64])] == SEEN

    def test_which_labels_it_accepts_is_not_known(self):
        step = OwnStep(lambda model, batch: model(batch[0]).mean())

        assert rehearse(linear(), step, X, np.array([0, 1, 9, 2, 1, 0])) is None

    @pytest.mark.filterwarnings("ignore:Using a target size")  # as in a user's program
    @pytest.mark.parametrize(
        ("step", "message"),
        [
            (lambda model: 0, "step failed on two rows, x being shape (2, 2) and dtype "
             "torch.float32 and y shape (2,) and dtype torch.int64: "),
            (lambda model, batch: model(batch[0]), "step must return one floating "
             "number for a batch, got shape (2, 3)"),
            (lambda model, batch: 2.0, "step must return a tensor, got 2.0"),
            (lambda model, batch: functional.mse_loss(model(batch[0])[:, 0],
             torch.zeros(2, 1)), "Using a target size"),
        ],
        ids=["fails", "not a mean", "not a tensor", "pairs"],
    )  # fmt: skip
    def test_one_that_gives_no_number_is_refused(self, step, message):
        with pytest.raises(ModelError, match=re.escape(message)):
            rehearse(linear(), OwnStep(step), X, CLASSES)


class TestForward:
    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (torch.zeros(2, 5), "model failed on 2 rows of X, shape (2, 5) and dtype "
             "torch.float32: mat1 and mat2 shapes cannot be multiplied"),
            (torch.zeros(2, 2, dtype=torch.uint8), "; if these are quantities, not "
             "indices, use X.astype('float32')"),
        ],
        ids=["shape", "integers"],
    )  # fmt: skip
    def test_a_model_that_does_not_fit_is_refused_with_its_cause(self, rows, message):
        with pytest.raises(ModelError, match=re.escape(message)) as caught:
            forward(linear(), rows)

        assert isinstance(caught.value.__cause__, RuntimeError)

    def test_an_interrupt_is_no_misfit(self):
        class Stop(nn.Module):
            def forward(self, x):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            forward(Stop(), torch.zeros(1))

    def test_no_gradients_are_recorded_and_the_rows_stay(self):
        rows = -torch.ones(2, 2)

        output = forward(nn.Sequential(nn.ReLU(inplace=True), linear()), rows)

        assert not output.requires_grad
        assert rows.tolist() == [[-1.0, -1.0]] * 2


class TestRehearsedBatch:
    def test_two_rows_are_as_the_model_will_get_them(self):
        x = {"a": X.astype(np.float32), "b": (CLASSES,)}
        y = np.arange(1, dtype=np.uint8)  # there are fewer

        got, labels = rehearsed_batch(linear().double(), x, y)

        assert got["a"].dtype == torch.float64
        assert got["a"].tolist() == [[0.0, 1.0], [2.0, 3.0]]
        assert (got["b"][0].dtype, got["b"][0].tolist()) == (torch.int64, [0, 1])
        assert (labels.dtype, labels.tolist()) == (torch.int64, [0, 0])

    def test_a_transform_comes_before_the_dtype_of_the_model(self):
        def transform(batch):
            seen.append((batch[0].dtype, batch[1]))
            return batch[0] / 2, torch.tensor([3, 4])

        seen = []

        x, y = rehearsed_batch(linear(), X, None, transform)

        assert seen == [(torch.float64, None)]
        assert (x.dtype, x.tolist()) == (torch.float32, [[0.0, 0.5], [1.0, 1.5]])
        assert y.tolist() == [3, 4]

    def test_a_transform_may_work_in_place(self):
        x = X.copy()

        rehearsed_batch(linear(), x, None, lambda batch: (batch[0].zero_(), None))

        assert x.tolist() == X.tolist()

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
    def test_a_transform_that_makes_no_batch_is_refused(self, transform, message):
        batch = torch.from_numpy(X[:2]), torch.tensor([0, 1])

        with pytest.raises(ModelError, match=re.escape(message)):
            transformed(batch, transform)


def test_random_states_are_put_back_even_after_an_error():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])

    @random_state_left_alone()
    def fail():
        draw()
        raise KeyError

    with pytest.raises(KeyError):
        fail()

    assert draw() == expected


@pytest.mark.parametrize(
    ("loss", "label"),
    [
        (nn.NLLLoss(ignore_index=2), 2),
        (functional.nll_loss, -100),
        (functools.partial(functional.cross_entropy, ignore_index=1), 1),
        (functools.partial(functional.cross_entropy), -100),
        (functools.partial(functional.mse_loss), None),
        (nn.BCELoss(), None),
    ],
    ids=["module", "function", "partial", "default", "other partial", "other"],
)
def test_a_loss_tells_which_label_it_ignores(loss, label):
    assert ignored_label(loss) == label
