"""The command as a process against a scripted door: what it prints where, and its exit codes."""

import asyncio
import ctypes
import json
import os
import platform
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest

from laneway.core.errors import InvalidRequest, LaneSaturated
from laneway.v1 import admission_pb2, common_pb2, task_pb2
from tests.support.door import Door, accepted, chunk, forever, serving, words

pytestmark = pytest.mark.wire


async def start(door: Door, *arguments: str) -> Process:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LANEWAY_")}
    environment["LANEWAY_ADDRESS"] = door.address
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "laneway.cli", *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment
    )


async def laneway(door: Door, *arguments: str, stdin: str = "") -> tuple[int | None, str, str]:
    process = await start(door, *arguments)
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), 30)
    return process.returncode, out.decode(), err.decode()


def refusing(error: Exception):
    async def script(request, context):
        raise error
        yield

    return script


async def test_an_answer_goes_to_standard_output_and_its_figures_do_not():
    async with serving(Door([lambda request, context: words("Hel", "lo")])) as door:
        code, out, err = await laneway(door, "generate", "Hi", "--max-tokens", "2", "--system", "Be brief.")
        assert (code, out) == (0, "Hello\n")
        assert "2 tokens" in err
        assert "local-job" in err
        (request,) = door.calls
        assert [m.role for m in request.spec.generate.chat.messages] == ["system", "user"]
        assert request.spec.contract.lane == common_pb2.LANE_PRIORITY

        code, out, err = await laneway(door, "generate", "-", "--json", "--raw", stdin="from a pipe")
        found = json.loads(out)
        assert code == 0
        assert (found["text"], found["job_id"]) == ("Hello", "local-job")
        assert found["finished"]["usage"]["completion_tokens"] == 2
        assert found["verdict"]["reason"] == "LANE_OPEN"
        assert door.calls[1].spec.generate.text == "from a pipe"


async def test_a_refusal_is_one_line_with_reason_field_and_retry_time():
    door = Door([refusing(InvalidRequest("temperature must be 0 to 2", field="spec.generate.sampling.temperature"))])
    async with serving(door):
        code, out, err = await laneway(door, "generate", "Hi", "--temperature", "9")
        assert (code, out) == (1, "")
        assert err == (
            "laneway: temperature must be 0 to 2 (INVALID_FIELD, field spec.generate.sampling.temperature)\n"
        )
        door.scripts = [refusing(LaneSaturated("the lane is full", retry_after_s=30.0))]
        code, out, err = await laneway(door, "generate", "Hi", "--timeout", "5")
        assert (code, out) == (1, "")
        assert err == "laneway: the lane is full (LANE_SATURATED, try again in 30.0 s)\n"


async def test_a_wait_for_another_attempt_is_said():
    full = refusing(LaneSaturated("the lane is full", retry_after_s=1.0))
    async with serving(Door([full, lambda request, context: words("Hi")])) as door:
        code, out, err = await laneway(door, "generate", "Hi")
        assert (code, out) == (0, "Hi\n")
        assert "the lane is full" in err
        assert "waiting 1.0 s" in err


async def test_ctrl_c_cancels_the_job():
    async def endless(request, context):
        yield accepted()
        yield chunk(0, "begun")
        await forever()

    async with serving(Door([endless])) as door:
        process = await start(door, "generate", "Hi")
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readexactly(5), 30) == b"begun"
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(door.gone.wait(), 10)
        _, err = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 130
        assert err.decode().splitlines() == ["laneway: stopped"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of tgkill is that of x86-64")
async def test_ctrl_c_counts_whichever_thread_it_comes_to():
    async def endless(request, context):
        yield accepted()
        yield chunk(0, "begun")
        await forever()

    async with serving(Door([endless])) as door:
        process = await start(door, "generate", "Hi")
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readexactly(5), 30) == b"begun"
        others = [
            int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir() if int(task.name) != process.pid
        ]
        tgkill = 234
        assert ctypes.CDLL(None).syscall(tgkill, process.pid, others[-1], signal.SIGINT) == 0
        await asyncio.wait_for(door.gone.wait(), 10)
        await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 130


async def test_submit_prints_the_id_for_a_script_to_take(tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    async with serving(Door()) as door:
        code, out, err = await laneway(door, "submit", "Hi", "--label", "a=b", "--key", "k", "--token-file", str(token))
        assert (code, out) == (0, "local-job\n")
        assert "accepted" in err
        (request,) = door.submitted
        assert request.idempotency_key == "k"
        assert dict(request.spec.contract.labels) == {"a": "b"}
        assert request.spec.contract.lane == common_pb2.LANE_BATCH


async def test_lists_are_tables_or_one_json_array():
    jobs = [
        admission_pb2.Job(
            job_id=f"local-{n}",
            model="chat",
            state=common_pb2.JOB_STATE_PARKED,
            contract=common_pb2.Contract(lane=common_pb2.LANE_BATCH),
        )
        for n in range(3)
    ]
    async with serving(Door(jobs=jobs)) as door:
        code, out, _ = await laneway(door, "jobs")
        assert code == 0
        lines = out.splitlines()
        assert lines[0].split()[:3] == ["JOB", "STATE", "LANE"]
        assert lines[1].split()[:3] == ["local-0", "parked", "batch"]
        assert "\x1b" not in out, "no colour outside a terminal"
        code, out, _ = await laneway(door, "jobs", "--json", "--limit", "2")
        assert [job["job_id"] for job in json.loads(out)] == ["local-0", "local-1"]
        assert json.loads(out)[0]["contract"]["lane"] == "batch"
        door.jobs = []
        code, out, err = await laneway(door, "jobs")
        assert (code, out, err) == (0, "", "no jobs\n")


async def test_a_job_in_full_cancel_and_quote():
    job = admission_pb2.Job(
        job_id="local-1",
        state=common_pb2.JOB_STATE_SUCCEEDED,
        result=task_pb2.Result(text="Hello", finish_reason=common_pb2.FINISH_REASON_STOP),
    )
    async with serving(Door(jobs=[job])) as door:
        code, out, _ = await laneway(door, "jobs", "local-1")
        assert code == 0
        assert "succeeded" in out
        assert out.splitlines()[-1] == "Hello"
        code, out, _ = await laneway(door, "cancel", "local-1")
        assert (code, out) == (0, "local-1 is cancelled\n")
        code, out, _ = await laneway(door, "quote", "Hi", "--max-tokens", "9", "--json")
        assert json.loads(out)["max_tokens"] == 9
        code, out, err = await laneway(door, "jobs", "local-none")
        assert code == 1
        assert "JOB_NOT_FOUND" in err


async def test_a_session_and_a_route_can_be_named():
    async with serving(Door([lambda request, context: words("Hi")], submits=[None])) as door:
        for command in ("generate", "submit"):
            code, _, err = await laneway(door, command, "Hi", "--session", "tea talk", "--route", "faq")
            assert code == 0, err
        (generated,), (submitted,) = door.calls, door.submitted
        for spec in (generated.spec, submitted.spec):
            assert (spec.generate.session_id, spec.route) == ("tea talk", "faq")


async def test_strict_isolation_can_be_asked_for():
    async with serving(Door([lambda request, context: words("Hi")])) as door:
        assert (await laneway(door, "generate", "Hi", "--isolation", "strict"))[0] == 0
        assert (await laneway(door, "generate", "Hi"))[0] == 0
        asked = [request.spec.contract.isolation for request in door.calls]
        assert asked == [common_pb2.ISOLATION_STRICT, common_pb2.ISOLATION_UNSPECIFIED]
        assert (await laneway(door, "generate", "Hi", "--isolation", "perfect"))[0] == 2
