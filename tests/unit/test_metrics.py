"""Metrics have names with units, labels from a closed set, and gauges that equal a recount."""

import urllib.request

import pytest

from laneway.runtime import metrics


def shown(name: str) -> list[str]:
    return [line for line in metrics.exposition().decode().splitlines() if line.startswith(name)]


def test_a_counter_of_the_same_name_is_the_same_counter():
    first = metrics.counter("laneway_test_things_total", "Things.", ("lane",))
    first.labels(lane="batch").inc()
    metrics.counter("laneway_test_things_total", "Things.", ("lane",)).labels(lane="batch").inc()
    assert shown("laneway_test_things_total") == ['laneway_test_things_total{lane="batch"} 2.0']


def test_a_histogram_is_in_base_units():
    metrics.histogram("laneway_test_wait_seconds", "Wait.").observe(0.2)
    assert 'laneway_test_wait_seconds_bucket{le="0.25"} 1.0' in shown("laneway_test_wait_seconds_bucket")


@pytest.mark.parametrize("name", ["test_things_total", "laneway_test_ms", "laneway_Test_total", "laneway_things"])
def test_a_name_without_prefix_or_unit_is_refused(name):
    with pytest.raises(ValueError, match="laneway_<what>_<unit>"):
        metrics.counter(name, "x")


def test_a_label_that_could_grow_without_bound_is_refused():
    with pytest.raises(ValueError, match="tenant"):
        metrics.counter("laneway_test_calls_total", "x", ("tenant",))


def test_a_gauge_is_what_the_live_sets_say_and_ends_with_them():
    name, one, other = "laneway_test_live_jobs", {"a", "b"}, {"c"}
    with metrics.live_gauge(name, "Live.", ("lane",), lambda: [({"lane": "batch"}, float(len(one)))]):
        with metrics.live_gauge(name, "Live.", ("lane",), lambda: [({"lane": "batch"}, float(len(other)))]):
            assert shown(name) == [f'{name}{{lane="batch"}} 3.0']
            one.clear()
            assert shown(name) == [f'{name}{{lane="batch"}} 1.0']
        assert shown(name) == [f'{name}{{lane="batch"}} 0.0']
    assert shown(name) == []


def test_they_are_served_over_http():
    metrics.counter("laneway_test_served_total", "x").inc()
    with (
        metrics.metrics_listener("127.0.0.1:0") as address,
        urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer,
    ):
        assert b"laneway_test_served_total 1.0" in answer.read()
    with metrics.metrics_listener("") as address:
        assert address == ""
