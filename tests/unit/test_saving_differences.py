"""What two modules differ in is named, and where it is."""

import pytest
import torch
from torch import nn

from daskdl.saving.module_state import difference


def noted(note):
    module = nn.ReLU()
    module.note = note
    return module


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        (nn.ReLU(), nn.ReLU(), None),
        (nn.Linear(2, 1), nn.Linear(2, 1), None),
        (nn.Linear(2, 1), nn.Linear(2, 1).half(), None),
        (nn.ReLU(), nn.GELU(), " is a ReLU"),
        (nn.Sequential(nn.ReLU()), nn.Sequential(), ".0 is a ReLU"),
        (nn.Sequential(), nn.Sequential(nn.ReLU()), " has fewer layers"),
        (nn.Dropout(0.1), nn.Dropout(0.2), " has a value of p"),
        (nn.Dropout(1), nn.Dropout(1.0), " has a value of p"),
        (nn.Linear(2, 1), nn.Linear(2, 1, bias=False), " has a parameter bias"),
        (nn.LSTM(2, 3), nn.LSTM(2, 3), None),
        (noted((1, [2])), noted((1, [2])), None),
        (noted((1, [2])), noted((1, [2.0])), " has a value of note"),
        (noted(torch.ones(2)), noted(torch.ones(2)), " has a value of note"),
        (noted(1), nn.ReLU(), " has an attribute note"),
        (nn.ReLU(), noted(1), " has an attribute note"),
        (nn.NLLLoss(torch.ones(2)), nn.NLLLoss(), None),
        (nn.NLLLoss(), nn.NLLLoss(torch.ones(2)), " has a buffer weight"),
        (nn.NLLLoss(torch.ones(2)), nn.NLLLoss(torch.ones(3)), " has a buffer weight"),
    ],
)
def test_the_first_difference_is_found(one, other, found):
    text = difference(one, other)

    assert text is found if found is None else text.startswith(found)
