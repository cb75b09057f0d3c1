"""The text fields of an upload, and the file's name."""

import pytest

from server.errors import ApiError
from server.form import UploadForm, label
from server.multipart import Text


def filled(*fields: tuple[str, str]) -> UploadForm:
    form = UploadForm()
    for name, value in fields:
        form.accept(Text(name, value))
    form.check_complete()
    return form


def refusal(*fields: tuple[str, str]) -> tuple[str, str | None, str | None]:
    with pytest.raises(ApiError) as caught:
        filled(*fields)
    assert caught.value.status == 400
    return caught.value.message, caught.value.param, caught.value.code


def test_a_batch_file_expires_by_itself_and_others_do_not() -> None:
    assert filled(("purpose", "batch")).expires_at(1000, batch_ttl=60) == 1060
    assert filled(("purpose", "user_data")).expires_at(1000, batch_ttl=60) is None


def test_expires_after_counts_from_creation() -> None:
    form = filled(("expires_after[seconds]", "3600"), ("expires_after[anchor]", "created_at"), ("purpose", "evals"))
    assert form.expires_at(1000, batch_ttl=60) == 4600


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            [("purpose", "foo")],
            (
                "'foo' is not one of ['fine-tune', 'assistants', 'batch', 'user_data', 'vision', 'evals'] - 'purpose'",
                "purpose",
                None,
            ),
        ),
        ([], ("'purpose' is a required property", "purpose", None)),
        ([("color", "red")], ("Additional properties are not allowed ('color' was unexpected)", None, None)),
        ([("purpose", "batch"), ("purpose", "evals")], ("The field 'purpose' is given twice", None, None)),
        (
            [("expires_after[seconds]", "3599")],
            ("3599 is less than the minimum of 3600 - 'expires_after.seconds'", None, None),
        ),
        (
            [("expires_after[seconds]", "-5")],
            ("-5 is less than the minimum of 3600 - 'expires_after.seconds'", None, None),
        ),
        (
            [("expires_after[seconds]", "2592001")],
            ("2592001 is greater than the maximum of 2592000 - 'expires_after.seconds'", None, None),
        ),
        (
            [("expires_after[seconds]", "abc")],
            ("'abc' is not of type 'integer' - 'expires_after.seconds'", None, None),
        ),
        (
            [("expires_after[anchor]", "now")],
            ("'now' is not one of ['created_at'] - 'expires_after.anchor'", None, None),
        ),
        (
            [("purpose", "batch"), ("expires_after[seconds]", "3600")],
            ("'anchor' is a required property", "expires_after", None),
        ),
        (
            [("purpose", "batch"), ("expires_after[anchor]", "created_at")],
            ("'seconds' is a required property", "expires_after", None),
        ),
    ],
)
def test_a_field_that_is_wrong_is_refused(
    fields: list[tuple[str, str]], expected: tuple[str, str | None, str | None]
) -> None:
    assert refusal(*fields) == expected


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        ("in.jsonl", "in.jsonl"),
        (None, "upload"),
        ("", "upload"),
        ("..", "upload"),
        ("../../etc/passwd", "passwd"),
        ("C:\\Users\\me\\in.jsonl", "in.jsonl"),
        ("folder/", "upload"),
        ("a\r\nSet-Cookie: x\x00.jsonl", "aSet-Cookie: x.jsonl"),
        ("line\u2028.jsonl", "line.jsonl"),
        ("夜 \U0001f319.jsonl", "夜 \U0001f319.jsonl"),
        ('say "hi"; x=1', 'say "hi"; x=1'),
    ],
)
def test_a_filename_is_only_a_label(filename: str | None, expected: str) -> None:
    assert label(filename) == expected


def test_a_filename_has_an_end() -> None:
    with pytest.raises(ApiError, match="longer than 1000"):
        label("x" * 1001)
