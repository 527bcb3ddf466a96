"""The sync client on a real connection: threads, Ctrl-C, closing. The door runs in the test's loop."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from asyncio.subprocess import PIPE
from concurrent.futures import ThreadPoolExecutor

import pytest

from laneway.client import InvalidRequest, JobState, LaneSaturated, LanewayError, NotFound, OutcomeUnknown
from laneway.client.background import CLOSE_S_MAX, ClientClosed
from laneway.client.sync import Client
from laneway.core.errors import ConfigError
from laneway.v1 import admission_pb2, common_pb2
from tests.support.door import Door, accepted, chunk, finished, forever, serving, words

pytestmark = pytest.mark.wire

INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have it ignored
from laneway.client.sync import Client
with Client(sys.argv[1]) as client, client.generate(model="chat", prompt="Hi") as stream:
    for chunk in stream:
        print(chunk.text, flush=True)
"""
FORKED = """
import os, sys
from laneway.client.sync import Client
with Client(sys.argv[1]) as client:
    if child := os.fork():
        os.waitpid(child, 0)
        print("parent:", client.submit(model="chat", prompt="Hi").job_id, flush=True)
    else:
        try:
            client.get_job("local-job")
        except RuntimeError as error:
            print("child:", str(error).partition(",")[0], flush=True)
        client.close()
        os._exit(0)
"""
FORGETFUL = """
import sys
from laneway.client.sync import Client
client = Client(sys.argv[1])
stream = client.generate(model="chat", prompt="Hi").__enter__()
print(next(stream).text)
"""


async def silent(request, context):
    yield accepted()
    yield chunk(0, "a")
    await forever()


def laneway_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("laneway ")]


async def test_a_stream_is_an_iterator_and_a_context_manager():
    def use(address: str) -> None:
        with Client(address) as client:
            with client.generate(model="chat", prompt="Hi") as stream:
                assert stream.verdict is not None
                assert stream.job_id == "local-job"
                assert [c.text for c in stream] == ["Hel", "lo"]
                assert stream.ended
                assert stream.finished.usage.completion_tokens == 2
            with client.watch("local-job", from_index=1) as stream:
                assert stream.texts() == {0: "lo"}
            with pytest.raises(RuntimeError, match="inside its with-block"):
                next(client.generate(model="chat", prompt="Hi"))
        assert laneway_threads() == []

    async def rest(request, context):
        yield chunk(1, "lo")
        yield finished()

    async with serving(Door([lambda request, context: words("Hel", "lo")], watches=[rest])) as door:
        await asyncio.to_thread(use, door.address)
        assert not door.gone.is_set()


async def test_leaving_the_block_ends_the_call():
    def use(address: str) -> None:
        with Client(address) as client, client.generate(model="chat", prompt="Hi") as stream:
            for _ in stream:
                break

    async with serving(Door([silent])) as door:
        await asyncio.to_thread(use, door.address)
        await asyncio.wait_for(door.gone.wait(), 5)


async def test_calls_with_one_answer_lists_and_errors_are_those_of_the_async_client():
    jobs = [admission_pb2.Job(job_id=f"local-{n}", state=common_pb2.JOB_STATE_SUCCEEDED) for n in range(150)]
    heard: list[str] = []

    async def ends(request, context):
        yield finished()

    def use(address: str) -> None:
        with Client(address, on_retry=lambda error, wait_s: heard.append(error.reason)) as client:
            assert client.submit(model="chat", prompt="Hi").job_id == "local-job"
            assert heard == ["OUTCOME_UNKNOWN"]
            assert client.wait("local-7").state is JobState.SUCCEEDED
            assert len(list(client.list_jobs())) == 150
            assert [job.job_id for job in client.list_jobs(limit=2)] == ["local-0", "local-1"]
            assert client.cancel("local-7").state is JobState.CANCELLED
            assert client.quote(model="chat", prompt="Hi", max_tokens=9).max_tokens == 9
            with pytest.raises(NotFound):
                client.get_job("local-none")
            with pytest.raises(InvalidRequest) as invalid:
                client.generate(model="chat", prompt="Hi", lane="fast")
            assert invalid.value.field == "lane"

    async with serving(Door(submits=[OutcomeUnknown(retry_after_s=0.0), None], watches=[ends], jobs=jobs)) as door:
        await asyncio.to_thread(use, door.address)
        first, second = door.submitted
        assert first == second, "the same key"


