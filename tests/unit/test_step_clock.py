from daskdl.training.telemetry import StepClock


def clock_of(*times):
    return StepClock(now=iter(times).__next__)


def step(clock):
    clock.begin()
    clock.end()


def test_what_lies_between_steps_is_not_counted():
    clock = clock_of(0.0, 1.0, 7.0, 9.0)
    step(clock)
    step(clock)
    clock.chance()

    assert clock.take() == 3.0


def test_it_is_the_time_for_each_chance_whether_it_was_used_or_not():
    clock = clock_of(0.0, 1.0, 2.0, 5.0)
    step(clock)
    clock.chance()
    step(clock)
    clock.chance()

    assert clock.take() == 2.0


def test_it_begins_anew_when_it_is_taken():
    clock = clock_of(0.0, 4.0, 5.0, 6.0)
    step(clock)
    clock.chance()
    clock.take()
    step(clock)
    clock.chance()

    assert clock.take() == 1.0


def test_steps_without_a_chance_count_as_one():
    clock = clock_of(0.0, 4.0)
    step(clock)

    assert clock.take() == 4.0
