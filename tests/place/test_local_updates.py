"""What becomes of updates among threads: nothing is lost, all agree, in step."""

import numpy as np
import pytest

from tests.support import promises
from tests.support.problems import mlp, rows
from tests.support.promises import Place
from tests.support.recording import Recorded, records

X, Y = rows()


@pytest.fixture(params=[2, 3])
def place(request):
    """Where several replicas train: among threads of this process."""
    return Place(False, replicas=request.param, per_worker=request.param)


@pytest.fixture
def lone(one_thread):
    """Where one replica trains, with one thread of torch's."""
    return Place(False, replicas=1)


class TestConservation(promises.Conservation):
    pass


class TestAgreement(promises.Agreement):
    def test_nobody_is_further_ahead_than_allowed(self, place, tmp_path):
        master = Recorded(str(tmp_path), place.sharing(max_staleness=2))

        place.trainer(master=master).fit(X, Y, epochs=2, batch_size=8)

        leads = np.concatenate([e["leads"] for e in records(tmp_path, 1).values()])
        assert len(leads) > 50
        assert leads.max() <= 2


class TestInStep(promises.InStep):
    @pytest.fixture
    def model(self):
        """Without dropout: torch's generator is that of all replicas."""
        return mlp


class TestOneReplica(promises.OneReplica):
    pass


class TestFitAgain(promises.FitAgain):
    @pytest.fixture
    def place(self):
        return Place(False, replicas=2, per_worker=2)
