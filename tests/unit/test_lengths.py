"""Learned lengths: of the narrowest key that is known well enough, off by little, and forgotten when habits change."""

import math
import time

from hypothesis import given
from hypothesis import strategies as st

from laneway.policy import lengths
from laneway.policy.lengths import HALF_LIFE, OBSERVATIONS_MIN, RELATIVE_ACCURACY, ROUTES_MAX, LengthBook


def learned(
    book: LengthBook, tokens: int, times: int = OBSERVATIONS_MIN, *, tenant: str = "t", route: str = ""
) -> None:
    for _ in range(times):
        book.observe(tenant, "chat", tokens, route=route)


def near(predicted: int, tokens: int) -> bool:
    return abs(predicted - tokens) <= RELATIVE_ACCURACY * tokens + 1


def test_lengths_are_assumed_until_they_are_learned():
    book = LengthBook()
    assert book.predict("t", "chat", 0.5, 100) == 50
    assert book.predict("t", "chat", 0.9, 100) == 100
    assert book.predict("t", "chat", 0.5, 100, min_tokens=80) == 80
    learned(book, 10, OBSERVATIONS_MIN - 1)
    assert book.predict("t", "chat", 0.5, 100) == 50
    book.observe("other", "chat", 10)
    assert near(book.predict("t", "chat", 0.5, 100), 10), "the model's own, until the tenant's are known"
    assert book.predict("t", "chat", 0.5, 5) == 5


def test_a_route_has_lengths_of_its_own_and_backs_off_to_its_tenant_and_then_the_model():
    book = LengthBook()
    learned(book, 1000, tenant="other")
    assert near(book.predict("t", "chat", 0.5, 5000, route="summary"), 1000)
    learned(book, 100, route="chat")
    assert near(book.predict("t", "chat", 0.5, 5000, route="summary"), 100), "the tenant's"
    learned(book, 10, OBSERVATIONS_MIN - 1, route="summary")
    assert near(book.predict("t", "chat", 0.9, 5000, route="summary"), 100)
    learned(book, 10, 1, route="summary")
    assert near(book.predict("t", "chat", 0.9, 5000, route="summary"), 10)
    assert near(book.predict("t", "chat", 0.9, 5000, route="chat"), 100)


def test_a_changed_habit_is_learned_again():
    book = LengthBook()
    learned(book, 10, 6 * HALF_LIFE)
    learned(book, 400, 2 * HALF_LIFE)
    assert near(book.predict("t", "chat", 0.1, 1000), 400)


def test_a_tenant_has_so_many_routes_and_the_one_not_heard_of_longest_is_forgotten():
    book = LengthBook()
    for n in range(ROUTES_MAX):
        learned(book, 10 + 10 * n, route=f"r{n}")
    assert near(book.predict("t", "chat", 0.5, 5000, route="r0"), 10)
    learned(book, 10, 1, route="r0")
    learned(book, 5000, 1, route="one more")
    assert near(book.predict("t", "chat", 0.5, 5000, route="r0"), 10)
    assert not near(book.predict("t", "chat", 0.5, 5000, route="r1"), 20)
    assert len(book) == ROUTES_MAX + 2


def test_routes_of_one_tenant_push_out_no_other_tenant():
    book = LengthBook()
    learned(book, 10, tenant="quiet")
    for n in range(lengths.KEYS_MAX + 1):
        book.observe("loud", "chat", 1000, route=f"r{n}")
    assert near(book.predict("quiet", "chat", 0.5, 5000), 10)


@given(st.lists(st.integers(1, 100_000), min_size=60, max_size=200), st.floats(0.05, 0.95))
def test_quantiles_are_off_by_the_stated_share_at_most(seen: list[int], q: float):
    book = LengthBook()
    for length in seen:
        book.observe("t", "m", length)
    predicted = book.predict("t", "m", q, 1_000_000)
    ordered = sorted(seen[: len(seen) - len(seen) // lengths.REFRESH_SHARE + 1])
    rank = math.floor(q * (len(seen) - 1))
    low, high = ordered[max(0, rank - 8)], sorted(seen)[min(len(seen) - 1, rank + 8)]
    assert low * (1 - RELATIVE_ACCURACY) - 1 <= predicted <= high * (1 + RELATIVE_ACCURACY) + 1


def test_learning_and_asking_cost_some_microseconds():
    """Measured: 4 us to learn (three keys), below 1 us to ask. The bar is loose: the machine may be busy."""
    book = LengthBook()
    began_s = time.process_time()
    for n in range(5000):
        book.observe("t", "chat", 1 + n % 700, route="r")
        book.predict("t", "chat", 0.5, 5000, route="r")
        book.predict("t", "chat", 0.9, 5000, route="r")
    assert (time.process_time() - began_s) / 5000 < 60e-6


def test_a_sketch_has_so_many_bins_and_no_more():
    sketch = lengths.LengthSketch()
    for n in range(2 * HALF_LIFE):
        sketch.add(round(math.exp(n / (2 * HALF_LIFE) * math.log(1e9))))
    assert len(sketch._main._store.bins) == lengths.BINS_MAX
    assert near(sketch.quantile(0.9), round(math.exp(0.9 * math.log(1e9))))
