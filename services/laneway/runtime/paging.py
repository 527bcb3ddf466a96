"""Pages of a list as AIP-158 has them. A page token is opaque, belongs to one filter, and survives items that go."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from laneway.core.errors import InvalidRequest

PAGE_SIZE_DEFAULT = 50
PAGE_SIZE_MAX = 1000
_DIGEST_BYTES = 8

T = TypeVar("T")


def paginate(
    items: Sequence[T],
    page_size: int,
    page_token: str,
    *,
    filter_key: str,
    key: Callable[[T], str],
    descending: bool = False,
) -> tuple[list[T], str]:
    """One page of `items` and the token of the next page, empty on the last.

    `items` must be in the order of `key`, which is unique (`descending`: greatest first). `filter_key` names the list
    that was asked for (method, tenant, filters): a token of another list is refused. The next page starts after the
    last key given, so that items that come or go in between neither repeat nor hide others.
    """
    size = page_size_of(page_size)
    start = 0
    if page_token:
        after = read_token(page_token, filter_key)
        start = next(
            (i for i, item in enumerate(items) if (key(item) < after if descending else key(item) > after)), len(items)
        )
    page = list(items[start : start + size])
    more = start + size < len(items)
    return page, make_token(key(page[-1]), filter_key) if more else ""


def page_size_of(page_size: int) -> int:
    """The size to use for the one asked for: 0 means the default, larger than the maximum means the maximum."""
    if page_size < 0:
        raise InvalidRequest("page_size must not be negative", field="page_size")
    return min(page_size, PAGE_SIZE_MAX) or PAGE_SIZE_DEFAULT


def make_token(after: str, filter_key: str) -> str:
    return base64.urlsafe_b64encode(_digest(filter_key) + after.encode()).decode().rstrip("=")


def read_token(page_token: str, filter_key: str) -> str:
    """The key after which the page starts. InvalidRequest if the token is none of ours, or another list's."""
    try:
        raw = base64.b64decode(page_token + "=" * (-len(page_token) % 4), altchars=b"-_", validate=True)
        after = raw[_DIGEST_BYTES:].decode()
    except (binascii.Error, ValueError):
        raise InvalidRequest("page_token was not given by this service", field="page_token") from None
    if raw[:_DIGEST_BYTES] != _digest(filter_key) or not after:
        raise InvalidRequest("page_token belongs to another list", field="page_token")
    return after


def _digest(filter_key: str) -> bytes:
    return hashlib.sha256(filter_key.encode()).digest()[:_DIGEST_BYTES]
