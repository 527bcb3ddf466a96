"""The turns of a chat, out of the ids that a chat template made of them: for servers that take messages and no ids.

How the template frames turns is found by rendering a few with known contents. What is read out of a prompt is right
when rendering it gives the prompt again, id for id; anything else is no chat of this template.
"""

from __future__ import annotations

from collections.abc import Sequence

from laneway.core.errors import InvalidRequest
from laneway.core.prompt import ChatTurn
from laneway.runtime.tokenizer import PLAIN_ROLES, Tokenizer

# Contents that no template has in its own text and none changes.
_PROBES = ("qzA1xk", "qzB2xk", "qzC3xk")


class NotTurns(ValueError):
    """No messages render to these ids."""


class ChatTurns:
    """The chat template of one tokenizer, read backwards."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._starts: dict[str, str] = {}  # what stands before a first turn
        self._ends: dict[str, str] = {}  # what stands after a last one
        self._between: dict[str, dict[str, str]] = {role: {} for role in PLAIN_ROLES}
        # A system turn first: a template may begin with one of its own, which is then said and not left to the server.
        for role in ("system", "user", "assistant"):
            self._learn(role)

    def of(self, prompt_ids: Sequence[int]) -> list[ChatTurn]:
        """Raises NotTurns."""
        text, ids = self._shown(prompt_ids), list(prompt_ids)
        for role, start in self._starts.items():
            if text.startswith(start):
                turns = self._read(text, len(start), role)
                if turns and self._rendered(turns) == ids:
                    return turns
        raise NotTurns

    def _read(self, text: str, at: int, role: str) -> list[ChatTurn]:
        """The turns from the content that begins `at`; none where the text does not end as a prompt does."""
        turns: list[ChatTurn] = []
        while True:
            end = self._ends.get(role)
            last = len(text) - len(end) if end and text.endswith(end) else -1
            found = [(text.find(mark, at), -len(mark), follower) for follower, mark in self._between[role].items()]
            where, length, follower = min((each for each in found if each[0] >= 0), default=(-1, 0, ""))
            if last >= at and (where < 0 or where >= last):
                return [*turns, ChatTurn(role, text[at:last])]
            if where < 0:
                return []
            turns.append(ChatTurn(role, text[at:where]))
            role, at = follower, where - length

    # --- the template --------------------------------------------------------------------------------

    def _learn(self, role: str) -> None:
        alone, before_user = self._framed(role), self._framed(role, "user")
        if first := alone or before_user:
            self._starts[role] = first[0]
        if last := alone or self._framed("user", role):
            self._ends[role] = last[-1]
        for follower in PLAIN_ROLES:
            if pair := self._framed(role, follower):
                self._between[role][follower] = pair[1]
            elif behind := self._framed("user", role, follower):
                self._between[role][follower] = behind[2]

    def _framed(self, *roles: str) -> list[str]:
        """What the template puts before, between and after turns of these roles; empty where it does not take them."""
        probes = _PROBES[: len(roles)]
        text = self._shown(self._rendered([ChatTurn(*turn) for turn in zip(roles, probes, strict=True)]))
        frames: list[str] = []
        for probe in probes:
            before, found, text = text.partition(probe)
            if not found:
                return []
            frames.append(before)
        return [*frames, text]

    def _rendered(self, turns: Sequence[ChatTurn]) -> list[int]:
        """Empty where the template refuses them."""
        try:
            return self._tokenizer.encode_chat(turns)
        except InvalidRequest:
            return []

    def _shown(self, ids: Sequence[int]) -> str:
        """Ids as text, a control token as its number between NULs. A content may look like that: then it does not
        render to the same ids again."""
        pieces = [self._tokenizer.token_bytes(i) or b"\0%d\0" % i for i in ids]
        return b"".join(pieces).decode(errors="replace")
