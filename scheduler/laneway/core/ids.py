"""Identifiers: subject tokens, job ids, and the hash of an idempotency key. Randomness is passed in."""

from __future__ import annotations

import hashlib
import re

from laneway.core.errors import InvalidRequest

TOKEN_LENGTH_MAX = 64
REGION_LENGTH_MAX = 27
_DIGITS = "abcdefghijklmnopqrstuvwxyz234567"
_PAIRS = [first + second for first in _DIGITS for second in _DIGITS]
_UUID7_STAMP = re.compile(r"-([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}\Z")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


def is_token(text: str) -> bool:
    """Whether text may be a token of a NATS subject: [A-Za-z0-9_-]{1,64}."""
    return _TOKEN.match(text) is not None


def check_token(text: str, field: str) -> str:
    """Returns text, or raises InvalidRequest naming the field."""
    if not is_token(text):
        raise InvalidRequest(f"{field} must be 1 to 64 of the characters A-Z a-z 0-9 _ -", field=field)
    return text


def uuid7(now_s: float, random_bytes: bytes) -> str:
    """RFC 9562 UUID version 7 from a wall time and 10 random bytes."""
    if len(random_bytes) != 10:
        raise ValueError("uuid7 needs 10 random bytes")
    raw = bytearray(int(now_s * 1000).to_bytes(6, "big") + random_bytes)
    raw[6] = (raw[6] & 0x0F) | 0x70
    raw[8] = (raw[8] & 0x3F) | 0x80
    text = raw.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def new_job_id(region: str, now_s: float, random_bytes: bytes) -> str:
    """`<region>-<uuid7>`: sorts by creation time inside a region."""
    return f"{region}-{uuid7(now_s, random_bytes)}"


def made_s(job_id: str) -> float:
    """When an id was made, in Unix seconds of its door's clock; 0.0 for one that does not say (made from a key)."""
    stamp = _UUID7_STAMP.search(job_id)
    return int(stamp[1] + stamp[2], 16) / 1000 if stamp is not None else 0.0


def keyed_job_id(region: str, tenant: str, key: str) -> str:
    """`<owner region>-` + 26 base32 characters of SHA-256(tenant, key): the same key always names the same job."""
    return "-".join((region, hash_word(f"{tenant}\x00{key}", 26)))


def requeued_job_id(region: str, tenant: str, job_id: str) -> str:
    """The id of the job that runs a dead letter again: the same one however often that is asked for.

    No tenant has a space in its name, so that no idempotency key gives the same id.
    """
    return keyed_job_id(region, f"requeue {tenant}", job_id)


def hash_word(text: str, length: int) -> str:
    """The first characters, in even number, of SHA-256(text) in RFC 4648 base32, in small letters.

    base64.b32encode takes twice as long, and this is made once or twice for each job.
    """
    bits = 5 * length
    number = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") >> (256 - bits)
    return "".join([_PAIRS[number >> shift & 1023] for shift in range(bits - 10, -1, -10)])


def job_region(job_id: str) -> str:
    """The owner region of a job id; InvalidRequest if it is none."""
    check_token(job_id, "job_id")
    tail = 26 if len(job_id.rsplit("-", 1)[-1]) == 26 else 36
    region = job_id[: -tail - 1]
    if not region or job_id[-tail - 1] != "-":
        raise InvalidRequest("job_id is not a job id", field="job_id")
    return region
