"""Credentials and tenants in the composed stack: each sees its own jobs only, and a name that NATS could misread is
refused before anything runs."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from laneway.cli.stack import LocalStack, StackError, StackOptions
from laneway.client import Client, JobState, NotFound, Unauthenticated

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def options(folder: Path, *tenants: str) -> StackOptions:
    """A simulated stack whose callers need tokens: "token-<n>" for each tenant."""
    tokens = folder / "tokens.toml"
    entries = [
        f'[[token]]\nsha256 = "{hashlib.sha256(f"token-{n}".encode()).hexdigest()}"\ntenant = "{tenant}"\n'
        for n, tenant in enumerate(tenants)
    ]
    tokens.write_text("\n".join(entries))
    settings = {"admission": {"tokens_file": str(tokens)}, "process": {"drain_s": 3.0}}
    return StackOptions(engine="simulated", workers=1, settings=settings, token="token-0")


async def test_a_tenant_sees_and_touches_only_its_own_jobs(tmp_path: Path):
    async with LocalStack(options(tmp_path, "acme", "other")) as stack:
        address = stack.addresses.admission
        async with Client(address, token="token-0") as acme, Client(address, token="token-1") as other:
            long = await acme.submit(  # a slow machine takes a minute and more
                model="chat", prompt="Hi", max_tokens=2000, ignore_eos=True, deadline_s=600.0
            )
            job_id = long.job_id
            for touch in (other.get_job, other.cancel, other.wait):
                with pytest.raises(NotFound):
                    await touch(job_id)
            with pytest.raises(NotFound):
                async with other.watch(job_id) as stream:
                    await stream.text()
            assert [job async for job in other.list_jobs()] == []
            assert not (await acme.get_job(job_id)).state.terminal, "nobody else cancelled it"
            same_key = {"idempotency_key": "one", "model": "chat", "prompt": "Hi", "max_tokens": 2}
            ids = {(await client.submit(**same_key)).job_id for client in (acme, other)}  # type: ignore[arg-type]
            assert len(ids) == 2, "keys are each tenant's own"
            assert (await acme.cancel(job_id)).state is JobState.CANCELLED


async def test_callers_without_a_known_token_are_turned_away_and_the_stack_starts_without_one(tmp_path: Path):
    async with LocalStack(replace(options(tmp_path, "acme"), token="")) as stack:
        for token in (None, "guess"):
            async with Client(stack.addresses.admission, token=token) as client:
                with pytest.raises(Unauthenticated):
                    await client.submit(model="chat", prompt="Hi")


async def test_a_tenant_that_is_no_subject_token_stops_the_stack_naming_it(tmp_path: Path):
    with pytest.raises(StackError, match=r"(?s)status 2.*tokens_file.*token\[0\]\.tenant"):
        async with LocalStack(options(tmp_path, "a.>")):
            pass
