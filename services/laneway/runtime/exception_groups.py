"""Single errors out of the groups that TaskGroups raise."""

from __future__ import annotations

from collections.abc import Iterator


def leaf_errors(error: BaseException) -> Iterator[BaseException]:
    """The error itself, or the single errors inside a group and its groups."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaf_errors(inner)
    else:
        yield error
