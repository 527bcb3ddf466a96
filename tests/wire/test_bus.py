"""The connection: definite outcomes, limits, and life across a server's death."""

import asyncio
from pathlib import Path

import nats.errors
import pytest
from nats.aio.msg import Msg

from laneway.core.errors import ConfigError, LaneSaturated, OutcomeUnknown, Unavailable
from laneway.runtime.bus import (
    ApiError,
    Bus,
    NoAnswer,
    NoStream,
    NotConnected,
    PayloadTooLarge,
    PublishUnknown,
    StreamFull,
    WrongSequence,
)
from laneway.runtime.bus_errors import ERR_OUT_OF_STORAGE, ERR_TRY_AGAIN, OutOfStorage, api_error, publish_error
from laneway.runtime.clock import SystemClock
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.settings import NatsSettings
from tests.support.nats import connected, eventually, nats_settings

pytestmark = pytest.mark.wire


async def make_stream(bus: Bus, **config: object) -> None:
    wanted = {"name": "S", "subjects": ["s.>"], "storage": "file", "num_replicas": 1, "allow_direct": True, **config}
    await bus.api("STREAM.CREATE.S", wanted)


async def stored_count(bus: Bus) -> int:
    return (await bus.api("STREAM.INFO.S", {}))["state"]["messages"]


# --- connecting --------------------------------------------------------------------------------------


async def test_an_absent_server_is_unavailable_and_the_message_says_what_to_do():
    settings = NatsSettings(url="nats://127.0.0.1:1", connect_timeout_s=0.3)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1.*laneway up"):
        await Bus.connect(settings, name="test")


async def test_refused_credentials_are_a_config_error(tmp_path: Path, nats_server: LocalNats):
    password = tmp_path / "password"
    password.write_text("wrong\n")
    settings = nats_settings(nats_server, user="local", password_file=str(password), connect_timeout_s=0.5)
    with pytest.raises(ConfigError, match="password_file"):
        await Bus.connect(settings, name="test")


async def test_credentials_are_read_from_files(tmp_path: Path):
    password = tmp_path / "password"
    password.write_text("given\n")
    named = (
        "accounts { NAMED { jetstream: enabled, users: [{ user: named, password: given }] } }\nno_auth_user: named\n"
    )
    async with (
        LocalNats(tmp_path / "nats", extra_config=named) as server,
        connected(server, user="named", password_file=str(password)) as bus,
    ):
        assert bus.connected


async def test_a_secret_file_that_is_missing_is_named(tmp_path: Path, nats_server: LocalNats):
    settings = nats_settings(nats_server, token_file=str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"nats\.token_file.*absent"):
        await Bus.connect(settings, name="test")


async def test_an_account_without_jetstream_is_a_config_error(tmp_path: Path):
    bare = "accounts { BARE { users: [{ user: bare, password: bare }] } }\nno_auth_user: bare\n"
    async with LocalNats(tmp_path / "nats", extra_config=bare) as server:
        with pytest.raises(ConfigError, match="JetStream is off"):
            await Bus.connect(nats_settings(server), name="test")


# --- outcomes of a publish ---------------------------------------------------------------------------


async def test_store_returns_the_sequence(bus: Bus):
    await make_stream(bus)
    assert await bus.store("s.a", b"1") == 1
    assert await bus.store("s.b", b"2") == 2


async def test_a_repeated_message_id_is_reported_as_a_duplicate(bus: Bus):
    await make_stream(bus)
    first = await bus.store_checked("s.a", b"1", {"Nats-Msg-Id": "x"})
    second = await bus.store_checked("s.a", b"1", {"Nats-Msg-Id": "x"})
    assert (first.duplicate, second.duplicate) == (False, True)
    assert second.sequence == first.sequence


async def test_refusals_are_told_apart_and_store_nothing(bus: Bus):
    await make_stream(bus, discard="new", max_msgs=1)
    await bus.store("s.a", b"1")
    with pytest.raises(WrongSequence):
        await bus.store("s.a", b"2", {"Nats-Expected-Last-Subject-Sequence": "7"})
    with pytest.raises(StreamFull) as full:
        await bus.store("s.b", b"2")
    assert isinstance(full.value, LaneSaturated)
    with pytest.raises(NoStream):
        await bus.store("elsewhere", b"2")
    assert await stored_count(bus) == 1


async def test_an_api_refusal_carries_its_codes(bus: Bus):
    with pytest.raises(ApiError) as error:
        await bus.api("STREAM.INFO.ABSENT", {})
    assert (error.value.code, error.value.err_code) == (404, 10059)


async def test_a_message_above_the_limit_is_refused_unsent_and_harms_nobody_else(bus: Bus):
    await make_stream(bus)
    limit = bus.payload_bytes_max
    big = asyncio.gather(*(bus.store("s.big", b"x" * (limit + 1)) for _ in range(3)), return_exceptions=True)
    small = asyncio.gather(*(bus.store(f"s.small{i}", b"x") for i in range(20)))
    assert [type(outcome) for outcome in await big] == [PayloadTooLarge] * 3
    await small
    assert await stored_count(bus) == 20
    with pytest.raises(PayloadTooLarge):
        await bus.emit("core", b"x" * (limit + 1))
    assert bus.reconnects == 0


