"""Which jobs are worth running side by side: the hash that a park subject carries."""

from __future__ import annotations

from functools import lru_cache

from laneway.core.ids import hash_word
from laneway.core.job import GenerateTask

GROUP_LENGTH = 10
PREFIX_TOKENS = 64  # a few KV blocks: below that a shared prefix saves too little to wait for


def group_of(pool: str, tenant: str, task: GenerateTask) -> str:
    """10 base32 characters: equal for jobs of one pool, adapter, salt and prompt beginning, salted by tenant."""
    head = ",".join(map(str, task.prompt_ids[:PREFIX_TOKENS]))
    key = "\x00".join((pool, tenant, task.adapter, task.cache_salt, str(task.constrained), head))
    return _hash(key)


@lru_cache(256)  # jobs that are worth running side by side come side by side
def _hash(key: str) -> str:
    return hash_word(key, GROUP_LENGTH)
