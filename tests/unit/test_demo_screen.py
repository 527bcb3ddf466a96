"""What the demo prints outside a terminal: every event once and in its order."""

import io

from rich.console import Console

from laneway.cli.demo.show import EVENTS_SHOWN, Board, Screen


def test_events_of_one_moment_are_all_printed_in_the_order_in_which_they_came():
    out = io.StringIO()
    board = Board()
    with Screen(Console(file=out, width=100), board) as screen:
        board.tell("streams start")
        screen.refresh()
        board.tell("a producer publishes")  # sorts before the first
        board.tell("kill -9")
        screen.refresh()
        screen.refresh()
        board.tell("a last word, just before the end")
    told = [line.split("s  ", 1)[1] for line in out.getvalue().splitlines() if "last chat" not in line]
    assert told == ["streams start", "a producer publishes", "kill -9", "a last word, just before the end"]


def test_of_more_events_than_are_kept_the_newest_are_printed():
    out = io.StringIO()
    board = Board()
    with Screen(Console(file=out, width=100), board):
        for number in range(EVENTS_SHOWN + 2):
            board.tell(f"event {number}")
    assert [f"event {n}" in out.getvalue() for n in range(EVENTS_SHOWN + 2)] == [False] * 2 + [True] * EVENTS_SHOWN
