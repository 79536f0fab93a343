import functools
import re
import threading

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.data.checks import (
    ClassRange,
    LabelCheck,
    check_arrays,
    check_rows,
    check_step,
    check_whole,
    of_validation,
    rows_like,
)
from daskdl.data.tables import InMemory
from daskdl.errors import DataError, ModelError, OptionError
from tests.support.sources import Parts

X = np.arange(12.0).reshape(6, 2)
CLASSES = np.array([0, 1, 2, 0, 1, 2])
SGD = functools.partial(torch.optim.SGD, lr=0.1)


class TestCheckArrays:
    @pytest.mark.parametrize(
        ("examples", "labels"),
        [
            (X, CLASSES),
            (torch.from_numpy(X), CLASSES),
            (X, torch.from_numpy(CLASSES)),
            ({"a": X, "b": (X, CLASSES)}, (CLASSES, X)),
            (X, None),
        ],
        ids=["numpy", "tensor and numpy", "numpy and tensor", "trees", "no labels"],
    )
    def test_counts_the_examples(self, examples, labels):
        assert check_arrays(examples, labels) == 6

    @pytest.mark.parametrize(
        ("examples", "labels", "message"),
        [
            (X, CLASSES[:5], "X and y must have the same length, got 6 and 5"),
            (X.tolist(), CLASSES, "X must be a numpy array"),
            (X, CLASSES.tolist(), "y must be a numpy array"),
            ({"a": X, "b": (X, X[1:])}, None, "X['a'] and X['b'][0] and X['b'][1] "
             "must have the same length, got 6 and 6 and 5"),
            (X, {"a": CLASSES.astype(object)}, "y['a'] must hold real numbers"),
            ((), CLASSES, "X must not be empty, got no array at all"),
            (X, {}, "y must not be empty, got no array at all"),
        ],
        ids=["lengths", "X", "y", "lengths in a tree", "objects in a tree",
             "no inputs", "no labels"],
    )  # fmt: skip
    def test_says_what_is_wrong_and_what_to_do(self, examples, labels, message):
        with pytest.raises(DataError, match=re.escape(message)):
            check_arrays(examples, labels)


class TestCheckStep:
    def test_says_which_labels_the_loss_accepts(self):
        loss = nn.CrossEntropyLoss()

        accepted = check_step(nn.Linear(2, 3), loss, SGD, X, CLASSES)

        assert accepted == ClassRange(classes=3, ignore_index=-100)

    def test_leaves_the_model_and_the_random_state_alone(self):
        class Noisy(nn.Sequential):
            def forward(self, x):
                self.seen = x
                return super().forward(x) + torch.rand(1)

        model = Noisy(nn.BatchNorm1d(2), nn.Linear(2, 3))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        state = torch.get_rng_state()

        check_step(model, nn.CrossEntropyLoss(), SGD, X, CLASSES)

        assert model.training
        assert not hasattr(model, "seen")
        after = model.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert torch.equal(torch.get_rng_state(), state)

    def test_a_model_that_needs_larger_batches_in_training_passes(self):
        """BatchNorm refuses one value per channel unless it is in evaluation mode."""
        model = nn.Sequential(nn.Linear(2, 3), nn.Unflatten(0, (1, -1)), nn.Flatten())
        model.append(nn.BatchNorm1d(6)).append(nn.Unflatten(1, (2, 3)))
        model.append(nn.Flatten(0, 1))

        assert check_step(model, nn.CrossEntropyLoss(), SGD, X, CLASSES).classes == 3

    def test_what_the_workers_could_not_unpickle_is_found_here(self):
        model = nn.Linear(2, 3)
        model.handle = threading.Lock()

        with pytest.raises(ModelError, match=r"model\.handle \(a _thread\.lock\)"):
            check_step(model, nn.CrossEntropyLoss(), SGD, X, CLASSES)

    @pytest.mark.parametrize(
        ("optimizer", "message"),
        [
            (lambda params: torch.optim.SGD(params, lr=-1), "optimizer failed on a "
             "list of 2 parameters: Invalid learning rate: -1"),
            (lambda params: params, "optimizer must return one "
             "torch.optim.Optimizer, got several (Parameter, Parameter)"),
            (lambda params: SGD(nn.Linear(2, 3).parameters()), "optimizer works on "
             "parameters it was not given"),
            (lambda params: SGD([*params, nn.Parameter(torch.zeros(1))]), "optimizer "
             "works on parameters it was not given"),
            (torch.optim.LBFGS, "optimizer LBFGS needs a closure"),
        ],
        ids=["fails", "returns", "foreign", "one foreign", "closure"],
    )  # fmt: skip
    def test_an_optimizer_that_cannot_work_is_refused(self, optimizer, message):
        with pytest.raises(ModelError, match=re.escape(message)):
            check_step(nn.Linear(2, 3), nn.CrossEntropyLoss(), optimizer, X, CLASSES)

    def test_an_optimizer_gets_the_trainable_parameters_only(self):
        model, seen = nn.Linear(2, 3), []
        model.bias.requires_grad_(False)

        def optimizer(params):
            seen.extend(params)
            return SGD(params)

        check_step(model, nn.CrossEntropyLoss(), optimizer, X, CLASSES)

        assert [p.shape for p in seen] == [(3, 2)]

    def test_an_optimizer_may_use_up_the_list_that_it_gets(self):
        def optimizer(params):
            made = SGD(list(params))
            params.clear()
            return made

        accepted = check_step(nn.Linear(2, 1), nn.MSELoss(), optimizer, X, X[:, :1])

        assert accepted is None

    def test_it_starts_with_the_cheap_checks(self):
        with pytest.raises(ModelError, match="loss is the class"):
            check_step(nn.Linear(9, 9), nn.MSELoss, SGD, X, CLASSES)


