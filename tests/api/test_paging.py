"""Query parameters of the two lists, each in its own wording."""

import pytest
from starlette.datastructures import QueryParams

from server.errors import ApiError
from server.paging import BatchesQuery, FilesQuery, batches_query, files_query


def test_files_are_listed_newest_first_and_all_of_them_by_default() -> None:
    expected = FilesQuery(limit=10_000, after=None, order="desc", purpose=None)
    assert files_query(QueryParams("")) == files_query(QueryParams("after=&limit=&order=&purpose=")) == expected


def test_files_are_filtered_as_asked() -> None:
    asked = QueryParams("limit=2&after=file-a&order=asc&purpose=batch")
    assert files_query(asked) == FilesQuery(limit=2, after="file-a", order="asc", purpose="batch")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("limit=0", "0 is less than the minimum of 1 - 'limit'"),
        ("limit=-1", "-1 is less than the minimum of 1 - 'limit'"),
        ("limit=10001", "10001 is greater than the maximum of 10000 - 'limit'"),
        ("limit=abc", "'abc' is not of type 'integer' - 'limit'"),
        ("limit=1.5", "'1.5' is not of type 'integer' - 'limit'"),
        ("order=up", "'up' is not one of ['asc', 'desc'] - 'order'"),
    ],
)
def test_a_wrong_query_for_files_is_refused(query: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        files_query(QueryParams(query))
    assert (caught.value.status, caught.value.message, caught.value.code) == (400, message, None)


def test_batches_come_by_twenty_and_none_is_a_number_too() -> None:
    assert batches_query(QueryParams("")) == BatchesQuery(limit=20, after=None)
    assert batches_query(QueryParams("limit=0&after=batch_1")) == BatchesQuery(limit=0, after="batch_1")


@pytest.mark.parametrize(
    ("limit", "message", "code"),
    [
        (
            "-1",
            "Invalid 'limit': integer below minimum value. Expected a value >= 0, but got -1 instead.",
            "integer_below_min_value",
        ),
        (
            "101",
            "Invalid 'limit': integer above maximum value. Expected a value <= 100, but got 101 instead.",
            "integer_above_max_value",
        ),
        ("abc", "Invalid type for 'limit': expected an integer, but got a string instead.", "invalid_type"),
        ("9" * 5000, "Invalid type for 'limit': expected an integer, but got a string instead.", "invalid_type"),
    ],
)
def test_a_wrong_limit_for_batches_is_refused(limit: str, message: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        batches_query(QueryParams(f"limit={limit}"))
    said = caught.value
    assert (said.status, said.message, said.param, said.code) == (400, message, "limit", code)
