from daskdl.channel.inbox import Heard, Word


def test_a_word_counts_at_once_where_nothing_can_overtake_it():
    heard = Heard()

    heard.hear(1, Word(4, step=7, done=0))

    assert heard.steps() == {1: 7}
    assert heard.slowest(lap=0) is None
    assert heard.slowest(lap=1) == 7


def test_a_word_that_overtook_its_updates_counts_when_they_are_here():
    heard = Heard()
    heard.hear(1, Word(2, step=3), complete=2)

    heard.hear(1, Word(4, step=7), complete=2)
    assert heard.steps() == {1: 3}
    heard.catch_up(1, complete=3)
    assert heard.steps() == {1: 3}
    heard.catch_up(1, complete=4)

    assert heard.steps() == {1: 7}


def test_the_last_update_is_known_from_the_word_alone():
    heard = Heard()

    heard.hear(1, Word(4, step=7), complete=0)

    assert heard.last() == {1: 4}
    assert heard.others() == []


def test_only_what_says_more_is_news():
    heard = Heard()

    assert heard.hear(1, Word(4, 7), complete=0)
    assert not heard.hear(1, Word(4, 7), complete=0)
    assert not heard.hear(1, Word(3, 6), complete=0)
    assert heard.hear(1, Word(4, 7, done=0), complete=0)


def test_the_last_news_of_each_is_described_with_its_age():
    now = 10.0
    heard = Heard(clock=lambda: now)
    heard.hear(2, Word(1, 5))
    heard.hear(1, Word(4, 7))
    now = 12.0
    heard.hear(1, Word(4, 7))  # says nothing new
    heard.hear(2, Word(1, 6))
    now = 12.5

    assert heard.described() == [
        "replica 1 at step 7, update 4, 2.5 s ago",
        "replica 2 at step 6, update 1, 0.5 s ago",
    ]
    heard.lose(1)
    assert heard.described() == ["replica 2 at step 6, update 1, 0.5 s ago"]


def test_words_never_go_back():
    heard = Heard()
    heard.hear(1, Word(4, 7, 1))

    heard.hear(1, Word(2, 3, -1))

    assert heard.steps() == {1: 7}
    assert heard.slowest(lap=1) is None


def test_nobody_waits_for_one_that_is_lost_whoever_names_it():
    heard = Heard()
    heard.hear(1, Word(1, 2))
    heard.hear(2, Word(1, 5))

    heard.lose(1)
    assert not heard.hear(1, Word(9, 9))

    assert heard.others() == [2]
    assert heard.slowest(lap=0) == 5
    assert heard.last() == {2: 1}
