"""What we hand to people to copy runs as it stands: the programs of examples/ and the snippet of the README."""

from __future__ import annotations

import asyncio
import re
import sys
import textwrap
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from laneway.cli.stack import Addresses, LocalStack, StackOptions

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

ROOT = Path(__file__).resolve().parents[2]
MODEL = {"name": "chat", "engine": "simulated", "workers": 1, "engine_options": {"pace_s": 0.001}}
OPTIONS = StackOptions(settings={"models": [MODEL]})


async def run(name: str, *arguments: str, typed: str = "") -> list[str]:
    """The lines that a program of examples/ prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "examples" / name), *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(typed.encode()), 40)
    assert process.returncode == 0, err.decode()
    assert err == b""
    return out.decode().splitlines()


async def run_readme(addresses: Addresses) -> None:
    """The README's only Python, with the address of this stack in place of the default one."""
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert "127.0.0.1:7070" in snippet
    program = "async def main():\n" + textwrap.indent(snippet, "    ").replace("127.0.0.1:7070", addresses.admission)
    names: dict[str, object] = {}
    exec(program, names)
    main = names["main"]
    assert callable(main)
    running = main()
    assert asyncio.iscoroutine(running)
    await running


async def test_every_example_and_the_readme_run_as_they_stand(capsys: pytest.CaptureFixture[str]):
    names = {"generate.py", "generate_sync.py", "submit.py", "submit_sync.py", "producer.py"}
    assert {file.name for file in (ROOT / "examples").glob("*.py")} == names
    prompts = "Describe a lighthouse.\nDescribe a harbour.\n"
    async with LocalStack(OPTIONS) as stack:
        addresses = stack.addresses
        generated, submitted, produced, _ = await asyncio.gather(
            run("generate.py", "Why is the sky blue?", addresses.admission),
            run("submit.py", addresses.admission),
            run("producer.py", addresses.nats, typed=prompts),
            run_readme(addresses),
        )
        generated_sync, submitted_sync, produced_again = await asyncio.gather(
            run("generate_sync.py", "Why is the sky blue?", addresses.admission),
            run("submit_sync.py", addresses.admission),
            run("producer.py", addresses.nats, str(stack.nkeys / "producer.seed"), typed=prompts),
        )
    for lines in (generated, generated_sync):
        assert lines[-1].startswith("first token after ")
        assert lines[-1].endswith(" 128 tokens")
    for lines, subjects in (
        (submitted, ("a lighthouse: ", "a harbour: ")),
        (produced, ("Describe a lighthouse. ", "Describe a harbour. ")),
    ):
        for subject in subjects:
            verdict, text = (line.removeprefix(subject) for line in lines if line.startswith(subject))
            assert verdict
            assert len(text) == 48, "a made-up character for each token"
    assert produced_again == produced, "the same lines are the same jobs"
    assert [len(line) for line in submitted_sync] == [len("a lighthouse: ") + 48, len("a harbour: ") + 48]
    assert len(capsys.readouterr().out) > 256
