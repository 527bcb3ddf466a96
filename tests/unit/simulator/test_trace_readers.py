"""Readers of recorded traces: published rows are read, and what is wrong is named by file, line and field."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from laneway.core.errors import ConfigError
from laneway.simulator.readers import FORMATS, detected, read_trace
from laneway.simulator.trace import NO_SESSION

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2222000,879,0
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
AZURE_2025 = """TIMESTAMP,NumImages,ContextTokens,GeneratedTokens
2024-10-10 00:00:00.5,2,1000,20
2024-10-10 00:00:01.0,0,400,30
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [0, 1, 2]}
{"timestamp": 250, "input_length": 1024, "output_length": 1, "hash_ids": [0, 7]}
"""
BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,a,1.5,ChatGPT,472,18,490,Conversation log
45,b,2.5,GPT-4,1087,0,1087,API log
"""
BAILIAN = """{"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.0, "input_length": 40, "output_length": 9, "type": "text", "turn": 1, "hash_ids": [10, 11, 12]}
{"chat_id": 2, "parent_chat_id": -1, "timestamp": 2.0, "input_length": 40, "output_length": 9, "type": "file", "turn": 1, "hash_ids": [13, 11, 12]}
{"chat_id": 3, "parent_chat_id": 1, "timestamp": 31.5, "input_length": 64, "output_length": 7, "type": "text", "turn": 2, "hash_ids": [10, 11, 14, 15]}
"""  # noqa: E501 - rows as they are
SESSION = {
    "id": "trace_1", "block_size": 64, "hash_id_scope": "local", "tool_tokens": 100, "system_tokens": 28,
    "requests": [
        {"t": 0.0, "type": "n", "in": 130, "out": 20, "hash_ids": [1, 2, 3], "stop": "tool_use", "api_time": 2.0},
        {"t": 9.0, "type": "subagent", "requests": [
            {"t": 9.0, "type": "n", "in": 70, "out": 5, "hash_ids": [9, 10], "think_time": 0.0, "api_time": 1.0},
        ]},
        {"t": 12.5, "type": "s", "in": 200, "out": 30, "hash_ids": [1, 2, 3, 4], "think_time": 7.0, "api_time": 3.0},
        {"t": 20.0, "type": "s", "in": 256, "out": 1, "hash_ids": [1, 2, 3, 4, 5]},
    ],
}  # fmt: skip
COMPACT = "t_ms,tokens_in,tokens_out,blocks\n0,1100,50,0 4-5\n40,1536,3,0 9 4-5\n"
COMPACT_SESSIONS = """session,turn,agent,t_s,tokens_in,tokens_out,tokens_reused,think_s,api_s,stop
7,0,0,0,640,169,0,0,7.5,tool
7,1,0,19,1280,296,640,12,9.0,tool
7,2,1,30,640,20,0,2,1.0,tool
7,3,0,40,1300,20,1280,,,end
8,0,0,0,64,2,0,0,1.0,end
"""
WINDOWS = "pool,client,window_s,rate,cv,family\nm,1,0,2.0,1.5,G\nm,1,600,1.0,1.0,W\nm,2,600,0.5,3.0,G\n"
LENGTHS = """pool,client,field,q1,q5,q10,q20,q30,q40,q50,q60,q70,q80,q90,q95,q99,q99.9,q100
m,1,input,10,10,10,10,10,10,20,20,20,20,30,30,30,30,30
m,1,output,1,1,1,1,1,1,2,2,2,2,3,3,3,3,3
"""


def written(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(content.encode()))
    else:
        path.write_text(content, encoding="utf-8")
    return path


CONTENT = {
    "azure": ("a.csv", AZURE),
    "azure-2025": ("m.csv.gz", AZURE_2025),
    "mooncake": ("c.jsonl", MOONCAKE),
    "burstgpt": ("BurstGPT_1.csv", BURSTGPT),
    "bailian": ("q.jsonl", BAILIAN),
    "agent-sessions": ("trace_1.json", json.dumps(SESSION)),
    "compact": ("x.csv", COMPACT),
    "compact-lengths": ("l.csv", "tokens_in,tokens_out\n3772,54\n"),
    "compact-sessions": ("agent-sessions.csv.gz", COMPACT_SESSIONS),
}


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_is_known_by_its_head_packed_or_not(tmp_path: Path, name: str, packed: bool):
    file, content = CONTENT[name]
    path = written(tmp_path, file.removesuffix(".gz") + (".gz" if packed else ""), content)
    assert detected(path).name == name
    assert len(read_trace(path)) > 0


