"""Leaves two jobs in the batch lane and collects the results: python examples/submit.py [host:port]

`laneway up --fixed-ports` listens at the default address; without the flag, give the one that it prints.
"""

import asyncio
import sys

from laneway.client import Client, LanewayError


async def main(address: str = "127.0.0.1:7070") -> None:
    async with Client(address) as client:
        jobs = {}
        for subject in ("a lighthouse", "a harbour"):
            submitted = await client.submit(
                model="chat",
                messages=[{"role": "user", "content": f"Describe {subject} in one sentence."}],
                lane="batch",
                max_tokens=48,
                temperature=0,
                deadline_s=3600,
                labels={"example": "submit"},
            )
            jobs[submitted.job_id] = subject
            print(f"{subject}: {submitted.verdict.kind}, {submitted.verdict.message}")
        for job_id, subject in jobs.items():
            job = await client.wait(job_id)
            print(f"{subject}: {job.result.text if job.result else job.state}")


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except LanewayError as error:
        sys.exit(f"{error.message} ({error.reason})")
