"""The process's Prometheus metrics: names `laneway_<what>_<unit>`, labels from a closed set, gauges from live state.

Counters and histograms live as long as the process. A gauge is never counted up and down: while `live_gauge` is
open, each scrape computes it from the set it describes. No label ever holds a caller's text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest, start_http_server
from prometheus_client.registry import Collector

REGISTRY = CollectorRegistry(auto_describe=True)

UNITS = (
    "seconds", "bytes", "total", "ratio", "tokens", "jobs", "calls", "streams", "slots", "workers", "state", "version",
)  # fmt: skip
LABELS = frozenset({"lane", "pool", "outcome", "method", "reason", "state", "phase"})
# From a cached first token on a GPU to a long wait on a small machine.
SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)

Sample = tuple[Mapping[str, str], float]
_NAME = re.compile(rf"laneway_[a-z0-9_]+_({'|'.join(UNITS)})\Z")
_counters: dict[str, Counter] = {}
_histograms: dict[str, Histogram] = {}


def counter(name: str, description: str, labels: Sequence[str] = ()) -> Counter:
    """The counter of this name; asking twice gives the same one."""
    if name not in _counters:
        _check(name, labels)
        _counters[name] = Counter(name, description, labels, registry=REGISTRY)
    return _counters[name]


def histogram(
    name: str, description: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS_BUCKETS
) -> Histogram:
    """The histogram of this name; asking twice gives the same one."""
    if name not in _histograms:
        _check(name, labels)
        _histograms[name] = Histogram(name, description, labels, registry=REGISTRY, buckets=buckets)
    return _histograms[name]


@contextmanager
def live_gauge(
    name: str, description: str, labels: Sequence[str], read: Callable[[], Iterable[Sample]]
) -> Iterator[None]:
    """While open, each scrape asks `read` for samples. Several readers of one name add up.

    `read` runs on the scrape's thread: it may only look (len, tuple(set)), and must not block.
    """
    _check(name, labels)
    gauge = _live.gauges.setdefault(name, _Gauge(description, tuple(labels)))
    gauge.readers.append(read)
    try:
        yield
    finally:
        gauge.readers.remove(read)
        if not gauge.readers:
            _live.gauges.pop(name, None)


def exposition() -> bytes:
    """All metrics in Prometheus text form."""
    return generate_latest(REGISTRY)


@contextmanager
def metrics_listener(listen: str) -> Iterator[str]:
    """Serves the metrics over HTTP; yields the bound host:port, or "" where `listen` is empty."""
    if not listen:
        yield ""
        return
    host, _, port = listen.rpartition(":")
    server, thread = start_http_server(int(port), host.strip("[]"), registry=REGISTRY)
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=2.0)


class _Gauge:
    def __init__(self, description: str, labels: tuple[str, ...]) -> None:
        self.description = description
        self.labels = labels
        self.readers: list[Callable[[], Iterable[Sample]]] = []

    def totals(self) -> dict[tuple[str, ...], float]:
        totals: dict[tuple[str, ...], float] = {}
        for read in tuple(self.readers):
            for labels, value in read():
                key = tuple(labels.get(label, "") for label in self.labels)
                totals[key] = totals.get(key, 0.0) + value
        return totals


class _LiveGauges(Collector):
    def __init__(self) -> None:
        self.gauges: dict[str, _Gauge] = {}

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return ()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, gauge in tuple(self.gauges.items()):
            family = GaugeMetricFamily(name, gauge.description, labels=gauge.labels)
            for labels, value in gauge.totals().items():
                family.add_metric(labels, value)
            yield family


_live = _LiveGauges()
REGISTRY.register(_live)


def _check(name: str, labels: Sequence[str]) -> None:
    if not _NAME.match(name):
        raise ValueError(f"{name} is not laneway_<what>_<unit>; units: {', '.join(UNITS)}")
    if unknown := set(labels) - LABELS:
        raise ValueError(f"{name} has unknown labels {sorted(unknown)}; known: {sorted(LABELS)}")