def test_what_has_no_known_format_is_refused_with_the_known_ones(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"other\.csv, line 1: of no known format .*mooncake"):
        read_trace(written(tmp_path, "other.csv", "when,what\n1,2\n"))
    with pytest.raises(ConfigError, match="no format of a trace"):
        read_trace(tmp_path, "azur")
    with pytest.raises(ConfigError, match="has neither"):
        read_trace(tmp_path)


def test_azure_times_become_seconds_and_failed_answers_one_token(tmp_path: Path):
    trace = read_trace(written(tmp_path, "a.csv", AZURE))
    assert trace.arrival_s == pytest.approx([0.0, 4.314579, 4.54161], abs=2e-6)
    assert trace.prompt_tokens.tolist() == [374, 396, 879]
    assert trace.output_tokens.tolist() == [44, 109, 1]
    assert "1 answers of 0 tokens count as 1" in trace.notes


def test_azure_times_of_2024_carry_their_zone(tmp_path: Path):
    trace = read_trace(written(tmp_path, "a.csv", AZURE_2024))
    assert trace.arrival_s == pytest.approx([0.0, 0.007405], abs=2e-6)


def test_azure_images_are_told_of(tmp_path: Path):
    trace = read_trace(written(tmp_path, "m.csv", AZURE_2025))
    assert trace.prompt_tokens.tolist() == [1000, 400]
    assert "2 images are not counted as tokens" in trace.notes


def test_mooncake_blocks_are_those_that_a_prompt_fills(tmp_path: Path):
    trace = read_trace(written(tmp_path, "c.jsonl", MOONCAKE))
    assert trace.arrival_s.tolist() == [0.0, 0.25]
    assert trace.prefixes is not None
    assert [trace.prefixes.of(row).tolist() for row in (0, 1)] == [[0, 1], [0, 7]]


def ticked(ticks: int) -> str:
    rows = [
        {"timestamp": 3000 * tick + tick % 2, "input_length": 100 + row, "output_length": 1, "hash_ids": []}
        for tick in range(ticks)
        for row in range(4)
    ]
    return "\n".join(map(json.dumps, rows))


def test_mooncake_ticks_are_spread_over_their_length_in_order(tmp_path: Path):
    path = written(tmp_path, "c.jsonl", ticked(200))
    spread, same, other = read_trace(path), read_trace(path), read_trace(path, seed=1)
    clumped = read_trace(path, spread=False)
    assert np.count_nonzero(np.diff(clumped.arrival_s) == 0.0) == 600
    assert np.count_nonzero(np.diff(spread.arrival_s) == 0.0) == 0
    late_s = spread.arrival_s - clumped.arrival_s
    assert late_s.min() >= 0.0
    assert late_s.max() < 3.01
    assert late_s.mean() == pytest.approx(1.5, abs=0.1)
    assert np.array_equal(spread.prompt_tokens, clumped.prompt_tokens)
    assert np.array_equal(spread.arrival_s, same.arrival_s)
    assert not np.array_equal(spread.arrival_s, other.arrival_s)
    assert any("ticks of 3 s" in note or "ticks of 2.99" in note or "ticks of 3.0" in note for note in spread.notes)


def test_burstgpt_models_are_tenants_and_failures_stay(tmp_path: Path):
    trace = read_trace(written(tmp_path, "b.csv", BURSTGPT))
    assert trace.arrival_s.tolist() == [0.0, 40.0]
    assert [trace.tenants[tenant] for tenant in trace.tenant] == ["ChatGPT", "GPT-4"]
    assert trace.output_tokens.tolist() == [18, 1]


