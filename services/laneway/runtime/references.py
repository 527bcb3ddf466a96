"""Prompts and results that are in the object store instead of their message: put there, and resolved, here alone.

A task goes there when it is larger than INLINE_BYTES_MAX, so that no lane message is large; a result when its record
would not fit into one message. Whoever needs the task or the result itself asks here; lists never do.
"""

from __future__ import annotations

import asyncio
import math

from msgspec.structs import replace

from laneway.core.errors import ObjectLost
from laneway.core.job import GenerateTask, JobRecord, LaneJob, QueuedJob, Result
from laneway.core.objects import TASK, ObjectName, ObjectRef, result_kind
from laneway.runtime.objects import ObjectStore
from laneway.runtime.records import RETENTION_S, TTL_S_MAX
from laneway.runtime.wire.reading import UnreadableMessage
from laneway.runtime.wire.records import decode_result, decode_task, encode_result, encode_task

INLINE_BYTES_MAX = 512 * 1024  # of a serialised task in a lane message
READS_AT_ONCE = 4  # objects that one process holds while it decodes them
ID_BYTES_MAX = 5  # of a token id in a serialised task
REST_BYTES_MAX = 64 * 1024  # of a task without its prompt and grammar: what callers may send of it is bounded


class References:
    """Of one process. `retention_s`: of records, beyond their deadline."""

    def __init__(
        self, objects: ObjectStore, *, retention_s: float = RETENTION_S, inline_bytes_max: int = INLINE_BYTES_MAX
    ) -> None:
        self._objects = objects
        self._retention_s = retention_s
        self._inline_bytes_max = inline_bytes_max
        self._slots = asyncio.Semaphore(READS_AT_ONCE)

    # --- tasks ---------------------------------------------------------------------------------------

    def large(self, task: GenerateTask) -> bytes:
        """The serialised task, if it is too large for a lane message; else nothing."""
        words = len(task.json_schema) + len(task.regex) + len(task.grammar)
        if ID_BYTES_MAX * len(task.prompt_ids) + 4 * words + REST_BYTES_MAX <= self._inline_bytes_max:
            return b""  # without looking closer
        data = encode_task(task)
        return data if len(data) > self._inline_bytes_max else b""

    async def put_task(self, record: JobRecord, data: bytes, now_s: float) -> ObjectRef:
        """Stores what `large` gave. Raises what ObjectStore.put raises."""
        return await self._put(record, TASK, data, now_s)

    async def job(self, job: QueuedJob) -> LaneJob:
        """The job with its task. Raises ObjectLost; a BusError says that it cannot be had now."""
        if isinstance(job, LaneJob):
            return job
        return LaneJob(job.record, await self.task(job.task_object))

    async def task(self, stored: ObjectRef) -> GenerateTask:
        """As `job`."""
        async with self._slots:
            data = await self._objects.get(stored)
            try:
                return decode_task(data)
            except UnreadableMessage as error:
                raise ObjectLost(f"the stored task cannot be read: {error}") from None

    # --- results -------------------------------------------------------------------------------------

    async def put_result(self, record: JobRecord, result: Result, now_s: float) -> ObjectRef:
        """Stores the result of the record's present attempt. Raises what ObjectStore.put raises."""
        return await self._put(record, result_kind(record.attempt), encode_result(result), now_s)

    async def record(self, record: JobRecord) -> JobRecord:
        """The record with its whole result, wherever that is. Raises ObjectLost; a BusError is for now."""
        if record.result_object is None:
            return record
        async with self._slots:
            data = await self._objects.get(record.result_object)
            try:
                return replace(record, result=decode_result(data))
            except UnreadableMessage as error:
                raise ObjectLost(f"the stored result cannot be read: {error}", job_id=record.job_id) from None

    # --- both ----------------------------------------------------------------------------------------

    async def _put(self, record: JobRecord, kind: str, data: bytes, now_s: float) -> ObjectRef:
        left_s = max(0.0, record.contract.deadline_s - now_s) + self._retention_s
        until_s = now_s + min(TTL_S_MAX, math.ceil(left_s))
        return await self._objects.put(record.tenant, record.job_id, kind, data, until_s=until_s)

    async def remove(self, stored: ObjectRef) -> None:
        """Takes back what nobody will refer to. Raises a BusError; then it expires by itself."""
        await self._objects.remove(ObjectName.parse(stored.name))


def is_whole(record: JobRecord) -> bool:
    """Whether `record.result` is the result itself, where there is one."""
    return record.result_object is None or (record.result is not None and len(record.result.token_ids) > 0)
