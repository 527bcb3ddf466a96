"""`laneway batch submit` against a local stack: results for every line, bad lines named, interruptions survived."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import pytest

from laneway.cli.batch_journal import SUFFIX
from laneway.cli.stack import LocalStack, StackOptions
from laneway.client import Client
from tests.support.nats import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]

HELD_S = 3600


async def start(address: str, *words: str) -> Process:
    command = (sys.executable, "-m", "laneway.cli", "batch", "submit", *words, "--address", address)
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)


async def finished(process: Process) -> tuple[int, str, str]:
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def rows(text: str) -> dict[int, Any]:
    """Results by line; each line has one."""
    found = [json.loads(line) for line in text.splitlines()]
    named = {row["line"]: row for row in found}
    assert len(named) == len(found)
    return named


async def test_a_batch_is_submitted_interrupted_and_finished(tmp_path: Path):
    batch, output = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    journal = batch.with_name(batch.name + SUFFIX)
    good = [json.dumps({"id": f"q{i}", "prompt": f"Prompt {i}", "max_tokens": 4}) for i in range(60)]
    held = json.dumps({"id": "held", "prompt": "Later", "max_tokens": 4, "not_before_s": HELD_S})
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    openai = json.dumps({"custom_id": "openai", "method": "POST", "url": "/v1/chat/completions", "body": chat})
    bad = ["{", json.dumps({"prompt": "Hi", "max_token": 3}), json.dumps({"id": "m", "prompt": "Hi", "model": "none"})]
    batch.write_text("\n".join([held, *good, "", *bad, openai]) + "\n")
    async with LocalStack(StackOptions(engine="simulated", workers=1)) as stack:
        address = stack.addresses.admission
        async with Client(address) as client:
            process = await start(address, str(batch), "-o", str(output))

            def all_but_the_held_one() -> bool:
                return output.exists() and len(output.read_text().splitlines()) == len(good) + len(bad) + 1

            await eventually(all_but_the_held_one, timeout_s=60)
            process.send_signal(signal.SIGINT)
            code, _, said = await finished(process)
            assert code == 130, said
            assert "run the same command again" in said
            for line, field in ((63, "JSON"), (64, "max_token"), (65, "spec.model")):
                assert f"{batch}:{line}: " in said
                assert field in said.partition(f"{batch}:{line}: ")[2].splitlines()[0]
            first = {job.job_id: job async for job in client.list_jobs()}
            (waiting,) = [job_id for job_id, job in first.items() if not job.state.terminal]
            assert journal.exists()

            code, _, said = await finished(await start(address, str(batch), "-o", str(output), "-m", "other"))
            assert code == 2
            assert "other options" in said

            await client.cancel(waiting)
            code, _, said = await finished(await start(address, str(batch), "-o", str(output)))
            assert code == 1, said
            assert {job.job_id async for job in client.list_jobs()} == set(first), "no line became a second job"
        found = rows(output.read_text())
        assert len(found) == 1 + len(good) + len(bad) + 1
        assert found[1]["state"] == "cancelled"
        assert [found[number]["id"] for number in (2, 61, 66)] == ["q0", "q59", "openai"]
        assert all(found[i]["state"] == "succeeded" and found[i]["text"] for i in range(2, 62))
        assert found[65]["error"]["field"] == "spec.model"
        assert found[66]["usage"]["completion_tokens"] == 3
        assert not journal.exists()

        batch.write_text("\n".join(good[:3]))
        code, out, said = await finished(await start(address, str(batch), "--no-wait"))
        assert code == 0, said
        submitted = rows(out)
        assert journal.exists()
        code, out, said = await finished(await start(address, str(batch)))
        assert code == 0, said
        collected = rows(out)
        assert [row["job_id"] for row in collected.values()] != []
        assert {n: row["job_id"] for n, row in collected.items()} == {n: row["job_id"] for n, row in submitted.items()}
        assert all(row["state"] == "succeeded" for row in collected.values())