def test_bailian_equal_text_after_another_beginning_is_no_equal_prefix(tmp_path: Path):
    trace = read_trace(written(tmp_path, "q.jsonl", BAILIAN))
    assert trace.prefixes is not None
    first, other, later = (trace.prefixes.of(row).tolist() for row in range(3))
    assert first == later[:2]
    assert not set(first) & set(other)
    assert set(trace.session.tolist()) == {NO_SESSION}


def test_bailian_turns_close_their_loop_when_asked_to(tmp_path: Path):
    trace = read_trace(written(tmp_path, "q.jsonl", BAILIAN), closed=True)
    turns = np.flatnonzero(trace.session == trace.session[0])
    assert trace.prompt_tokens[turns].tolist() == [40, 64]
    assert trace.think_s[turns].tolist() == [0.0, 30.5]


def test_agent_turns_keep_their_order_and_think_times(tmp_path: Path):
    written(tmp_path, "s/trace_1.json", json.dumps(SESSION))
    written(tmp_path, "s/trace_2.json.gz", json.dumps(SESSION | {"id": "trace_2"}))
    trace = read_trace(tmp_path / "s", starts_s=np.array([5.0, 2.0]))
    assert trace.session.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert trace.arrival_s.tolist() == [2.0, 0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0]
    assert trace.prompt_tokens.tolist() == [130, 70, 200, 256] * 2
    # The last one has no think time of its own: 20.0 less 12.5 and the 3 s that the service took.
    assert trace.think_s.tolist() == [0.0, 0.001, 7.0, 4.5] * 2
    assert trace.prefixes is not None
    one, _, three, _ = (trace.prefixes.of(row) for row in range(4))
    assert len(one) == 2
    assert np.array_equal(one, three[:2])
    assert not set(one.tolist()) & set(trace.prefixes.of(4).tolist())


def test_session_files_with_blocks_of_two_sizes_or_none_at_all_are_refused(tmp_path: Path):
    written(tmp_path, "s/trace_1.json", json.dumps(SESSION))
    written(tmp_path, "s/trace_2.json", json.dumps(SESSION | {"block_size": 32}))
    with pytest.raises(ConfigError, match=r"block_size: the sessions have blocks of \[32, 64\]"):
        read_trace(tmp_path / "s")
    assert len(read_trace(tmp_path / "s/trace_1.json", prompt_tokens_most=255)) == 0
    assert len(read_trace(tmp_path / "s/trace_1.json", prompt_tokens_most=256)) == 4
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="no session files"):
        read_trace(tmp_path / "none", "agent-sessions")


def test_an_older_file_has_no_think_times_and_they_are_taken_from_its_clock(tmp_path: Path):
    calls = [{"t": 0.0, "type": "n", "in": 64, "out": 5, "hash_ids": [9]}, {"t": 2.5, "in": 128, "out": 5}]
    agent = {"t": 10.0, "type": "subagent", "duration_ms": 4000, "requests": calls}
    rows = [{"t": 0.0, "in": 64, "out": 1, "api_time": 1.5}, agent, {"t": 21.0, "in": 192, "out": 1}]
    trace = read_trace(
        written(tmp_path, "old.json", json.dumps({"block_size": 64, "requests": rows})), "agent-sessions"
    )
    assert trace.prompt_tokens.tolist() == [64, 64, 128, 192]
    assert trace.think_s.tolist() == [0.0, 0.001, 2.5, 7.0]


def test_long_think_times_are_cut_and_long_sessions_left_out(tmp_path: Path):
    path = written(tmp_path, "s.csv", COMPACT_SESSIONS)
    assert read_trace(path, think_s_most=5.0).think_s.tolist() == [0.0, 5.0, 2.0, 5.0, 0.0]
    short = read_trace(path, prompt_tokens_most=100)
    assert short.prompt_tokens.tolist() == [64]
    assert any("1 of 2 sessions" in note for note in short.notes)


