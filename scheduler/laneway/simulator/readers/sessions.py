"""Sessions in a closed loop: turns in order, each a think time after the end of the turn before.

Recorded sessions overlap as chance had it; here they start at times of the caller's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from laneway.simulator.columns import starts_of, trace_of
from laneway.simulator.trace import Floats, Ints, Prefixes, Trace

SHORTEST_THINK_S = 1e-3  # of a later turn: 0 says that a turn is a session's first


@dataclass(slots=True)
class Session:
    """Turns in order. `blocks`: of each prompt, by ids of this session alone unless they are below `shared_ids`."""

    name: str
    think_s: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    blocks: list[Ints] = field(default_factory=list)
    begin_s: float = 0.0

    def __len__(self) -> int:
        return len(self.prompt_tokens)


def trace_of_sessions(
    name: str,
    sessions: Sequence[Session],
    *,
    block_tokens: int,
    starts_s: Floats | None = None,
    think_s_most: float = float("inf"),
    prompt_tokens_most: int | None = None,
    notes: Sequence[str] = (),
) -> Trace:
    """`starts_s`: of each session, as recorded by default. Longer think times are cut to `think_s_most`.

    Sessions in which a prompt is longer than `prompt_tokens_most` are left out whole.
    """
    notes = list(notes)
    if prompt_tokens_most is not None:
        fitting = [each for each in sessions if max(each.prompt_tokens, default=0) <= prompt_tokens_most]
        if len(fitting) < len(sessions):
            notes.append(
                f"{len(fitting)} of {len(sessions)} sessions, whose prompts stay within {prompt_tokens_most} tokens"
            )
        sessions = fitting
    sessions = [each for each in sessions if len(each)]
    if think_s_most < float("inf"):
        notes.append(f"think times cut to {think_s_most:g} s")
    begins_s = np.array([each.begin_s for each in sessions]) if starts_s is None else starts_s[: len(sessions)]
    if len(begins_s) != len(sessions):
        raise ValueError(f"{name}: {len(sessions)} sessions, but {len(begins_s)} times to start them")
    turns = np.array([len(each) for each in sessions], dtype=np.int64)
    later = np.arange(int(turns.sum())) - np.repeat(starts_of(turns)[:-1], turns) > 0
    think = np.array([value for each in sessions for value in each.think_s], dtype=np.float64)
    ids = [row for each in sessions for row in each.blocks]
    return trace_of(
        name,
        np.where(later, 0.0, np.repeat(begins_s, turns)),
        np.array([value for each in sessions for value in each.prompt_tokens], dtype=np.int64),
        np.array([value for each in sessions for value in each.output_tokens], dtype=np.int64),
        session=np.repeat(np.arange(len(sessions)), turns),
        think_s=np.where(later, np.clip(think, SHORTEST_THINK_S, think_s_most), 0.0),
        prefixes=Prefixes(
            block_tokens,
            np.concatenate([*ids, np.zeros(0, dtype=np.int64)]),
            starts_of(np.array([len(row) for row in ids], dtype=np.int64)),
        ),
        notes=notes,
    )


def reusing(before: Ints, reused: int, blocks: int, fresh: int) -> Ints:
    """Ids of a prompt of so many blocks: the first `reused` as in a prompt before, the rest from `fresh` on."""
    kept = before[: min(reused, blocks)]
    return np.concatenate((kept, np.arange(fresh, fresh + blocks - len(kept))))