async def test_a_message_at_the_limit_passes_and_headers_count(bus: Bus):
    await make_stream(bus)
    limit = bus.payload_bytes_max
    await bus.store("s.a", b"x" * limit)
    header = {"Name": "v" * 100}
    await bus.store("s.a", b"x" * (limit - 120), header)
    with pytest.raises(PayloadTooLarge) as error:
        await bus.store("s.a", b"x" * (limit - 100), header)
    assert error.value.limit_bytes == limit < error.value.size_bytes
    assert bus.reconnects == 0


# --- a server that stops, dies, returns --------------------------------------------------------------


async def test_a_publish_to_a_stopped_server_is_unknown_and_may_be_stored_later(nats_server: LocalNats, bus: Bus):
    await make_stream(bus)
    nats_server.pause()
    with pytest.raises(PublishUnknown) as error:
        await bus.store("s.a", b"1", timeout_s=0.2)
    assert isinstance(error.value, OutcomeUnknown)
    nats_server.resume()
    await eventually(lambda: stored_count(bus))


async def test_a_lost_connection_ends_open_publishes_at_once(nats_server: LocalNats):
    async with connected(nats_server, request_timeout_s=50.0) as bus:
        await make_stream(bus)
        nats_server.pause()
        sent = bus.nc.stats["out_msgs"]
        publish = asyncio.ensure_future(bus.store("s.a", b"1"))
        await eventually(lambda: bus.nc.stats["out_msgs"] > sent)
        await nats_server.kill()
        with pytest.raises(PublishUnknown):
            await publish


async def test_nothing_is_sent_later_that_was_refused_while_disconnected(nats_server: LocalNats):
    async with connected(nats_server) as bus:
        await make_stream(bus)
        await nats_server.kill()
        await eventually(lambda: not bus.connected)
        with pytest.raises(NotConnected):
            await bus.store("s.a", b"1", timeout_s=0.1)
        await nats_server.start()
        await bus.wait_connected(10.0)
        assert await bus.store("s.b", b"2") == 1


async def test_a_publish_waits_for_a_connection_that_returns_in_time(nats_server: LocalNats):
    async with connected(nats_server, request_timeout_s=20.0) as bus:
        await make_stream(bus)
        await nats_server.kill()
        await eventually(lambda: not bus.connected)
        publish = asyncio.ensure_future(bus.store("s.a", b"1"))
        await nats_server.start()
        assert await publish == 1


async def test_subscriptions_and_callbacks_outlive_a_restart(nats_server: LocalNats):
    async with connected(nats_server) as bus:
        heard: list[bytes] = []
        events: list[str] = []
        await bus.listen("a", lambda msg: heard.append(msg.data))
        bus.on_disconnect(lambda: events.append("lost"))
        bus.on_reconnect(lambda: events.append("back"))
        await nats_server.restart()
        await eventually(lambda: events == ["lost", "back"])
        await bus.emit("a", b"1")
        await eventually(lambda: heard == [b"1"])


