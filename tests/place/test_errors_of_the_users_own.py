"""What user code raises reaches the caller, also where its class is one of daskdl's."""

import pytest
from torch import nn

from daskdl import ModelError, ReplicaError
from tests.support.problems import rows, trainer

X, Y = rows()


class OwnError(ModelError):
    """Of the user, derived from an error of daskdl."""


class Failing(nn.CrossEntropyLoss):
    def forward(self, outputs, labels):
        if len(labels) > 2:  # it is tried on two rows before
            raise OwnError("boom")
        return super().forward(outputs, labels)


def test_a_class_derived_from_ours_is_the_cause():
    with pytest.raises(ReplicaError, match="OwnError: boom") as raised:
        trainer(False, loss=Failing()).fit(X, Y, batch_size=16)

    assert isinstance(raised.value.__cause__, OwnError)
