"""Valid files made wrong: bytes flipped, lines dropped, doubled and exchanged, values of other kinds in the place of numbers."""

from __future__ import annotations

import random
import re

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_WORD = re.compile(rb"[A-Za-z_]{2,}")
_INSTEAD = (
    *(
        b"0",
        b"-1",
        b"1e308",
        b"-1e-308",
        b"nan",
        b"inf",
        b"-inf",
        b"NaN",
        b"Infinity",
        b"9223372036854775808",
        b"1" * 400,
    ),
    *(
        b"true",
        b"null",
        b'""',
        b'"x"',
        b"[]",
        b"{}",
        b"[1, 2]",
        b'{"a": 1}',
        b"{a = 1}",
        b"2026-11-22",
        b"",
        b"1.5",
        b"1",
    ),
    *(b"100000000000", b"9000000000000000000", b"0x7fffffffffffffff", b"!!int x", b"&a [*a]", b"../../etc/passwd"),
)
_PIECES = (
    b"\x00",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    "\u202e𝔘é".encode(),
    b"[" * 2000,
    b"{" * 2000,
    b"a." * 2000,
    b'"',
    b"\r",
    b"\n\n",
)


def mutated(data: bytes, generator: random.Random) -> bytes:
    """One to four changes of a file."""
    for _ in range(generator.randint(1, 4)):
        data = generator.choice(_CHANGES)(data, generator)
    return data


def _flip(data: bytes, generator: random.Random) -> bytes:
    at = generator.randrange(len(data) + 1)
    return data[:at] + bytes([generator.randrange(256)]) + data[at + 1 :]


def _cut(data: bytes, generator: random.Random) -> bytes:
    begin, end = sorted(generator.randrange(len(data) + 1) for _ in range(2))
    return data[:begin] + data[min(end, begin + 64) :]


def _end(data: bytes, generator: random.Random) -> bytes:
    return data[: generator.randrange(len(data) + 1)]


def _insert(data: bytes, generator: random.Random) -> bytes:
    at = generator.randrange(len(data) + 1)
    return data[:at] + generator.choice(_PIECES) + data[at:]


def _drop_line(data: bytes, generator: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    dropped = generator.randrange(len(lines) + 1)
    return b"".join(line for number, line in enumerate(lines) if number != dropped)


def _double_line(data: bytes, generator: random.Random) -> bytes:
    lines = data.splitlines(keepends=True) or [b""]
    at = generator.randrange(len(lines))
    return b"".join([*lines[: at + 1], *lines[at:]])


def _exchange_lines(data: bytes, generator: random.Random) -> bytes:
    lines = data.splitlines(keepends=True) or [b""]
    one, other = generator.randrange(len(lines)), generator.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def _other_value(data: bytes, generator: random.Random) -> bytes:
    return _instead(data, list(_NUMBER.finditer(data)), generator.choice(_INSTEAD), generator)


def _other_word(data: bytes, generator: random.Random) -> bytes:
    words = list(_WORD.finditer(data))
    other = generator.choice(words)[0] if words else b""
    return _instead(data, words, other, generator)


def _instead(data: bytes, places: list[re.Match[bytes]], value: bytes, generator: random.Random) -> bytes:
    if not places:
        return data + value
    place = generator.choice(places)
    return data[: place.start()] + value + data[place.end() :]


_CHANGES = (
    *(_flip, _cut, _end, _insert, _drop_line, _double_line, _exchange_lines),
    *(_other_value, _other_value, _other_value, _other_word, _other_word),
)
