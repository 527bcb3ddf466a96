"""What `laneway models` shows of pools and their workers."""

from __future__ import annotations

from typing import Any

from laneway.cli.models import COLUMNS, row_of, trouble, with_residents
from laneway.client import Model, Worker
from laneway.client.decode import model_of, worker_of
from laneway.core.fleet import WorkerLease, WorkerState
from laneway.core.lanes import Lane
from laneway.core.selectors import Selector
from laneway.runtime.catalogue import catalogue_of
from laneway.runtime.settings import ModelSettings, Settings
from laneway.scheduler.wire import model_to_proto, worker_to_proto

MODEL: dict[str, Any] = {
    "name": "chat", "tier": "fp8", "pool": "chat-fp8", "engine": "trtllm", "context_length": 8192,
    "vocabulary_size": 1000, "capabilities": ("seed",), "workers": 1, "price_per_million_prompt_tokens": 0.0,
    "price_per_million_completion_tokens": 0.0, "planned_workers": 3,
}  # fmt: skip
WORKER: dict[str, Any] = {
    "worker_id": "w-1", "name": "w", "pool": "chat-fp8", "engine": "trtllm", "state": "READY", "detail": "", "slots": 8,
    "running": 3, "kv_tokens": 1000, "kv_tokens_used": 250, "prefill_tokens_per_s": 0.0, "decode_tokens_per_s": 0.0,
    "started_s": 0.0, "seen_s": 0.0, "jobs_done": 0, "tokens_done": 0, "capabilities": ("kv_figures",), "busy_s": 0.0,
    "process_id": 1,
}  # fmt: skip


def model(**changes: Any) -> Model:
    return Model(**(MODEL | changes))


def worker(**changes: Any) -> Worker:
    return Worker(**(WORKER | changes))


def shown(changes: dict[str, Any], *workers: dict[str, Any]) -> dict[str, object]:
    row = row_of(model(**changes), [worker(**each) for each in workers])
    return dict(zip(COLUMNS, row, strict=True))


def test_workers_are_counted_by_their_state_with_how_far_they_have_loaded():
    row = shown({}, {}, {"state": "STARTING", "load_progress": 0.4}, {"state": "BROKEN"}, {"state": "DRAINING"})
    assert row["WORKERS"] == "1 of 3 ready, 1 loading 40 %, 1 unhealthy, 1 draining"
    assert (row["SLOTS"], row["KV"]) == ("6/16", "25 %"), "of those that hold something"
    assert shown({})["WORKERS"] == "none of 3"
    assert shown({})["SLOTS"] == shown({})["KV"] == ""


def test_kv_that_an_engine_does_not_tell_is_marked():
    assert shown({}, {"capabilities": ()})["KV"] == "~25 %"


def test_engines_are_those_of_the_workers():
    assert shown({}, {}, {"engine": "openvino"})["ENGINE"] == "openvino, trtllm"
    assert shown({})["ENGINE"] == "trtllm"


def test_prices_and_selectors_are_told_where_there_are_any():
    assert (shown({})["PRICE"], shown({})["TAKES"]) == ("", "")
    priced = shown({"price_per_million_prompt_tokens": 0.1, "price_per_device_s": 0.002})
    assert priced["PRICE"] == "0.1 + 0 /M, 0.002 /s"
    assert shown({"selector": Selector((Lane.BATCH,), 100)})["TAKES"] == "lanes batch; prompts from 100 tokens"


def test_each_worker_that_is_not_ready_has_a_line_with_its_reason():
    workers = [
        worker(),
        worker(name="a", state="STARTING", load_progress=0.126, detail="loading, 5 s"),
        worker(name="b", state="BROKEN", detail="out of memory"),
    ]
    assert trouble(workers) == [
        "a of chat-fp8 is loading 13 %: loading, 5 s",
        "b of chat-fp8 is unhealthy: out of memory",
    ]


def test_what_the_catalogue_and_a_lease_say_reaches_the_command():
    entry = ModelSettings(
        name="chat", tier="fp8", engine="simulated", weights="w", precision="fp8", price_per_device_s=0.5,
        lanes=(Lane.BATCH,), prompt_tokens_min=5, prompt_tokens_max=9, features=("seed",), workers=3,
    )  # fmt: skip
    (pool,) = catalogue_of(Settings(models=(entry,))).pools
    told = model_of(model_to_proto(pool, 2))
    assert (told.weights, told.precision, told.price_per_device_s) == ("w", "fp8", 0.5)
    assert told.selector == pool.selector == Selector((Lane.BATCH,), 5, 9, ("seed",))
    assert (told.workers, told.planned_workers) == (2, 3)
    lease = WorkerLease("w-1", "w", pool.name, "simulated", WorkerState.STARTING, load_progress=0.25, engine_deaths=4)
    shown_worker = worker_of(worker_to_proto(lease))
    assert (shown_worker.state, shown_worker.load_progress, shown_worker.engine_deaths) == ("STARTING", 0.25, 4)


def test_json_has_each_pool_with_its_own_workers():
    (first, second) = with_residents([model(), model(pool="other")], [worker(pool="other")])
    assert (first["pool"], first["resident"]) == ("chat-fp8", [])
    assert [each["worker_id"] for each in second["resident"]] == ["w-1"]  # type: ignore[attr-defined] # a list
