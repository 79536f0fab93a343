"""Getting data ready, in this process; tests/cluster has sites with workers."""

import numpy as np
import pytest

from daskdl.data.options import ReadOptions
from daskdl.errors import DataError
from daskdl.training.fit import FitOptions, Process
from tests.support.part_sources import Parts

X = np.arange(12.0).reshape(6, 2)
FIT = FitOptions(ReadOptions(2), 1, True, 2, "direct")


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
        Process().ready(sources, FIT, 0),
    ):
        pass


def test_what_is_not_known_of_data_is_found():
    sources = {"train": Known((X, None)), "validation": Known((X[:2], None))}

    with Process().ready(sources, FIT, 0) as ready:
        lengths = {phase: source.lengths for phase, source in ready.items()}

    assert lengths == {"train": [6], "validation": [2]}