def test_converted_sessions_reuse_what_their_kind_asked_before(tmp_path: Path):
    trace = read_trace(written(tmp_path, "s.csv", COMPACT_SESSIONS))
    assert trace.think_s.tolist() == [0.0, 12.0, 2.0, 9.0, 0.0]  # unknown: 40 less the 30 + 1 of the turn before
    assert trace.prefixes is not None
    first, second, agent, last, other = (set(trace.prefixes.of(row).tolist()) for row in range(5))
    assert (len(first), len(second), len(first & second), len(second & last)) == (10, 20, 10, 20)
    assert not agent & (first | second | last | other)


def test_compact_blocks_are_ids_and_ranges(tmp_path: Path):
    trace = read_trace(written(tmp_path, "x.csv", COMPACT))
    assert trace.prefixes is not None
    assert [trace.prefixes.of(row).tolist() for row in (0, 1)] == [[0, 4], [0, 9, 4]]


def pool(folder: Path) -> Path:
    written(folder, "m-test/chunk-1-trace.csv", "0,2.0,1.5,Gamma,0.4,1.1\n600,0,0,,0,0\n1200,4.0,2.0,Weibull,0.6,0.2\n")
    written(folder, "m-test/chunk-2-trace.csv", "0,1.0,1.0,Gamma,1,1\n600,1,1,Gamma,1,1\n1200,1,1,Gamma,1,1\n")
    window = {"input_tokens": "{100: 0.25, 300: 0.75}", "output_tokens": "{5: 1.0}"}
    written(folder, "m-test/chunk-1-dataset.json", json.dumps({"0": window}))
    return folder / "m-test"


def test_servegen_clients_come_at_their_rates_with_their_lengths(tmp_path: Path):
    trace = read_trace(pool(tmp_path))
    assert trace.tenants == ("c1", "c2")
    own = [trace.arrival_s[trace.tenant == tenant] for tenant in (0, 1)]
    assert len(own[0]) == pytest.approx(3600, rel=0.15)
    assert len(own[1]) == pytest.approx(1800, rel=0.1)
    assert not np.any((own[0] >= 600.0) & (own[0] < 1200.0))
    assert trace.output_tokens.max() == 5
    assert trace.prompt_tokens.max() <= 300
    assert any("1 clients have no published lengths" in note for note in trace.notes)
    assert len(read_trace(pool(tmp_path), per_s=1.0)) == pytest.approx(1800, rel=0.15)


def test_servegen_is_read_from_its_summary(tmp_path: Path):
    path = written(tmp_path, "servegen-windows.csv", WINDOWS)
    written(tmp_path, "servegen-lengths.csv", LENGTHS)
    trace = read_trace(path, pool="m")
    assert trace.tenants == ("c1", "c2")
    assert len(trace) == pytest.approx(2100, rel=0.2)
    assert trace.arrival_s[trace.tenant == 1].min() >= 600.0
    assert np.median(trace.prompt_tokens) == pytest.approx(20, abs=2)
    with pytest.raises(ConfigError, match=r"servegen-windows\.csv, pool: none is 'z'"):
        read_trace(path, pool="z")


