"""What an OpenAI-compatible server says when something is wrong, in our words. Pure.

Servers say it in words of their own, which may hold parts of a prompt or of a key: they are neither told nor logged,
only the status and the short codes beside them are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

# How llama.cpp, vLLM and others say that a request does not fit.
_CONTEXT = re.compile(r"context_length_exceeded|exceed_context_size|context (length|size|window)", re.IGNORECASE)
_CODE = re.compile(r"[a-z0-9_]{1,40}")
NO_ANSWER = 0  # the status of what was no HTTP answer
RETRYABLE = (NO_ANSWER, 408, 409, 425, 429)  # and all of 5xx


class ServerError(Exception):
    """The server answered with an error, or not at all. The message: our words, for the caller."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers: Mapping[str, str] = headers or {}

    @property
    def may_pass(self) -> bool:
        """Whether the same request may do better at another time."""
        return self.status in RETRYABLE or self.status >= 500


def error_of(status: int, body: object, headers: Mapping[str, str] | None = None) -> ServerError:
    """What an error means. `status`: of HTTP; of an error within a stream, what it says itself."""
    said = _said(body)
    if status in (400, 413, 422) and _CONTEXT.search(" ".join(str(said.get(k)) for k in ("code", "type", "message"))):
        return ServerError(
            status,
            f"prompt and max_tokens do not fit the server's context{_limit(said)}: set the pool's context_length "
            "to what the server has",
            headers,
        )
    return ServerError(status, f"{words_of(status)} ({status})", headers)


def status_of(event: Mapping[str, Any]) -> int:
    """Of an error in the middle of a stream, which began with 200."""
    said = _said(event)
    codes = (code for code in (said.get("code"), said.get("status")) if isinstance(code, int) and 400 <= code < 600)
    return next(codes, 500)


def words_of(status: int) -> str:
    """What a status means and what to do, without its number."""
    match status:
        case 401:
            return "the server does not take the API key: name a valid one with api_key_file or api_key_env"
        case 402:
            return "the provider wants to be paid first: look at the account of the API key"
        case 403:
            return "the API key may not use this model: ask for it at the provider, or set another served_model"
        case 404 | 405:
            return (
                "the server has no such route or model: look at base_url, which mostly ends with v1, and served_model"
            )
        case 408 | 504:
            return "the server's own time limit ended the request: it may be overloaded, so give the pool fewer slots"
        case 413:
            return "the request is too large for the server"
        case 429:
            return "the server takes no more for now, or its quota is used up: give the pool fewer slots, or raise it"
        case _ if 200 <= status < 300:
            return "the server's answer is no stream of events: is it an OpenAI-compatible server?"
        case _ if 300 <= status < 400:
            return "the server says that it is elsewhere: set base_url to where it is"
        case _ if 400 <= status < 500:
            return "the server refused the request as invalid: if it takes no token ids, set prompt_ids = false"
        case _:
            return "the server failed on this request: look at its log"


def codes_of(body: object) -> dict[str, str]:
    """What of an error may be logged: short names, never its words."""
    said = _said(body)
    found = {name: str(said.get(name)) for name in ("type", "code") if said.get(name) is not None}
    return {name: value for name, value in found.items() if _CODE.fullmatch(value)}


def object_of(text: str | bytes) -> Mapping[str, Any]:
    """A JSON object; an empty one if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _said(body: object) -> Mapping[str, Any]:
    answer: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
    error = answer.get("error")
    return error if isinstance(error, Mapping) else answer


def _limit(said: Mapping[str, Any]) -> str:
    """llama.cpp has a field for it; others say it in their words."""
    limit = said.get("n_ctx")
    if not isinstance(limit, int):
        found = re.search(r"context (?:length|size|window)\D{0,20}(\d{2,9})", str(said.get("message")))
        limit = int(found[1]) if found else 0
    return f" of {limit} tokens" if limit else ""
