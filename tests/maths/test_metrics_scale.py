"""What class scores are, as a loss or the scores themselves say."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from daskdl.evaluation.metric_sets import scale_of
from daskdl.keras import CrossEntropyOfProbabilities
from tests.support.problems import shown

SCORES = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.5, 0.25]])


class Focal(nn.Module):
    scale = "log_probabilities"

    def forward(self, output, y):
        return output.mean()


@pytest.mark.parametrize(
    ("loss", "scale"),
    [
        (nn.CrossEntropyLoss(), "logits"),
        (nn.MultiMarginLoss(), "logits"),
        (nn.BCEWithLogitsLoss(), "logits"),
        (nn.MultiLabelSoftMarginLoss(), "logits"),
        (nn.NLLLoss(), "log_probabilities"),
        (nn.BCELoss(), "probabilities"),
        (CrossEntropyOfProbabilities(), "probabilities"),
        (functional.nll_loss, "log_probabilities"),
        (functools.partial(functional.binary_cross_entropy), "probabilities"),
        (functools.partial(functional.cross_entropy, ignore_index=1), "logits"),
        (Focal(), "log_probabilities"),
    ],
    ids=shown,
)
def test_losses_that_are_known_say_it_whatever_the_scores_look_like(loss, scale):
    assert scale_of(loss, SCORES.softmax(1)) == scale


@pytest.mark.parametrize(
    ("output", "scale"),
    [
        (SCORES, "logits"),
        (SCORES.softmax(1), "probabilities"),
        (SCORES.softmax(1).bfloat16(), "probabilities"),
        (SCORES.log_softmax(1), "log_probabilities"),
        (SCORES[..., None].log_softmax(1).expand(2, 3, 4), "log_probabilities"),
        (torch.zeros(2, 3), "logits"),
        (torch.tensor([[2.0, -1.0], [1.5, -0.5]]), "logits"),
        (torch.ones(2, 1), "logits"),
        (torch.full((2,), 0.5), "logits"),
        ({"a": SCORES.softmax(1)}, "logits"),
    ],
    ids=[
        *("logits", "probabilities", "bfloat16", "logarithms", "steps"),
        *("zeros", "sum of 1", "one score", "no axis", "several"),
    ],
)
def test_of_other_losses_the_scores_over_several_classes_say_it(output, scale):
    assert scale_of(lambda output, y: output.mean(), output) == scale
    assert scale_of(None, output) == scale
