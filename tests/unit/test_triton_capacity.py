"""What a Triton server's metrics and statistics say of its room."""

from __future__ import annotations

from laneway.workers.engines.protocol import EngineCapacity
from laneway.workers.engines.triton_capacity import Told, Waits, capacity_of, told_by

METRICS = """\
# HELP nv_trt_llm_request_metrics TRT LLM request metrics
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 0
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 64
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 3
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 1000
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 32
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="ensemble",version="1"} 0
"""
POOL = EngineCapacity(16, 16_384, 2048, 260)


def test_the_inner_models_gauges_are_found_by_whatever_name_it_is_asked():
    expected = Told(slots=64, kv_tokens=32_000, block_tokens=32)
    assert told_by(METRICS, "tensorrt_llm") == told_by(METRICS, "ensemble") == expected


def test_of_two_models_only_that_of_the_name_is_taken():
    both = METRICS + METRICS.replace('"tensorrt_llm"', '"draft"').replace("} 64", "} 8")
    assert told_by(both, "draft").slots == 8
    assert told_by(both, "ensemble") == Told()


def test_a_model_without_such_gauges_tells_nothing():
    assert told_by('# TYPE nv_cpu_utilization gauge\nnv_cpu_utilization{model="x"} 0.5\n', "x") == Told()


def test_the_pools_figures_hold_where_the_server_has_more_room_or_does_not_say():
    assert capacity_of(POOL, Told()) == POOL
    roomy = capacity_of(POOL, Told(slots=64, kv_tokens=32_000, block_tokens=32))
    assert (roomy.slots, roomy.kv_tokens, roomy.block_tokens) == (16, 16_384, 32)


def test_a_server_with_less_room_is_believed():
    small = capacity_of(POOL, Told(slots=4, kv_tokens=8192, block_tokens=64))
    assert (small.slots, small.kv_tokens, small.context_length) == (4, 8192, 2048)


def test_waits_are_those_since_the_last_look():
    waits = Waits()
    assert waits.mean_s(10, 5_000_000_000) == 0.5
    assert waits.mean_s(10, 5_000_000_000) == 0.0
    assert waits.mean_s(12, 9_000_000_000) == 2.0
