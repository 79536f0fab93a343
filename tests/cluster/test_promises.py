"""What fits promise, on workers that are processes."""

import pytest

from tests.support import promises
from tests.support.problems import mlp, normalised

pytestmark = pytest.mark.slow


class TestConservation(promises.Conservation):
    pass


class TestAgreement(promises.Agreement):
    pass


@pytest.mark.parametrize("model", [mlp, normalised])
class TestInStep(promises.InStep):
    pass


class TestOneReplica(promises.OneReplica):
    pass


class TestFitAgain(promises.FitAgain):
    pass


class TestEarlyEnds(promises.EarlyEnds):
    pass
