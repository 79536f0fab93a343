"""Getting data ready, in this process; tests/cluster has sites with workers."""

import numpy as np
import pytest
from torch import nn

from daskdl import GradientSharing
from daskdl.errors import DataError
from daskdl.training.fit import _ready
from daskdl.training.fit_spec import FitSpec
from tests.support.part_sources import Parts

X = np.arange(12.0).reshape(6, 2)
SPEC = FitSpec(nn.MSELoss(), print, GradientSharing())


class Known(Parts):
    """Parts that take what was found."""

    def known(self, facts):
        whole = type(self)(*self.pairs)
        whole.lengths = [fact.rows for fact in facts]
        return whole


@pytest.mark.parametrize(
    ("phase", "said"), [("train", "X must"), ("validation", "validation: X must")]
)
def test_an_error_says_which_data_it_is_about(phase, said):
    sources = {"train": Known((X, None)), phase: Known((X[:0], None))}

    with (
        pytest.raises(DataError, match=f"^{said} not be empty"),
        _ready(sources, SPEC, False),
    ):
        pass


def test_what_is_not_known_of_data_is_found():
    sources = {"train": Known((X, None)), "validation": Known((X[:2], None))}

    with _ready(sources, SPEC, False) as ready:
        lengths = {phase: source.lengths for phase, source in ready.items()}

    assert lengths == {"train": [6], "validation": [2]}
