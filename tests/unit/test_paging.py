"""AIP-158 paging: every item once, whatever the page size, and no token of another list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.core.errors import InvalidRequest
from laneway.runtime.paging import PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX, page_size_of, paginate


@given(st.sets(st.text(min_size=1, max_size=5), max_size=40), st.integers(1, 50), st.booleans())
def test_pages_hold_each_item_once_in_order(keys: set[str], size: int, descending: bool) -> None:
    items = sorted(keys, reverse=descending)
    seen: list[str] = []
    token = ""
    for _ in range(len(items) + 1):
        page, token = paginate(items, size, token, filter_key="f", key=str, descending=descending)
        seen += page
        if not token:
            break
    assert seen == items


def test_an_item_that_goes_between_pages_hides_no_other() -> None:
    page, token = paginate(["a", "b", "c", "d"], 2, "", filter_key="f", key=str)
    assert page == ["a", "b"]
    assert paginate(["a", "c", "d"], 2, token, filter_key="f", key=str) == (["c", "d"], "")


def test_page_sizes() -> None:
    assert page_size_of(0) == PAGE_SIZE_DEFAULT
    assert page_size_of(PAGE_SIZE_MAX + 1) == PAGE_SIZE_MAX
    with pytest.raises(InvalidRequest) as caught:
        page_size_of(-1)
    assert caught.value.field == "page_size"


@pytest.mark.parametrize("token", ["!", "abc", "é", "====", "AAAA" * 40])
def test_foreign_tokens_are_refused(token: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        paginate(["a"], 1, token, filter_key="f", key=str)
    assert caught.value.field == "page_token"


def test_a_token_of_another_list_is_refused() -> None:
    _, token = paginate(["a", "b"], 1, "", filter_key="workers", key=str)
    with pytest.raises(InvalidRequest):
        paginate(["a", "b"], 1, token, filter_key="lanes", key=str)
