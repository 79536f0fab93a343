"""What has to hold whenever a barrier was passed, by the records of `recording.py`."""

import numpy as np

ATOL = 2e-5  # several hundred moves, each rounded to float32 at a size of about 1


def check_barrier(ends):
    """All who were at the end of an epoch have the same, and each update once."""
    assert ends
    first, *others = ends.values()
    for other in others:
        np.testing.assert_array_equal(other["shared"], first["shared"])
    founders = []
    for replica, end in ends.items():
        # What is in it is the sum of what the log says, and nothing else.
        np.testing.assert_allclose(end["shared"], end["expected"], rtol=0, atol=ATOL)
        if end["states"]:  # it shares another's vector, which is checked there
            continue
        updates = [tuple(u) for u in (*end["published"], *end["received"])]
        assert len(set(updates)) == len(updates), f"replica {replica} has some twice"
        assert not end["folds"], "a fold hides which updates it was made of"
        if np.array_equal(end["start"], first["start"]):
            founders.append(set(updates))
    assert all(updates == founders[0] for updates in founders[1:])
