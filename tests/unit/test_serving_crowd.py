from daskdl.inference.batching import MEMORY, Crowd


def batch(crowd, unanswered):
    """One leaves when so many calls came to be without an answer."""
    crowd.came(unanswered)
    crowd.left()


def test_a_crowd_that_has_become_smaller_is_waited_for_a_few_times_only():
    crowd = Crowd()
    batch(crowd, 8)

    waits = 0
    while not crowd.complete(4):
        batch(crowd, 4)
        waits += 1

    assert waits == MEMORY


def test_a_crowd_that_has_grown_is_known_at_once():
    crowd = Crowd()
    batch(crowd, 2)

    crowd.came(9)

    assert not crowd.complete(8)
    assert crowd.complete(9)


def test_one_caller_is_a_crowd_of_one_however_long_nobody_came():
    crowd = Crowd()
    for _ in range(2 * MEMORY):
        batch(crowd, 1)

    assert crowd.complete(1)
