"""The bare limit of the CPU engine: OpenVINO GenAI's own loop in a process of its own, with nothing around it.

engine_overhead.py runs `serve` in a process of its own. It loads, prints `ready`, and for each line `SEED STREAMS
TOKENS` on stdin answers so many prompts, `slots` at once, as fast as it can; then it prints how many tokens it made and
in how many seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy
import openvino
import openvino_genai
from overhead_prompts import prompts

from laneway.runtime import model_files
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.engines.openvino import BLOCK_TOKENS, CHUNK_TOKENS

THREADS = 1  # the adapter's default where there are two cores


def _pipeline(slots: int, kv_tokens: int) -> openvino_genai.ContinuousBatchingPipeline:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = -(-kv_tokens // BLOCK_TOKENS)
    scheduler.max_num_batched_tokens = CHUNK_TOKENS
    scheduler.max_num_seqs = slots
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    path = model_files.find(model_files.SMOLLM2)
    return openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", {"INFERENCE_NUM_THREADS": THREADS})


def _answer(
    pipeline: openvino_genai.ContinuousBatchingPipeline, slots: int, asked: Sequence[list[int]], tokens: int
) -> int:
    config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
    waiting = list(enumerate(asked))[::-1]
    running = []
    made = 0
    while waiting or running:
        while waiting and len(running) < slots:
            number, ids = waiting.pop()
            prompt = openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
            running.append(pipeline.add_request(number, prompt, config))
        pipeline.step()
        for handle in running:
            while handle.can_read():
                made += sum(len(output.generated_ids) for output in handle.read().values())
        running = [handle for handle in running if handle.get_status() == openvino_genai.GenerationStatus.RUNNING]
    return made


def serve(slots: int, kv_tokens: int) -> None:
    pipeline, tokenizer = _pipeline(slots, kv_tokens), load_tokenizer("smollm2")
    _answer(pipeline, slots, [tokenizer.encode(text) for text in prompts(0, slots)], 2)  # builds kernels
    print("ready", flush=True)
    for line in sys.stdin:
        seed, streams, tokens = (int(text) for text in line.split())
        asked = [tokenizer.encode(text) for text in prompts(seed, streams)]
        began_s = time.perf_counter()
        made = _answer(pipeline, slots, asked, tokens)
        print(made, time.perf_counter() - began_s, flush=True)
