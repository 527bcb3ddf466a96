"""`laneway dead` as operators use it: a request that kills its engine, seen, mended, run again; and letters removed."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import msgspec
import pytest

from laneway.admission.server import serve
from laneway.client import Client, JobState, LanewayError
from laneway.core.lanes import Lane
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.settings import AdmissionSettings
from tests.support.nats import eventually
from tests.support.services import served
from tests.support.worker import Yard, yard

pytestmark = [pytest.mark.wire, pytest.mark.slow, pytest.mark.timeout(120)]
CRASH_ID = 7


async def laneway(address: str, *arguments: str, stdin: str = "") -> tuple[int | None, str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LANEWAY_")}
    environment["LANEWAY_ADDRESS"] = address
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "laneway.cli", *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment
    )
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), 60)
    return process.returncode, out.decode(), err.decode()


def mended(place: Yard) -> None:
    """Workers that start from now on have an engine without the fault."""
    models = tuple(msgspec.structs.replace(model, engine_options=EngineOptions()) for model in place.settings.models)
    place.settings = msgspec.structs.replace(place.settings, models=models)


async def test_an_operator_finds_a_poison_job_mends_the_engine_and_runs_it_again(
    nats_server: LocalNats, tmp_path: Path
):
    async with yard(
        nats_server, workers=1, engine__fault_crash_token_id=CRASH_ID, nats__ack_wait_priority_s=1.0
    ) as place:
        settings = msgspec.structs.replace(place.settings, admission=AdmissionSettings(listen="127.0.0.1:0"))
        async with served(serve, settings, tmp_path / "ready.json"):
            address = json.loads((tmp_path / "ready.json").read_text())["address"]
            async with Client(address) as client:
                stream = client.generate(model="chat", prompt=f"a{chr(CRASH_ID)}", max_tokens=4)
                with pytest.raises(LanewayError, match="3 attempts ended without a result") as ended:
                    async with stream:
                        await stream.text()
                assert ended.value.reason == "POISON", "its caller is told once, and why"
                job_id = stream.job_id
                await eventually(place.lanes_empty)
                after = await client.submit(model="chat", prompt="Hi", lane=Lane.PRIORITY, max_tokens=4)
                assert (await client.wait(after.job_id, timeout_s=30)).state is JobState.SUCCEEDED

                code, out, _ = await laneway(address, "dead", "list")
                assert code == 0
                header, line = out.splitlines()
                assert header.split()[:4] == ["JOB", "REASON", "LANE", "AGE"]
                assert line.split()[:3] == [job_id, "POISON", "priority"]
                _, out, _ = await laneway(address, "dead", "list", "--json", "--reason", "poison")
                (letter,) = json.loads(out)
                assert [attempt["attempt"] for attempt in letter["attempts"]] == [1, 2, 3]
                assert {attempt["worker_id"] for attempt in letter["attempts"]} == {place.workers[0].id}

                await place.workers[0].drain()
                mended(place)
                await place.start_worker("mended")
                code, out, err = await laneway(address, "dead", "requeue", job_id)
                new_id = out.strip()
                assert code == 0, err
                assert err.startswith(f"{job_id}: accepted")
                job = await client.wait(new_id, timeout_s=30)
                assert (job.state, job.requeued_from) == (JobState.SUCCEEDED, job_id)
                assert await laneway(address, "dead", "requeue", job_id) == (0, out, err), "safe to repeat"
                code, out, _ = await laneway(address, "jobs", new_id)
                assert f"requeued from {job_id}" in out
                assert await laneway(address, "dead", "list") == (0, "", "no dead letters\n")


async def test_letters_are_removed_by_name_by_selection_and_after_a_question(nats_server: LocalNats, tmp_path: Path):
    async with yard(nats_server, workers=1) as place:
        settings = msgspec.structs.replace(place.settings, admission=AdmissionSettings(listen="127.0.0.1:0"))
        ids = []
        for lane in (Lane.PRIORITY, Lane.BATCH, Lane.BATCH, Lane.DEFERRABLE):
            ids.append((await place.submit(lane=lane, attempt=3, starts=3)).record.job_id)
            await eventually(place.lanes_empty)
        async with served(serve, settings, tmp_path / "ready.json"):
            address = json.loads((tmp_path / "ready.json").read_text())["address"]
            code, out, err = await laneway(address, "dead", "purge", stdin="n\n")
            assert (code, out) == (1, "")
            assert err == "Remove every dead letter that you may see? [y/N] laneway: nothing was removed\n"
            assert await laneway(address, "dead", "purge", ids[0]) == (0, "1 dead letter removed\n", "")
            _, out, _ = await laneway(address, "dead", "purge", "--lane", "batch", "--yes", "--json")
            assert json.loads(out) == {"purged": 2}
            code, out, err = await laneway(address, "dead", "purge", "--older-than", "3600", stdin="y\n")
            assert (code, out) == (0, "0 dead letters removed\n")
            assert err == "Remove every dead letter older than 60 min? [y/N] "
            _, out, _ = await laneway(address, "dead", "list", "--json")
            assert [letter["job_id"] for letter in json.loads(out)] == [ids[3]]
            unknown = "local-00000000-0000-7000-8000-000000000000"
            code, out, err = await laneway(address, "dead", "requeue", unknown)
            assert (code, out) == (1, "")
            assert err == f"laneway: there is no dead letter of this job (DEAD_LETTER_NOT_FOUND, job {unknown})\n"
