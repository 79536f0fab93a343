from daskdl.data import batching


def test_an_x_of_nothing_is_named_too_so_that_it_can_be_refused():
    assert batching.named_both((None, None)) == {"X": None}
