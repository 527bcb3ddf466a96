"""When an engine is taken for hung, and when it must not be."""

from laneway.workers.step_watch import StepWatch

TICK_S = 0.25


def test_an_engine_whose_first_step_takes_a_while_is_not_hung():
    watch = StepWatch(30.0)
    assert not watch.hung(100_000.0, 0, has_work=True)  # work came before anybody had looked
    assert not any(watch.hung(100_000.0 + TICK_S * n, 0, has_work=True) for n in range(1, 100))


def test_an_engine_that_stands_still_with_work_is_hung_once_for_each_timeout():
    watch = StepWatch(30.0)
    hung = [n for n in range(400) if watch.hung(500.0 + TICK_S * n, 7, has_work=True)]
    assert hung == [121, 242, 363]


def test_a_step_and_an_idle_moment_begin_the_count_anew():
    watch = StepWatch(1.0)
    assert not any(watch.hung(TICK_S * n, n // 4, has_work=True) for n in range(40))
    assert not any(watch.hung(10.0 + TICK_S * n, 10, has_work=n % 4 != 0) for n in range(40))


def test_time_in_which_the_worker_itself_was_stopped_does_not_count():
    watch = StepWatch(30.0)
    watch.hung(1.0, 5, has_work=True)
    assert not watch.hung(601.0, 5, has_work=True)
    assert not watch.hung(601.25, 6, has_work=True)
