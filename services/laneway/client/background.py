"""An event loop on a thread of its own, for callers that have none: coroutines go in, results come out.

Owns the thread, and that nobody waits for ever: an interrupted caller's coroutine is cancelled, closing ends all that
run, and a use that could only hang (after close, or from the loop's own thread) is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, TypeVar

LOOK_EVERY_S = 0.1
CLOSE_S_MAX = 5.0  # for the last coroutine, and again for the thread
_CLOSED = "this client is closed; make a new one"
_GONE = "this client's thread is gone, as after a fork: make a new client in the new process"
_CLOSED_MEANWHILE = "the client was closed during this call"
_OWN_THREAD = "a callback of this client cannot call it: nobody would be left to answer"

Result = TypeVar("Result")


class ClientClosed(RuntimeError):
    """The client was closed before or during the call."""


class BackgroundLoop:
    """Any thread may call run(); the loop ends with close(), with this object, or with the process."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()  # between a call that begins and the closing
        self._closed = False
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._loop, self._thread)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """What the coroutine gives or raises. KeyboardInterrupt cancels it. RuntimeError where it could never end."""
        job = _Job(coroutine)
        # An interrupt may come at any point, also while the job is handed over: whatever was begun is cancelled.
        try:
            self._require_other_thread()
            with self._lock:
                if self._closed:
                    raise ClientClosed(_CLOSED)
                if not self._thread.is_alive():
                    raise RuntimeError(_GONE)
                self._loop.call_soon_threadsafe(job.begin)
        except RuntimeError:
            coroutine.close()
            raise
        except BaseException:
            self._cancel(job)
            raise
        try:
            return _result(job.result)
        except CancelledError:
            raise ClientClosed(_CLOSED_MEANWHILE) from None
        except BaseException:
            self._cancel(job)
            raise

    def _cancel(self, job: _Job[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and so has ended all that ran
            self._loop.call_soon_threadsafe(job.cancel)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Runs a last coroutine, cancels what else runs, ends the thread; takes 2 x CLOSE_S_MAX at most. May repeat."""
        try:
            self._require_other_thread()
        except RuntimeError:
            last.close()
            raise
        with self._lock:
            closed, self._closed = self._closed, True
        if closed or not self._thread.is_alive():
            last.close()
            return
        try:
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(last, self._loop).result(CLOSE_S_MAX)
        finally:
            self._end()

    def _require_other_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError(_OWN_THREAD)


class _Job(Generic[Result]):
    """A coroutine for the loop, which may be cancelled before it has begun. Methods run on the loop's thread."""

    def __init__(self, coroutine: Coroutine[Any, Any, Result]) -> None:
        self.result: Future[Result] = Future()
        self._coroutine = coroutine
        self._task: asyncio.Task[Result] | None = None
        self._cancelled = False

    def begin(self) -> None:
        if self._cancelled:
            return
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        self._cancelled = True
        if self._task is None:
            self._coroutine.close()
        else:
            self._task.cancel()

    def _done(self, task: asyncio.Task[Result]) -> None:
        if task.cancelled():
            self.result.cancel()
        elif (error := task.exception()) is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(task.result())


def _result(future: Future[Result]) -> Result:
    """Waits in pieces: a signal that comes to one of gRPC's threads does not wake this one, and is seen by looking."""
    while True:
        try:
            return future.result(LOOK_EVERY_S)
        except TimeoutError:
            if future.done():  # it may be the coroutine's own
                return future.result()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Also the finalizer, which the garbage collector may run in any thread, the loop's own included."""
    loop.call_soon_threadsafe(loop.stop)
    if threading.current_thread() is not thread:
        thread.join(CLOSE_S_MAX)
