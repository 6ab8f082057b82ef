from backstay.poll import INTERVAL_S, MAX_SKIPPED, Poll


def count_questions(seconds_per_call: float, num_calls: int, horizon_s: float = 1e9) -> int:
    """How often rank 0 is asked."""
    poll, now, num_asked = Poll(), 0.0, 0
    for _ in range(num_calls):
        now += seconds_per_call
        if poll.is_time():
            num_asked += 1
            poll.num_left = poll.plan(now, horizon_s)
    return num_asked


def test_fast_steps_are_asked_about_once_a_second() -> None:
    assert 10 <= count_questions(0.01, 1000) <= 13


def test_slow_steps_are_asked_about_each_time() -> None:
    assert count_questions(INTERVAL_S * 2, 50) == 50


def test_nothing_is_slept_through_that_is_known_to_be_due() -> None:
    assert count_questions(0.01, 1000, horizon_s=0.1) >= 90


def test_a_clock_that_stands_still_asks_each_time() -> None:
    assert count_questions(0.0, 20) == 20


def test_the_number_of_calls_that_pass_has_a_bound() -> None:
    poll = Poll()
    assert poll.is_time()
    assert poll.plan(0.0, 1e9) == 0
    assert poll.is_time()
    assert poll.plan(1e-9, 1e9) == MAX_SKIPPED
