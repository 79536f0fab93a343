import pytest

from daskdl.callbacks import Evaluate
from daskdl.errors import OptionError


def test_it_is_due_at_the_end_of_each_so_many_th_epoch():
    assert [epoch for epoch in range(10) if Evaluate(every=4).due(epoch)] == [3, 7]


def test_it_needs_no_workers():
    assert not Evaluate().runs_on_workers


@pytest.mark.parametrize("every", [0, -1, 1.0, True, "2", None])
def test_what_is_no_number_of_epochs_is_refused(every):
    with pytest.raises(OptionError, match="every must be a whole number >= 1, got "):
        Evaluate(every=every)
