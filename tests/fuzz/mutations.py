"""Changes of a valid file: flipped bytes, lines left out, doubled or swapped, and values of another kind."""

from __future__ import annotations

import random
import re

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_WORD = re.compile(rb"[A-Za-z_]{2,}")
_VALUES = b'0|-1|1.5|1e308|nan|inf|NaN|Infinity|100000000000|true|null|""|"x"|[]|{}|[1, 2]|{"a": 1}|{a = 1}|2026-11-22|'
_INSTEAD = (*_VALUES.split(b"|"), b"../../etc/passwd")
_PIECES = (b"\x00", b"\xff\xfe", "\u202e𝔘é".encode(), b'"', b"\r", b"\n\n")


def mutated(data: bytes, generator: random.Random) -> bytes:
    """The file with one to four changes."""
    for _ in range(generator.randint(1, 4)):
        data = generator.choice((_change_bytes, _change_lines, _change_value, _change_value))(data, generator)
    return data


def _change_bytes(data: bytes, generator: random.Random) -> bytes:
    begin, end = sorted(generator.randrange(len(data) + 1) for _ in range(2))
    match generator.randrange(4):
        case 0:
            return data[:begin] + bytes([generator.randrange(256)]) + data[begin + 1 :]
        case 1:
            return data[:begin] + data[min(end, begin + 64) :]
        case 2:
            return data[:begin]
    return data[:begin] + generator.choice(_PIECES) + data[begin:]


def _change_lines(data: bytes, generator: random.Random) -> bytes:
    lines = data.splitlines(keepends=True) or [b""]
    one, other = generator.randrange(len(lines)), generator.randrange(len(lines))
    match generator.randrange(3):
        case 0:
            del lines[one]
        case 1:
            lines.insert(one, lines[other])
        case 2:
            lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def _change_value(data: bytes, generator: random.Random) -> bytes:
    pattern = generator.choice((_NUMBER, _WORD))
    places = list(pattern.finditer(data))
    if not places:
        return data
    place = generator.choice(places)
    value = generator.choice(places)[0] if pattern is _WORD else generator.choice(_INSTEAD)
    return data[: place.start()] + value + data[place.end() :]