async def test_threads_share_a_client():
    def ask(client: Client) -> str:
        with client.generate(model="chat", prompt="Hi") as stream:
            return stream.text()

    def use(address: str) -> list[str]:
        with Client(address) as client, ThreadPoolExecutor(8) as pool:
            return list(pool.map(ask, [client] * 40))

    async with serving(Door([lambda request, context: words("a", "b")])) as door:
        assert await asyncio.to_thread(use, door.address) == ["ab"] * 40


async def test_closing_ends_the_calls_of_other_threads_and_what_comes_later():
    def use(address: str) -> None:
        client = Client(address)
        reading = threading.Event()
        raised: list[BaseException] = []

        def read() -> None:
            try:
                with client.generate(model="chat", prompt="Hi") as stream:
                    next(stream)
                    reading.set()
                    next(stream)
            except ClientClosed as error:
                raised.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        assert reading.wait(10)
        client.close()
        thread.join(2 * CLOSE_S_MAX)
        assert [str(error) for error in raised] == ["the client was closed during this call"]
        client.close()
        for call in (
            lambda: client.get_job("local-job"),
            client.generate(model="chat", prompt="Hi").__enter__,
            lambda: next(client.list_jobs()),
        ):
            with pytest.raises(ClientClosed, match="this client is closed; make a new one"):
                call()
        assert laneway_threads() == []

    async with serving(Door([silent])) as door:
        await asyncio.to_thread(use, door.address)
        await asyncio.wait_for(door.gone.wait(), 5)


async def test_a_callback_that_calls_its_own_client_is_told_so():
    def use(address: str) -> None:
        def ask(error: LanewayError, wait_s: float) -> None:
            client.cancel("local-job")

        with (
            Client(address, on_retry=ask) as client,
            pytest.raises(RuntimeError, match="a callback of this client cannot call it"),
        ):
            client.submit(model="chat", prompt="Hi")

    async with serving(Door(submits=[LaneSaturated(retry_after_s=0.0)])) as door:
        await asyncio.to_thread(use, door.address)


def test_a_wrong_address_leaves_no_thread():
    with pytest.raises(ConfigError, match="host:port"):
        Client("http://127.0.0.1:7070")
    assert laneway_threads() == []


async def test_a_client_taken_through_a_fork_is_no_client_and_says_so():
    async with serving(Door()) as door:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", FORKED, door.address, stdout=PIPE, stderr=PIPE
        )
        out, _ = await asyncio.wait_for(process.communicate(), 20)
        assert out.decode().splitlines() == ["child: this client's thread is gone", "parent: local-job"]


async def test_ctrl_c_ends_the_call_and_the_program():
    async with serving(Door([silent])) as door:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", INTERRUPTED, door.address, stdout=PIPE, stderr=PIPE
        )
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 20) == b"a\n"
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 2 * CLOSE_S_MAX)
        assert process.returncode == -signal.SIGINT
        assert err.decode().splitlines()[-1] == "KeyboardInterrupt"
        await asyncio.wait_for(door.gone.wait(), 5)


async def test_a_program_that_closes_nothing_ends_without_a_word():
    async with serving(Door([silent])) as door:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-X", "dev", "-c", FORGETFUL, door.address, stdout=PIPE, stderr=PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), 20)
        assert (process.returncode, out, err) == (0, b"a\n", b"")
        await asyncio.wait_for(door.gone.wait(), 5)
