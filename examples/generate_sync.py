"""Streams one answer, without an event loop: python examples/generate_sync.py "Why is the sky blue?" [host:port]

`laneway up --fixed-ports` listens at the default address; without the flag, give the one that it prints.
"""

import sys

from laneway.client import LanewayError
from laneway.client.sync import Client


def main(prompt: str, address: str = "127.0.0.1:7070") -> None:
    with Client(address) as client:
        request = client.generate(
            model="chat",
            messages=[{"role": "user", "content": prompt}],
            lane="priority",
            max_tokens=128,
            temperature=0,
            deadline_s=60,
        )
        with request as stream:  # leaving the block early, or Ctrl-C, cancels the job
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print()
        print(f"first token after {stream.finished.ttft_s:.3f} s, {stream.finished.usage.completion_tokens} tokens")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except LanewayError as error:
        again = f"; try again in {error.retry_after_s:.1f} s" if error.retry_after_s is not None else ""
        sys.exit(f"{error.message} ({error.reason}){again}")
