"""A provider's own strict count of requests and tokens: what quotas are measured against.

A request is judged as it comes: refused with 429 where this window has had its requests, or has not the tokens left
that it asks for (prompt and max_tokens); let through, its tokens are corrected to what was really used when it ends.
The first window begins with the first request, so at nobody else's minute.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Judged:
    at_s: float
    asked: int
    allowed: bool
    used: int  # tokens; while it runs, those asked for


@dataclass
class StrictCount:
    requests: int
    tokens: int
    window_s: float
    began_s: float = 0.0
    log: list[Judged] = field(default_factory=list)

    def arrive(self, at_s: float, prompt_tokens: int, max_tokens: int) -> Judged:
        if not self.log:
            self.began_s = at_s
        window = self.window_of(at_s)
        now = [each for each in self.log if each.allowed and self.window_of(each.at_s) == window]
        asked = prompt_tokens + max_tokens
        allowed = len(now) < self.requests and sum(each.used for each in now) + asked <= self.tokens
        judged = Judged(at_s, asked, allowed, asked if allowed else 0)
        self.log.append(judged)
        return judged

    def window_of(self, at_s: float) -> int:
        return int((at_s - self.began_s) // self.window_s)

    def wanted(self) -> tuple[Counter[int], Counter[int]]:
        """Requests that came, and tokens that they used (asked for, where refused), by window."""
        requests, tokens = Counter[int](), Counter[int]()
        for each in self.log:
            requests[self.window_of(each.at_s)] += 1
            tokens[self.window_of(each.at_s)] += each.used if each.allowed else each.asked
        return requests, tokens

    def most_in_any(self, span_s: float) -> tuple[int, int]:
        """Requests and tokens of the fullest span of such a length, wherever it begins."""
        most_requests = most_tokens = first = tokens = 0
        for last, each in enumerate(self.log):
            tokens += each.used if each.allowed else each.asked
            while self.log[first].at_s <= each.at_s - span_s:
                tokens -= self.log[first].used if self.log[first].allowed else self.log[first].asked
                first += 1
            most_requests, most_tokens = max(most_requests, last - first + 1), max(most_tokens, tokens)
        return most_requests, most_tokens