async def test_a_callback_taken_off_is_not_called(nats_server: LocalNats):
    async with connected(nats_server) as bus:
        events: list[str] = []
        unregister = bus.on_reconnect(lambda: events.append("mine"))
        bus.on_reconnect(lambda: events.append(str(1 // 0)))  # harms neither the others nor the connection
        bus.on_reconnect(lambda: events.append("other"))
        unregister()
        unregister()
        await nats_server.restart()
        await eventually(lambda: events)
        assert events == ["other"]


async def test_a_handler_that_raises_harms_neither_the_connection_nor_later_messages(bus: Bus):
    heard: list[bytes] = []

    def handler(msg) -> None:
        if msg.data == b"bad":
            raise ValueError("bad message")
        heard.append(msg.data)

    await bus.listen("a", handler)
    await bus.emit("a", b"bad")
    await bus.emit("a", b"good")
    await eventually(lambda: heard == [b"good"])


@pytest.mark.parametrize("how", ["bus", "nats-py"])
async def test_a_flush_that_timed_out_does_not_deafen_the_connection(nats_server: LocalNats, bus: Bus, how: str):
    nats_server.pause()
    with pytest.raises((NoAnswer, nats.errors.TimeoutError)):
        await (bus.flush(0.1) if how == "bus" else bus.nc.flush(timeout=0.1))  # type: ignore[arg-type]  # a float will do
    nats_server.resume()
    for _ in range(3):
        await bus.flush()
        await bus.nc.flush()
    assert bus.reconnects == 0


async def test_a_subscription_that_returned_hears_what_others_publish(nats_server: LocalNats, bus: Bus):
    heard: list[str] = []
    async with connected(nats_server, "other") as other:
        for i in range(50):
            await bus.listen(f"a.{i}", lambda msg: heard.append(msg.subject))
            await other.emit(f"a.{i}", b"")
        await eventually(lambda: len(heard) == 50)


async def test_draining_loses_nothing_that_is_on_its_way(nats_server: LocalNats, bus: Bus):
    heard: list[bytes] = []
    subscription = await bus.listen("a", lambda msg: heard.append(msg.data))
    async with connected(nats_server, "other") as other:
        for i in range(200):
            await other.emit("a", str(i).encode())
        await other.flush()
        await bus.drain(subscription, 5.0)
        assert len(heard) == 200
        await other.emit("a", b"later")
        await other.flush()
        await bus.flush()
        assert len(heard) == 200


async def test_listeners_of_one_queue_share_the_messages(nats_server: LocalNats, bus: Bus):
    async with connected(nats_server, "other") as other:
        heard: list[bytes] = []
        for one in (bus, other):
            await one.listen("a", lambda msg: heard.append(msg.data), queue="q")
            await one.flush()
        for i in range(20):
            await bus.emit("a", str(i).encode())
        await bus.flush()
        await eventually(lambda: len(heard) >= 20)
        assert sorted(heard) == sorted(str(i).encode() for i in range(20))


async def test_subscribe_takes_coroutine_callbacks(bus: Bus):
    heard = asyncio.Event()

    async def callback(msg) -> None:
        heard.set()

    subscription = await bus.subscribe("a", callback)
    await bus.emit("a", b"")
    await heard.wait()
    await bus.unsubscribe(subscription)
    await bus.unsubscribe(subscription)


async def test_server_time_is_ours_on_one_machine(bus: Bus):
    assert abs(await bus.server_time_s() - SystemClock().now()) < 5.0


async def test_closing_a_connection_with_unsent_messages_to_a_dead_server_is_quiet(nats_server: LocalNats):
    bus = await Bus.connect(nats_settings(nats_server), name="test")
    await bus.subscribe("a", ignore)
    await nats_server.kill()
    await eventually(lambda: not bus.connected)
    await bus.emit("a", b"unsent")
    await bus.close()
    assert bus.nc.is_closed
    assert not bus.nc._subs


async def ignore(msg: Msg) -> None: ...


async def test_closing_is_quick_when_the_server_is_dead(nats_server: LocalNats):
    bus = await Bus.connect(nats_settings(nats_server), name="test")
    await bus.listen("a", lambda msg: None)
    await nats_server.kill()
    await bus.close()
    await bus.close()
    with pytest.raises(NotConnected):
        await bus.store("s.a", b"1")


# --- posting -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\r\nNats-Rollup: all"])
async def test_a_line_break_in_a_header_is_refused_and_nothing_is_sent(bus: Bus, text: str):
    await make_stream(bus)
    with pytest.raises(NotConnected, match="line break"):
        await bus.store("s.1", b"x", {"Laneway-Key": text})
    assert await stored_count(bus) == 0


async def test_posts_keep_their_order_when_the_socket_is_full(nats_server: LocalNats, bus: Bus):
    """More than the socket takes: what does not fit waits, and later posts wait behind it."""
    got: list[bytes] = []
    size, count = 200_000, 60
    async with connected(nats_server, "listener") as listener:
        await listener.listen("big", lambda msg: got.append(msg.data[:4]))
        for number in range(count):
            payload = b"%04d" % number + bytes(size)
            while True:
                try:
                    await bus.emit("big", payload)
                    break
                except NotConnected:  # more is unsent than a client may hold
                    await asyncio.sleep(0.001)
        await eventually(lambda: len(got) == count)
    assert got == [b"%04d" % number for number in range(count)]


async def test_what_was_posted_without_a_connection_is_sent_once_there_is_one(nats_server: LocalNats):
    got: list[bytes] = []
    async with connected(nats_server, "speaker") as bus:
        await nats_server.kill()
        await eventually(lambda: not bus.connected)
        await bus.emit("later", b"1")
        await bus.emit("later", b"2")
        await nats_server.restart()
        await bus.listen("later", lambda msg: got.append(msg.data))
        await eventually(lambda: bus.connected)
        await bus.emit("later", b"3")
        await eventually(lambda: got[-1:] == [b"3"])
    assert got in ([b"1", b"2", b"3"], [b"3"])  # the subscription may have come after the first two


@pytest.mark.parametrize("err_code", sorted(ERR_TRY_AGAIN))
def test_what_jetstream_takes_soon_is_unavailable_with_a_time_to_come_again(err_code: int):
    """As while a cluster has no leader: whether a message was published or a record asked for."""
    for error in (publish_error(503, err_code, "later"), api_error(503, err_code, "later")):
        assert isinstance(error, NoStream)
        assert error.retry_after_s is not None
    assert isinstance(api_error(404, 10037, "no message found"), ApiError)


@pytest.mark.parametrize("err_code", sorted(ERR_OUT_OF_STORAGE))
def test_a_publish_that_finds_no_storage_names_a_time_to_come_again(err_code: int):
    """Before admission's next look at the storage, this is what a caller is told."""
    error = publish_error(503, err_code, "insufficient resources")
    assert isinstance(error, OutOfStorage)
    assert error.retry_after_s is not None
