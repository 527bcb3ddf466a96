"""Names of what is too large for a message and goes to the region's object store: the prompt of a job, its result.

A name says whose object it is, of which job and kind, when it was made and until when the job's record is kept at
least; so a sweep needs no more than names. Each put has a name of its own: nobody's object takes the place of another.
"""

from __future__ import annotations

from msgspec import Struct

from laneway.core.ids import is_token

TASK = "task"
_SEPARATOR = "/"


class ObjectRef(Struct, frozen=True):
    """What a record or a lane message holds instead of the thing itself."""

    name: str
    size_bytes: int
    sha256: bytes


class ObjectName(Struct, frozen=True):
    tenant: str
    job_id: str
    kind: str  # TASK, or result_kind(attempt)
    made_s: int  # Unix seconds, by the writer's clock
    until_s: int  # Unix seconds: its job's record is kept until then, unless the job was refused
    tag: str  # tells puts of one second apart

    @property
    def tokens(self) -> tuple[str, str, str, str]:
        """What a subject of its chunks is made of."""
        return self.tenant, self.job_id, self.kind, f"{self.made_s:08x}-{self.until_s:08x}-{self.tag}"

    def __str__(self) -> str:
        return _SEPARATOR.join(self.tokens)

    @classmethod
    def parse(cls, name: str) -> ObjectName:
        """Raises ValueError for a name that is not one of ours."""
        tenant, job_id, kind, own = tokens = name.split(_SEPARATOR)
        if not all(map(is_token, tokens)):
            raise ValueError(f"not the name of an object: {name!r}")
        made, until, tag = own.split("-")
        return cls(tenant, job_id, kind, int(made, 16), int(until, 16), tag)


def result_kind(attempt: int) -> str:
    """Of the result that one attempt computed: a stale worker's is another object than its successor's."""
    return f"result-{attempt}"
