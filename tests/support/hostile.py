"""Invalid content for JSON files."""

HOSTILE = {
    "empty": b"",
    "list": b"[]",
    "null": b"null",
    "text": b'"x"',
    "number": b"7",
    "truncated": b'{"a": ',
    "not UTF-8": b'{"a": "\xff"}',
    "half of a UTF-16 code unit": b"\xff\xfe{",
    "deep": b"[" * 200_000,
    "huge integer": b"1" * 9999,
}
