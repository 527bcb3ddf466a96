"""One OpenAI-compatible server over HTTP: one client, its two calls, and its errors in our words.

Neither the API key nor a word of the server's leaves this module. Redirects are not followed, since the key would go
along; proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import httpx2
import structlog

from laneway.workers.engines.openai_words import NO_ANSWER, ServerError, codes_of, error_of, object_of

CONNECT_S = 10.0
KEEPALIVE_S = 4.0  # llama.cpp closes what is idle after 5 s; whoever asks just then gets no answer
SILENCE_S = 300.0  # of a stream; servers that queue or prefill for long say nothing meanwhile
ANSWER_S = 30.0  # for an answer that is no stream
BODY_BYTES_MAX = 4 * 1024 * 1024  # of an answer that is no stream: a list of models, or an error
EVENT_BYTES_MAX = 1024 * 1024  # of one event of a stream

_BROKEN = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError)

Heard = Callable[[Mapping[str, str]], None]  # told the headers of every answer

log = structlog.get_logger(__name__)


class Endpoint:
    """A base_url with its key. `open` first; calls may be made at once, as many as there are."""

    def __init__(self, base_url: str, key: str, tls_ca_file: str, heard: Heard) -> None:
        self.host = httpx2.URL(base_url).netloc.decode()
        self._base_url = base_url.rstrip("/")
        self._key = key
        self._tls_ca_file = tls_ca_file
        self._heard = heard
        self._client: httpx2.AsyncClient | None = None
        self._afresh: httpx2.AsyncClient | None = None  # keeps no connections

    def open(self) -> None:
        """Raises OSError where the CA file cannot be read."""
        trusted: ssl.SSLContext | bool = True
        if self._tls_ca_file:
            trusted = ssl.create_default_context(cafile=self._tls_ca_file)
        self._client, self._afresh = (self._new_client(trusted, kept) for kept in (64, 0))

    def _new_client(self, trusted: ssl.SSLContext | bool, kept: int) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            verify=trusted,
            timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=kept, keepalive_expiry=KEEPALIVE_S),
            follow_redirects=False,
            trust_env=False,
        )

    async def close(self) -> None:
        for client in (self._client, self._afresh):
            if client is not None:
                await client.aclose()

    async def models(self) -> Mapping[str, Any]:
        """What it lists. Raises ServerError."""
        assert self._client is not None
        with _in_our_words(self.host):
            try:
                async with (
                    asyncio.timeout(ANSWER_S),
                    self._client.stream("GET", f"{self._base_url}/models") as response,
                ):
                    self._heard(response.headers)
                    body = object_of(await _body_of(response))
            except TimeoutError:
                raise ServerError(NO_ANSWER, f"no answer came within {ANSWER_S:g} s") from None
        if response.status_code != 200:
            raise self._error(response, body)
        return body

    async def events(self, route: str, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """The data of each event of the answer; closing it closes the connection. Raises ServerError.

        A server may close a connection just as it is used again. What broke before a word of an answer is asked once
        more, on a connection of its own.
        """
        assert self._client is not None
        assert self._afresh is not None
        answered: list[bool] = []
        with _in_our_words(self.host):
            try:
                async with aclosing(self._events(self._client, route, body, answered)) as events:
                    async for data in events:
                        yield data
                return
            except _BROKEN:
                if answered:
                    raise
            log.info("provider_asked_again", host=self.host)
            async with aclosing(self._events(self._afresh, route, body, answered)) as events:
                async for data in events:
                    yield data

    async def _events(
        self, client: httpx2.AsyncClient, route: str, body: Mapping[str, Any], answered: list[bool]
    ) -> AsyncGenerator[str, None]:
        """Notes in `answered` that an answer began."""
        url = f"{self._base_url}/{route}"
        async with client.sse(url, method="POST", json=body, max_event_size=EVENT_BYTES_MAX) as source:
            answered.append(True)
            response = source.response
            self._heard(response.headers)
            is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
            if response.status_code != 200 or not is_stream:
                raise self._error(response, object_of(await _body_of(response)))
            async for event in source:
                yield event.data

    def _error(self, response: httpx2.Response, body: Mapping[str, Any]) -> ServerError:
        status = response.status_code
        codes = {name: code for name, code in codes_of(body).items() if not self._key or self._key not in code}
        log.warning("provider_refused", host=self.host, status=status, **codes)
        return error_of(status, body, response.headers)


async def _body_of(response: httpx2.Response) -> bytes:
    """As much of it as is read."""
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > BODY_BYTES_MAX:
            return b""  # neither a list nor an error
    return bytes(body)


@contextmanager
def _in_our_words(host: str) -> Iterator[None]:
    try:
        yield
    except httpx2.TimeoutException as error:
        log.warning("provider_silent", host=host, error=type(error).__name__)
        raise ServerError(NO_ANSWER, "the server gave no answer in time") from None
    except httpx2.SSEError:
        log.warning("provider_event_too_large", host=host, limit_bytes=EVENT_BYTES_MAX)
        raise ServerError(500, f"the server sent an event of more than {EVENT_BYTES_MAX} bytes") from None
    except (httpx2.HTTPError, httpx2.StreamError) as error:
        log.warning("provider_broken_off", host=host, error=type(error).__name__)
        raise ServerError(NO_ANSWER, _unanswered(error)) from None


def _unanswered(error: BaseException) -> str:
    """Why nothing came; what TLS found is in the chain of causes."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return "the server's certificate is not one that is trusted here: set tls_ca_file to who signed it"
        if isinstance(cause, ssl.SSLError):
            return "the server does not speak TLS as it should: is base_url right?"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx2.ConnectError):
        return "nothing answers there"
    return "the connection to the server broke"