BAD = {
    "a word for a count": ("azure", AZURE.replace("396", "many"), r", line 3, ContextTokens: 'many' "),
    "a count below 0": ("azure", AZURE.replace("109", "-1"), r", line 3, GeneratedTokens: '-1' is below 0"),
    "no date": ("azure", AZURE.replace("2023-11-16 18:15:50", "soon"), r", line 3, TIMESTAMP: .* is no date"),
    "another zone": ("azure", AZURE_2024.replace("017335+00:00", "017335+02:00"), r", line 3, TIMESTAMP: "),
    "a short row": ("azure", AZURE.replace(",109", ""), r", line 3, GeneratedTokens: missing: 2 fields"),
    "a missing column": ("azure", "TIMESTAMP,ContextTokens\n", r", line 1, GeneratedTokens: no such column"),
    "an infinite time": ("burstgpt", BURSTGPT.replace("45,b", "inf,b"), r", line 3, Timestamp: 'inf' "),
    "a time before the begin": ("compact", COMPACT.replace("40,", "-40,"), r", line 3, t_ms: '-40' is below 0"),
    "a range that falls": ("compact", COMPACT.replace("9 4-5", "9 5-4"), r", line 3, blocks: '5-4' is no range"),
    "a block with a name": ("compact", COMPACT.replace("9 4-5", "x"), r", line 3, blocks: 'x' is no id"),
    "a think time below 0": ("compact-sessions", COMPACT_SESSIONS.replace(",12,", ",-2,"), r", line 3, think_s: '-2' "),
    "no JSON": ("mooncake", MOONCAKE + "{\n", r", line 3: Input data was truncated"),
    "a length below 0": ("mooncake", MOONCAKE.replace("1024", "-4"), r", line 2: .*\$\.input_length"),
    "a missing field": ("mooncake", MOONCAKE.replace('"output_length": 1,', ""), r", line 2: .*`output_length`"),
    "an id that is text": ("bailian", BAILIAN.replace("[13,", '["a",'), r", line 2: .*\$\.hash_ids\[0\]"),
    "a chat that comes twice": ("bailian", BAILIAN.replace('"chat_id": 2', '"chat_id": 1'), r", line 2, chat_id: 1 "),
    "a turn without a time": ("agent-sessions", json.dumps(SESSION).replace('"t": 12.5, ', ""), r"\$\.requests\[2\]"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_named_by_file_line_and_field(tmp_path: Path, what: str):
    name, content, says = BAD[what]
    path = written(tmp_path, "bad.csv", content)
    with pytest.raises(ConfigError, match=r"bad\.csv.*" + says.lstrip(",")):
        FORMATS[name].read(path)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("chunk-1-trace.csv", "0,1.0\n", r"chunk-1-trace\.csv, line 1, pattern: missing"),
        ("chunk-1-trace.csv", "0,1.0,1,Gamma,1,1\n600,x,1,Gamma,1,1\n", r"chunk-1-trace\.csv, line 2, rate: 'x'"),
        ("chunk-1-trace.csv", "0,1.0,1,Pareto,1,1\n", r"line 1, pattern: 'Pareto' is neither"),
        ("chunk-1-dataset.json", '{"0": {"input_tokens": "{}"}}', r"chunk-1-dataset\.json: .*output_tokens"),
        ("chunk-1-dataset.json", '{"0": {"input_tokens": "[7]", "output_tokens": "{}"}}', r"input_tokens: no table"),
    ],
)
def test_what_is_wrong_in_a_servegen_pool_is_named(tmp_path: Path, file: str, content: str, says: str):
    folder = pool(tmp_path)
    written(folder, file, content)
    with pytest.raises(ConfigError, match=says):
        read_trace(folder)


def test_a_file_that_ends_early_or_is_no_text_is_refused(tmp_path: Path):
    whole = gzip.compress(AZURE.encode() * 100)
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"cut\.csv\.gz cannot be read"):
        read_trace(path, "azure")
    path.write_bytes(b"TIMESTAMP,\xff\xfe\n")
    with pytest.raises(ConfigError, match="is no UTF-8 text"):
        read_trace(path, "azure")
    with pytest.raises(ConfigError, match=r"none\.csv cannot be read"):
        read_trace(tmp_path / "none.csv", "azure")


def test_a_file_with_a_header_alone_is_an_empty_trace(tmp_path: Path):
    assert len(read_trace(written(tmp_path, "a.csv", AZURE.partition("\n")[0] + "\n"))) == 0


def test_rows_out_of_order_are_put_in_order(tmp_path: Path):
    lines = AZURE.splitlines()
    trace = read_trace(written(tmp_path, "a.csv", "\n".join([lines[0], lines[2], lines[1], lines[3]])))
    assert trace.prompt_tokens.tolist() == [374, 396, 879]


def test_a_wrong_row_far_into_a_file_is_named_too(tmp_path: Path):
    rows = [f"{row},10,5" for row in range(70_000)]
    rows[69_000] = "69000,10,x"
    with pytest.raises(ConfigError, match="line 69002, tokens_out: 'x'"):
        read_trace(written(tmp_path, "x.csv", "t_ms,tokens_in,tokens_out\n" + "\n".join(rows)))
