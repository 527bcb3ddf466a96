"""Who waits in fleet mode: first come, first served in each region and lane, as curves of what has come by each second.

A lane's head is a place on its curve, so how long the head has waited and of which classes it is are known without any
request being kept. Between two seconds arrivals are spread evenly.
"""

from __future__ import annotations

import numpy as np

from laneway.core.lanes import LANES
from laneway.simulator.trace import Floats, Ints


class Lines:
    def __init__(self, span_s: int, regions: int, lane_of: Ints, of_lane: Floats) -> None:
        """`lane_of`: of each class; `of_lane`: the same as a table of 0 and 1."""
        self._lane_of, self._of_lane = lane_of, of_lane
        self._came = np.zeros((span_s + 1, regions, len(lane_of)))  # by the begin of a second, by class
        self._came_lane = np.zeros((span_s + 1, regions, len(LANES)))
        self._left = np.zeros((regions, len(LANES)))  # started or dropped
        self._left_class = np.zeros((regions, len(lane_of)))
        self._head = np.zeros((regions, len(LANES)), dtype=np.int64)  # second in which the head came
        self._region = np.arange(regions)[:, None]
        self._lane = np.arange(len(LANES))[None, :]
        self._class = np.arange(len(lane_of))[None, :]
        self._end = 0  # seconds that are filled

    def add(self, came: Floats) -> None:
        """Of the next second, by region and class."""
        self._came[self._end + 1] = self._came[self._end] + came
        self._came_lane[self._end + 1] = self._came_lane[self._end] + came @ self._of_lane
        self._end += 1

    @property
    def waiting(self) -> Floats:
        """By region and class."""
        return np.asarray(np.maximum(self._came[self._end] - self._left_class, 0.0))

    @property
    def head_s(self) -> Floats:
        """When the head of each region's lane came; the end of the last second where nobody waits."""
        begin = self._came_lane[self._head, self._region, self._lane]
        size = self._came_lane[np.minimum(self._head + 1, self._end), self._region, self._lane] - begin
        share = np.where(size > 0.0, (self._left - begin) / np.where(size > 0.0, size, 1.0), 1.0)
        return np.asarray(np.minimum(self._head + np.clip(share, 0.0, 1.0), self._end))

    def take(self, share: Floats) -> tuple[Floats, Floats]:
        """Takes this share of each lane's line from its head: who they are by class, and how long they have waited on
        average by lane, if they go evenly during the last second."""
        before = self.head_s
        line = self._came_lane[self._end] - self._left
        left = np.where(share >= 1.0, self._came_lane[self._end], self._left + np.clip(share, 0.0, 1.0) * line)
        taken = self._advance(left)
        waited = self._end - 0.5 * (before + self.head_s)
        # Those who came and went within the second did not wait: the head is where the clock is, all along.
        return taken, np.where(line > 0.0, np.maximum(waited - 0.5, 0.0), 0.0)

    def drop_before(self, at_s: Floats) -> Floats:
        """Takes all that came before a whole second, by lane: who they are by class."""
        upto = np.clip(at_s, 0, self._end).astype(np.int64)
        came = self._came_lane[upto[None, :], self._region, self._lane]
        if np.all(came <= self._left):
            return np.zeros_like(self._left_class)
        return self._advance(np.maximum(self._left, came))

    def _advance(self, left: Floats) -> Floats:
        self._left = left
        while True:
            ahead = np.minimum(self._head + 1, self._end)
            on = (self._came_lane[ahead, self._region, self._lane] <= left) & (self._head < self._end)
            if not on.any():
                break
            self._head += on
        # By class: the same place on the lane's curve.
        head = self._head[:, self._lane_of]
        begin = self._came[head, self._region, self._class]
        size = self._came[np.minimum(head + 1, self._end), self._region, self._class] - begin
        share = (self.head_s - self._head)[:, self._lane_of]
        now = np.maximum(begin + np.clip(share, 0.0, 1.0) * size, self._left_class)
        taken = now - self._left_class
        self._left_class = now
        return taken
