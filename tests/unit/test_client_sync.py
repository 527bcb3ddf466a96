"""The sync clients say and take the same as the async ones; and the loop behind them lets nobody wait for ever."""

from __future__ import annotations

import asyncio
import gc
import inspect
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import pytest

from laneway.client import Client, RoutingClient, SchedulerClient, TokenStream, sync
from laneway.client.background import BackgroundLoop, ClientClosed

PAIRS: list[tuple[type, type]] = [
    (Client, sync.Client),
    (SchedulerClient, sync.SchedulerClient),
    (RoutingClient, sync.RoutingClient),
    (TokenStream, sync.TokenStream),
]
SPECIAL = {  # dunder methods have twins of other names; constructors of streams are nobody's to call
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}
WORDS = {
    "async with": "with",
    "async for": "for",
    "await ": "",
    "contextlib.aclosing": "contextlib.closing",
    "one task": "one thread",
    "an async context manager": "a context manager",
}


def in_sync_words(text: str | None) -> list[str]:
    for word, twin in WORDS.items():
        text = text.replace(word, twin) if text else text
    return words(text)


def words(text: str | None) -> list[str]:
    return (text or "").split()


def in_sync_types(annotation: str) -> str:
    return re.sub(r"AsyncIterator\[(.*)\]|AsyncGenerator\[(.*), None\]", r"Items[\1\2]", annotation)


def public(owner: type) -> dict[str, Callable[..., object]]:
    """Methods by name, those of its bases and the constructor included."""
    found = inspect.getmembers(owner, inspect.isfunction)
    wanted = {"__init__", *SPECIAL, *SPECIAL.values()}
    return {name: method for name, method in found if not name.startswith("_") or name in wanted}


@pytest.mark.parametrize(("one", "twin"), PAIRS)
def test_every_method_has_a_twin_and_no_other_exists(one: type, twin: type):
    assert {SPECIAL.get(name, name) for name in public(one)} == set(public(twin))
    assert in_sync_words(one.__doc__) == words(twin.__doc__)


METHODS = [
    pytest.param(method, public(twin).get(SPECIAL.get(name, name)), id=f"{one.__name__}.{name}")
    for one, twin in PAIRS
    for name, method in public(one).items()
    if (one, name) != (TokenStream, "__init__")
]


@pytest.mark.parametrize(("method", "twin"), METHODS)
def test_twins_have_the_same_parameters_types_and_words(
    method: Callable[..., object], twin: Callable[..., object] | None
):
    assert twin is not None
    assert not inspect.iscoroutinefunction(twin)
    ours, theirs = inspect.signature(method), inspect.signature(twin)
    assert list(ours.parameters.values()) == list(theirs.parameters.values())
    assert in_sync_types(ours.return_annotation) == theirs.return_annotation
    assert in_sync_words(method.__doc__) == words(twin.__doc__)


def test_a_stream_has_the_same_attributes():
    mine = {name for name in vars(sync.TokenStream) if not name.startswith("_")}
    assigned = set(re.findall(r"self\.([a-z]\w*)(?:: [^=\n]+)? = ", inspect.getsource(TokenStream)))
    defined = {name for name in vars(TokenStream) if not name.startswith("_")}
    assert mine == defined | assigned


# --- the loop --------------------------------------------------------------------------------------


@contextmanager
def looping() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop("laneway test")
    try:
        yield loop
    finally:
        loop.close(nothing())
        assert "laneway test" not in {thread.name for thread in threading.enumerate()}


async def nothing() -> None:
    pass


async def told(began: threading.Event, ended: threading.Event) -> None:
    began.set()
    try:
        await asyncio.Event().wait()
    finally:
        ended.set()


def test_results_and_errors_come_back_to_the_thread_that_asked():
    async def double(number: int) -> int:
        return 2 * number

    async def fail() -> None:
        raise KeyError("mine")

    with looping() as loop:
        assert loop.run(double(3)) == 6
        with pytest.raises(KeyError, match="mine"):
            loop.run(fail())


def test_an_interrupt_cancels_what_was_waited_for(monkeypatch: pytest.MonkeyPatch):
    began, ended = threading.Event(), threading.Event()

    def interrupted(future: object, timeout: float | None = None) -> None:
        assert began.wait(10)
        raise KeyboardInterrupt

    with looping() as loop:
        with monkeypatch.context() as patch:
            patch.setattr("concurrent.futures.Future.result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                loop.run(told(began, ended))
        assert ended.wait(10)


def test_closing_ends_what_runs_and_refuses_what_comes():
    began, ended = threading.Event(), threading.Event()
    raised: list[BaseException] = []

    def call(loop: BackgroundLoop) -> None:
        try:
            loop.run(told(began, ended))
        except ClientClosed as error:
            raised.append(error)

    with looping() as loop:
        thread = threading.Thread(target=call, args=(loop,))
        thread.start()
        assert began.wait(10)
        loop.close(nothing())
        thread.join(10)
        assert [str(error) for error in raised] == ["the client was closed during this call"]
        assert ended.is_set()
        with pytest.raises(ClientClosed, match="make a new one"):
            loop.run(nothing())


def test_what_could_only_hang_is_an_error():
    with looping() as loop:

        async def from_inside(use: Callable[[], None]) -> None:
            use()

        for use in (lambda: loop.run(nothing()), lambda: loop.close(nothing())):
            with pytest.raises(RuntimeError, match="a callback of this client cannot call it"):
                loop.run(from_inside(use))


def test_a_loop_that_nobody_closed_ends_with_its_owner():
    loop = BackgroundLoop("laneway forgotten")
    loop.run(nothing())
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "laneway forgotten")
    del loop
    gc.collect()
    assert not thread.is_alive()


def test_leaving_an_iterator_early_ends_its_source():
    closed = threading.Event()

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(10):
                yield number
        finally:
            closed.set()

    with looping() as loop:
        assert list(sync.Items(loop, numbers())) == list(range(10))
        closed.clear()
        with sync.Items(loop, numbers()) as items:
            for number in items:
                if number == 3:
                    break
            assert not closed.is_set()
        assert closed.is_set()
        assert next(items, None) is None
    items.close()


def test_an_interrupt_while_a_call_is_handed_over_cancels_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It began, and nobody has its future: closing would wait for it."""
    loop = BackgroundLoop("interrupted")
    hand_over = loop._loop.call_soon_threadsafe

    def interrupted(*args: object) -> None:
        monkeypatch.undo()
        hand_over(*args)  # type: ignore[arg-type] # as it came
        raise KeyboardInterrupt

    async def endless() -> None:
        await asyncio.Event().wait()

    async def others() -> int:
        return len(asyncio.all_tasks()) - 1

    monkeypatch.setattr(loop._loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.run(endless())
    while loop.run(others()):
        pass
    loop.close(asyncio.sleep(0))
