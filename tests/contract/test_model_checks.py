"""A model, a loss and an optimizer by themselves; with data in test_checks."""

import functools
import re

import pytest
import torch
from torch import nn

from daskdl.data.checks import check_loss, check_model
from daskdl.errors import ModelError

SGD = functools.partial(torch.optim.SGD, lr=0.1)


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
