import functools
import re
import threading

import dask.array as da
import numpy as np
import pytest
import torch
from torch import nn

from daskdl.data.checks import (
    check_data,
    check_loss,
    check_model,
    check_step,
    check_validation,
)
from daskdl.data.rehearsal import ClassRange
from daskdl.errors import DataError, ModelError, OptionError

X = np.arange(12.0).reshape(6, 2)
CLASSES = np.array([0, 1, 2, 0, 1, 2])
SGD = functools.partial(torch.optim.SGD, lr=0.1)


class TestCheckData:
    @pytest.mark.parametrize(
        ("examples", "labels"),
        [
            (X, CLASSES),
            (torch.from_numpy(X), CLASSES),
            (X, torch.from_numpy(CLASSES)),
            (da.from_array(X, chunks=2), da.from_array(CLASSES, chunks=4)),
        ],
        ids=["numpy", "tensor and numpy", "numpy and tensor", "dask, other chunks"],
    )
    def test_counts_the_examples(self, examples, labels):
        assert check_data(examples, labels) == 6

    @pytest.mark.parametrize(
        ("examples", "labels", "message"),
        [
            (X, CLASSES[:5], "X and y must have the same length, got 6 and 5"),
            (X.tolist(), CLASSES, "X must be a numpy array"),
            (X, CLASSES.tolist(), "y must be a numpy array"),
            (X, np.array([0, 0, 0, np.nan, 0, 0]), "y[3] is nan"),
            (X, torch.tensor([0, 0, 0, 0, float("nan"), 0]), "y[4] is nan"),
            (da.from_array(X, chunks=2), CLASSES, "X is a dask.array and y is in "
             "memory; use dask.array.from_array(y, chunks=X.chunks[:1] + y.shape[1:])"),
            (X, da.from_array(CLASSES, chunks=2), "y is a dask.array and X is in "
             "memory; use y.compute()"),
        ],
        ids=["lengths", "X", "y", "nan", "nan in a tensor", "lazy X", "lazy y"],
    )  # fmt: skip
    def test_says_what_is_wrong_and_what_to_do(self, examples, labels, message):
        with pytest.raises(DataError, match=re.escape(message)):
            check_data(examples, labels)

    def test_the_remedy_for_labels_in_memory_works(self):
        lazy, y = da.from_array(X, chunks=(4, 2)), np.zeros((6, 3))

        labels = da.from_array(y, chunks=lazy.chunks[:1] + y.shape[1:])

        assert check_data(lazy, labels) == 6


class TestCheckModel:
    @pytest.mark.parametrize(
        ("model", "loss", "optimizer", "message"),
        [
            (nn.Linear, nn.MSELoss(), SGD, "model must be a torch.nn.Module or a "
             "function that returns one, got <class"),
            (nn.ReLU(), nn.MSELoss(), SGD, "model has no trainable parameters: ReLU"),
            (nn.Linear(1, 1).requires_grad_(False), nn.MSELoss(), SGD, "no trainable"),
            (nn.LazyLinear(1), nn.MSELoss(), SGD, "model.weight is not known yet; run"),
            (nn.LazyBatchNorm1d(affine=False), nn.MSELoss(), SGD, "of model.running_"),
            (nn.Linear(1, 1), "mse", SGD, "loss must be a function of (output, labels"
             "), such as MSELoss(); got 'mse'"),
            (nn.Linear(1, 1), nn.MSELoss, SGD, "loss is the class MSELoss; create one"),
            (nn.Linear(1, 1), nn.MSELoss(), "sgd", "optimizer must be a function that "
             "makes one from parameters"),
            (nn.Linear(1, 1), nn.MSELoss(), SGD([torch.zeros(1)]), "lr=0.1); got SGD"),
        ],
        ids=["class", "none", "frozen", "lazy", "lazy buffer", "text", "loss class",
             "name", "made"],
    )  # fmt: skip
    @pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
    def test_says_what_is_wrong_and_what_to_do(self, model, loss, optimizer, message):
        with pytest.raises(ModelError, match=re.escape(message)):
            check_model(model, loss, optimizer)

    def test_an_optimizer_class_and_a_loss_function_pass(self):
        assert check_model(nn.Linear(1, 1), lambda out, y: out, SGD) is None
        assert check_loss(torch.nn.functional.mse_loss) is None


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
            (lambda params: params, "optimizer must return a torch.optim.Optimizer, "
             "got [Parameter"),
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


class TestCheckValidation:
    @pytest.mark.parametrize("validation", [X, (X,), (X, CLASSES, X), [X, CLASSES]])
    def test_only_a_pair_is_taken(self, validation):
        message = f"a tuple (X, y), got a {type(validation).__name__}"

        with pytest.raises(OptionError, match=re.escape(message)):
            check_validation(nn.Linear(2, 3), nn.CrossEntropyLoss(), validation)

    @pytest.mark.parametrize(
        ("validation", "kind", "message"),
        [
            ((X, CLASSES[1:]), DataError, "X and y must have the same length"),
            ((X, CLASSES + 1), DataError, "y[2] is 3"),
            ((X[:, :1], CLASSES), ModelError, "model failed on 2 rows of X"),
        ],
        ids=["lengths", "label", "model"],
    )
    def test_says_that_it_is_about_validation(self, validation, kind, message):
        with pytest.raises(kind, match=re.escape(f"validation: {message}")):
            check_validation(nn.Linear(2, 3), nn.CrossEntropyLoss(), validation)

    def test_the_model_is_in_evaluation_mode_and_nothing_random_is_used_up(self):
        model = nn.Sequential(nn.Unflatten(0, (1, -1)), nn.Flatten(), nn.BatchNorm1d(4))
        noisy = nn.Sequential(model, Noise())
        state = torch.get_rng_state()

        check_validation(noisy, lambda output, y: output.mean(), (X, CLASSES))

        assert noisy.training
        assert torch.equal(torch.get_rng_state(), state)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand(1)