class TestCheckRows:
    def test_says_which_labels_the_loss_accepts(self):
        accepted = check_rows(nn.Linear(2, 3), nn.CrossEntropyLoss(), X, CLASSES)

        assert accepted == ClassRange(classes=3, ignore_index=-100)

    def test_rows_without_labels_are_refused(self):
        with pytest.raises(
            DataError, match=re.escape("y must be given, or data of pa")
        ):
            check_rows(nn.Linear(2, 3), nn.CrossEntropyLoss(), X, None)

    def test_the_model_sees_what_the_transform_makes(self):
        def widened(batch):
            return torch.cat([batch[0], batch[0]], dim=1), batch[1]

        accepted = check_rows(
            nn.Linear(4, 3), nn.CrossEntropyLoss(), X, CLASSES, widened
        )

        assert accepted.classes == 3

    def test_the_model_is_in_evaluation_mode_and_nothing_random_is_used_up(self):
        model = nn.Sequential(nn.Unflatten(0, (1, -1)), nn.Flatten(), nn.BatchNorm1d(4))
        noisy = nn.Sequential(model, Noise())
        state = torch.get_rng_state()

        check_rows(noisy, lambda output, y: output.mean(), X, CLASSES)

        assert noisy.training
        assert torch.equal(torch.get_rng_state(), state)


class TestOfValidation:
    @pytest.mark.parametrize("kind", [DataError, ModelError, OptionError])
    def test_says_that_it_is_about_validation(self, kind):
        with (
            pytest.raises(kind, match=r"^validation: X is wrong$") as caught,
            of_validation(),
        ):
            raise kind("X is wrong")

        assert type(caught.value) is kind
        assert str(caught.value.__cause__) == "X is wrong"


class TestCheckWhole:
    @pytest.mark.parametrize(
        ("y", "message"),
        [
            (CLASSES, "y[2] is 2, but the model"),
            (np.array([0, 0, 0, np.nan, 0, 0]), "y[3] is nan"),
            (torch.tensor([0, 0, 0, 0, float("nan"), 0]), "y[4] is nan"),
            ((X, np.full(6, np.nan)), "y[1][0] is nan"),
        ],
        ids=["class", "nan", "nan in a tensor", "nan in a tree"],
    )
    def test_every_label_in_memory_is_looked_at(self, y, message):
        labels = LabelCheck(ClassRange(classes=2, ignore_index=-100))

        with pytest.raises(DataError, match=re.escape(message)):
            check_whole(InMemory(X, y, batch_size=2), labels)

    def test_what_is_not_in_memory_is_looked_at_later(self):
        labels = LabelCheck(ClassRange(classes=2, ignore_index=-100))

        assert check_whole(Parts((X, CLASSES)), labels) is None


class TestRowsLike:
    def test_they_are_the_first(self):
        x, y = rows_like(InMemory(X, CLASSES, batch_size=2))

        assert (x.tolist(), y.tolist()) == ([[0.0, 1.0], [2.0, 3.0]], [0, 1])

    def test_there_have_to_be_some(self):
        with pytest.raises(DataError, match="X must not be empty, got no rows in any"):
            rows_like(Parts())


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand(1)
