"""Records with prompts, which a model reads without being trained to predict them: prompt and completion, or messages of a chat.

A prompt and its completion are joined as they are. A message of a chat is written as ChatML writes it, in characters (a text never
spells a special token of a tokenizer), with a line break between messages:

    <|im_start|>ROLE
    CONTENT<|im_end|>

The contents of the assistant count, each with its `<|im_end|>`. The token that closes a record counts if the record ends so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from proxy_models.data.sources import CorpusError

ASSISTANT = "assistant"
END = "<|im_end|>"
_KEYS = ("role", "content")


def completed(values: Sequence[Any], where: str, names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a record with a prompt, each with whether it counts.

    Args:
        values: Prompt and completion.
        where: File and line, for errors.
        names: How errors name the two values.

    Raises:
        CorpusError: If one is not a string, or the completion has nothing but white space.
    """
    prompt, completion = (_require_text(value, f"{where}: {name}") for value, name in zip(values, names, strict=True))
    if not completion.strip():
        raise CorpusError(f"{where}: {names[1]} must not be empty, since only its tokens count; got {completion!r}")
    yield prompt, False
    yield completion, True


def of_chat(values: Sequence[Any], where: str, name: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a chat, each with whether it counts.

    Args:
        values: The messages, alone.
        where: File and line, for errors.
        name: How errors name the messages.

    Raises:
        CorpusError: If the messages are not a list of roles and contents, or no message of the assistant has a content.
    """
    parts = [*_parts(values[0], where, name)]
    if not any(counts for _, counts in parts):
        raise CorpusError(f"{where}: {name} must have a message of the role {ASSISTANT!r}, since no other counts")
    yield from _joined(parts)


def asked(messages: Any, where: str, name: str) -> list[str]:
    """Return the parts of a chat up to the assistant's next answer, as training tokenizes them; raise CorpusError like `of_chat`."""
    parts = [*_parts(messages, where, name), (f"\n{_begin(ASSISTANT)}", False)]
    return [text for text, _ in _joined(parts)]


def _parts(messages: Any, where: str, name: str) -> Iterator[tuple[str, bool]]:
    """Yield the beginning and the content of each message, each with whether it counts."""
    if not isinstance(messages, list) or not messages:
        raise CorpusError(f"{where}: {name} must be a list of messages, got {messages!r:.60}")
    for number, message in enumerate(messages):
        at = f"{where}: {name}[{number}]"
        if not isinstance(message, dict) or any(key not in message for key in _KEYS):
            raise CorpusError(f"{at} must have the keys {' and '.join(_KEYS)}, got {message!r:.60}")
        role, content = (_require_text(message[key], f"{at}.{key}") for key in _KEYS)
        if not role.strip():
            raise CorpusError(f"{at}.role must not be empty, got {role!r}")
        counts = role == ASSISTANT
        if counts and not content.strip():
            raise CorpusError(f"{at}.content must not be empty in a message of the assistant, got {content!r}")
        yield "\n" * bool(number) + _begin(role), False
        yield f"{content}{END}", counts


def _begin(role: str) -> str:
    return f"<|im_start|>{role}\n"


def _joined(parts: Sequence[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    for counts, group in groupby(parts, key=lambda part: part[1]):
        yield "".join(text for text, _ in group), counts


def _require_text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise CorpusError(f"{what} must be a string, got {value!r:.60}")
    return value
