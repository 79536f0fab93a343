import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from daskdl.evaluation.per_example import guesses_of, ignored
from daskdl.keras import CrossEntropyOfProbabilities

LOGITS = torch.tensor([[1.0, 3.0, 0.0], [0.5, 0.0, -1.0], [0.0, 0.0, 0.0]])
CHANCES = LOGITS.double().softmax(1)
Y = torch.tensor([1, 2, 0])


@pytest.mark.parametrize(
    ("loss", "output"),
    [
        (nn.CrossEntropyLoss(), LOGITS),
        (functional.cross_entropy, LOGITS),
        (functools.partial(functional.cross_entropy, label_smoothing=0.1), LOGITS),
        (nn.NLLLoss(), LOGITS.log_softmax(1)),
        (functional.nll_loss, LOGITS.log_softmax(1)),
        (CrossEntropyOfProbabilities(), LOGITS.softmax(1)),
    ],
    ids=["module", "function", "partial", "nll", "nll function", "keras"],
)
def test_the_loss_says_what_the_outputs_are(loss, output):
    found = guesses_of(loss, output, Y)

    assert found.predicted.tolist() == [1, 0, 0]
    assert found.labels.tolist() == Y.tolist()
    expected = CHANCES[torch.arange(3), Y]
    torch.testing.assert_close(found.probabilities, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "loss", [nn.MultiMarginLoss(), lambda output, y: output.sum()], ids=["hinge", "own"]
)
def test_of_other_losses_the_probability_is_not_known(loss):
    found = guesses_of(loss, LOGITS, Y)

    assert found.predicted.tolist() == [1, 0, 0]
    assert found.probabilities is None


@pytest.mark.parametrize(
    ("output", "y"),
    [
        (LOGITS, LOGITS),
        (LOGITS[:, 0], Y),
        (LOGITS[..., None], Y[:, None]),
        ((LOGITS,), Y),
        (None, Y),
        (LOGITS, {"a": Y}),
    ],
    ids=["numbers", "one output", "sequence", "several", "unknown", "labels"],
)
def test_there_is_a_guess_only_of_one_class_for_each_row(output, y):
    assert guesses_of(nn.CrossEntropyLoss(), output, y) is None


def test_an_ignored_label_has_no_probability():
    found = guesses_of(nn.CrossEntropyLoss(), LOGITS, torch.tensor([1, -100, 0]))

    assert found.probabilities.isnan().tolist() == [False, True, False]


def test_a_row_is_ignored_if_all_its_labels_are():
    loss = nn.CrossEntropyLoss(ignore_index=7)
    y = torch.tensor([[7, 7], [7, 0], [1, 2]])

    assert ignored(loss, y).tolist() == [True, False, False]
    assert ignored(loss, y[:, 0]).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("loss", "y"),
    [
        (nn.MSELoss(), torch.zeros(3)),
        (nn.CrossEntropyLoss(), LOGITS.softmax(1)),
        (nn.CrossEntropyLoss(), (Y,)),
        (nn.CrossEntropyLoss(), None),
    ],
    ids=["numbers", "probabilities", "several", "none"],
)
def test_without_class_indices_nothing_is_ignored(loss, y):
    assert ignored(loss, y) is None
