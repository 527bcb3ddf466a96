"""Cases of text: engines give ids, and the worker's assembler must make the text of them that was meant."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from laneway.workers.conformance.case import NotOffered, case, expect
from laneway.workers.conformance.rig import QUESTIONS, Rig
from laneway.workers.text import TextAssembler

UNFINISHED = "\ufffd"  # what bytes become that are no character
STOP_IDS = 3  # of a stop string: it crosses two borders of tokens


@case("characters-whole", "Characters of several tokens come whole; at most the last of an output is unfinished")
async def characters_whole(rig: Rig) -> None:
    token_bytes = rig.subject.tokenizer.token_bytes
    heard = await rig.run(rig.subject.tokenizer.encode(rig.subject.wide_prompt), 40)
    assembler = TextAssembler(token_bytes)
    text = "".join(assembler.feed(chunk).text for chunk in heard.chunks)
    whole = b"".join(map(token_bytes, heard.ids)).decode(errors="replace")
    expect(UNFINISHED not in text, "an unfinished character is inside the text")
    expect(text + assembler.flush() == whole, "the pieces joined are not the ids decoded at once")
    if text.isascii():
        raise NotOffered("no character of several bytes came in 40 tokens")


@case("stop-string-across-ids", "A stop string that spans several ids is found, and the text ends before it")
async def stop_string_across_ids(rig: Rig) -> None:
    token_bytes = rig.subject.tokenizer.token_bytes
    prompt = rig.prompt(QUESTIONS[4])
    whole = (await rig.run(prompt, 48)).ids
    stop = _spanning(whole, token_bytes)
    assembler = TextAssembler(token_bytes, (stop,))
    text = await _read(rig, rig.submit(prompt, rig.lasting(prompt)), assembler, len(whole))
    if rig.can.exact:
        before = b"".join(map(token_bytes, whole)).decode(errors="replace").partition(stop)[0]
        expect(assembler.stopped, "the stop string of an earlier equal run was not found")
        expect(text == before, f"{len(text)} characters came before the stop string; there are {len(before)}")
    expect(stop not in text, "the stop string is in the text")


async def _read(rig: Rig, request_id: int, assembler: TextAssembler, tokens: int) -> str:
    """The text of a run as a worker makes it of each call's ids; the run is aborted where the text stops."""
    heard, text, taken = rig.listener.heard[request_id], "", 0

    def more() -> bool:
        return len(heard.chunks) > taken or heard.finish is not None

    while not assembler.stopped and len(heard.ids) < tokens and heard.finish is None:
        await rig.until(more, "for the next ids")
        text += assembler.feed([i for chunk in heard.chunks[taken:] for i in chunk]).text
        taken = len(heard.chunks)
    await rig.stop([request_id])
    return text


def _spanning(ids: Sequence[int], token_bytes: Callable[[int], bytes]) -> str:
    """Text that some neighbouring ids spell, after the first few."""
    for at in range(len(ids) // 4, len(ids) - STOP_IDS):
        pieces = [token_bytes(i) for i in ids[at : at + STOP_IDS]]
        text = b"".join(pieces).decode(errors="replace")
        if all(pieces) and UNFINISHED not in text:
            return text
    raise NotOffered(f"no {STOP_IDS} neighbouring ids of {len(ids)} spell whole characters")


CASES = (characters_whole, stop_string_across_ids)
