"""At the end of an epoch of few exchanges, replicas share what they have not sent."""

import numpy as np
import pytest

from daskdl import FixedThreshold
from tests.support.problems import (
    check_shows_what_was_validated,
    kept,
    plain,
    rows,
    trainer,
)
from tests.support.recording import ATOL, Recorded, check_barrier, records, vector

X, Y = rows()


@pytest.mark.parametrize("options", [{"max_staleness": 0}, {}], ids=str)
def test_the_agreed_model_has_all_progress(tmp_path, options):
    coarse = kept(
        replicas_per_worker=3,
        threshold=FixedThreshold(0.06),  # most progress stays below
        exchange_every=4,
        **options,
    )
    master = Recorded(str(tmp_path), coarse, atol=ATOL)
    fitted = trainer(False, master=master, optimizer=plain)

    fitted.fit(X, Y, epochs=2, batch_size=8, validation=(X, Y))

    for epoch in range(2):
        ends = records(tmp_path, epoch)
        check_barrier(ends)
        start = ends[0]["start"]
        moved = sum(end["progress"] for end in ends.values())
        off = np.abs(start + moved - ends[0]["shared"]).max()
        assert off < 0.01 * np.abs(moved).max()  # each sends eight bits
    np.testing.assert_array_equal(vector(fitted.model_), ends[0]["shared"])
    check_shows_what_was_validated(fitted, (X, Y))
