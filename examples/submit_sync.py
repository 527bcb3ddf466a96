"""Leaves jobs in the batch lane and collects the results, from threads that share a client:

python examples/submit_sync.py [host:port]

`laneway up --fixed-ports` listens at the default address; without the flag, give the one that it prints.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from laneway.client import LanewayError
from laneway.client.sync import Client


def describe(client: Client, subject: str) -> str:
    submitted = client.submit(
        model="chat",
        messages=[{"role": "user", "content": f"Describe {subject} in one sentence."}],
        lane="batch",
        max_tokens=48,
        temperature=0,
        deadline_s=3600,
        labels={"example": "submit"},
    )
    job = client.wait(submitted.job_id)  # outlasts a restart of the service
    return job.result.text if job.result else str(job.state)


def main(address: str = "127.0.0.1:7070") -> None:
    subjects = ["a lighthouse", "a harbour"]
    with Client(address) as client, ThreadPoolExecutor() as pool:
        for subject, text in zip(subjects, pool.map(lambda s: describe(client, s), subjects), strict=True):
            print(f"{subject}: {text}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except LanewayError as error:
        sys.exit(f"{error.message} ({error.reason})")
