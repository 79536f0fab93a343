import math
import pickle

import pytest

from daskdl.errors import OptionError
from daskdl.residuals import KeepResidual, ResidualClipping

RULES = [ResidualClipping(), KeepResidual()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
class TestEveryRule:
    @pytest.mark.parametrize("exchange", range(11))
    def test_never_bounds_below_the_threshold(self, rule, exchange):
        assert rule.bound(exchange, 0.5) >= 0.5

    def test_travels_to_a_worker(self, rule):
        assert pickle.loads(pickle.dumps(rule)) == rule


class TestResidualClipping:
    def test_cuts_every_few_exchanges_but_not_the_first(self):
        rule = ResidualClipping(multiple=3.0, frequency=4)

        cuts = [n for n in range(13) if rule.bound(n, 0.5) < math.inf]

        assert cuts == [4, 8, 12]
        assert rule.bound(4, 0.5) == 1.5

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"multiple": 0.99}, "multiple must be finite and >= 1, got 0.99"),
            ({"multiple": math.nan}, "multiple must be finite and >= 1, got nan"),
            ({"multiple": math.inf}, "multiple must be finite and >= 1, got inf"),
            ({"frequency": 0}, "frequency must be an integer >= 1, got 0"),
            ({"frequency": 2.5}, "frequency must be an integer >= 1, got 2.5"),
        ],
        ids=str,
    )
    def test_wrong_values_are_refused(self, options, message):
        with pytest.raises(OptionError, match=message):
            ResidualClipping(**options)


def test_keep_residual_has_no_limit():
    assert KeepResidual().bound(5, 0.5) == math.inf
