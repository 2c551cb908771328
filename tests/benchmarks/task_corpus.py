"""Text and tasks that models of 10,000 to 1,000,000 parameters can learn: five kinds of documents, and items of each.

The tasks are multiple choice for lm-evaluation-harness. Items of sums are not in the text, and rows of letters are too many to be
there; those of code and of names are in it.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SINGULAR = ["dog", "cat", "bird", "horse", "child", "king", "farmer", "sailor", "teacher", "baker"]
PLURAL = ["dogs", "cats", "birds", "horses", "children", "kings", "farmers", "sailors", "teachers", "bakers"]
VERBS = {"runs": "run", "sleeps": "sleep", "sings": "sing", "waits": "wait", "falls": "fall", "laughs": "laugh"}
ADJECTIVES = ["small", "old", "young", "tall", "quiet", "happy"]
LETTERS = "bcdfghjklmnpqrstvwxz"
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
N_ITEMS = 200
N_NAMES = 300

Item = tuple[str, list[str], int]
"""Context, choices and number of the right one."""


def grammar(rng: random.Random) -> tuple[str, list[str]]:
    """A sentence up to its verb, and the right and the wrong form of the verb."""
    plural = rng.random() < 0.5
    noun = rng.choice(PLURAL if plural else SINGULAR)
    adjective = f"{rng.choice(ADJECTIVES)} " if rng.random() < 0.5 else ""
    middle = f" near the {rng.choice(SINGULAR + PLURAL)}" if rng.random() < 0.7 else ""
    third, plain = rng.choice([*VERBS.items()])
    return f"the {adjective}{noun}{middle}", [f" {plain}", f" {third}"] if plural else [f" {third}", f" {plain}"]


def _sentence(start: str, verbs: list[str]) -> str:
    return f"{start}{verbs[0]} ."


def is_held_out(*parts: object) -> bool:
    """One case in five, which no training text has."""
    return random.Random(repr(parts)).random() < 0.2


def sums(rng: random.Random, *, held_out: bool) -> tuple[str, str]:
    """A sum of two numbers of two digits, in words and without a carry, and its result."""
    while True:
        digits = tuple(rng.randrange(5) for _ in range(4))
        if is_held_out(digits) == held_out:
            a, b, c, d = (NUMBERS[digit] for digit in digits)
            return f"{a} {b} plus {c} {d} is", f" {NUMBERS[digits[0] + digits[2]]} {NUMBERS[digits[1] + digits[3]]}"


def copies(rng: random.Random) -> tuple[str, str]:
    """A row of letters, and the same letters from the last to the first."""
    row = rng.sample(LETTERS, 6)
    return f"turn {' '.join(row)} :", f" {' '.join(reversed(row))}"


def names() -> list[tuple[str, str]]:
    """Made-up countries with their capitals."""
    rng = random.Random("names")
    made = dict.fromkeys("".join(rng.sample(SYLLABLES, 3)) for _ in range(3 * N_NAMES))
    return [*zip([*made][:N_NAMES], [*made][N_NAMES : 2 * N_NAMES], strict=True)]


def code_lines() -> list[list[str]]:
    """Modules of the standard library as lines of code."""
    modules = sorted(Path(os.__file__).parent.glob("*.py"))
    files = [module.read_text(errors="ignore").splitlines() for module in modules]
    return [[line for line in lines if 12 <= len(line) <= 60] for lines in files if len(lines) > 50]


def documents(n_characters: int, seed: int = 0) -> Iterator[str]:
    """Documents of all kinds, in random order, up to so many characters."""
    rng, known, files = random.Random(seed), names(), code_lines()
    kinds: dict[str, Callable[[], str]] = {
        "grammar": lambda: _sentence(*grammar(rng)),
        "sums": lambda: "{}{} .".format(*sums(rng, held_out=False)),
        "turning": lambda: "{}{} .".format(*copies(rng)),
        "names": lambda: "{} {}".format(*rng.choice(known)),
    }
    written = 0
    while written < n_characters:
        if rng.random() < 0.2:
            lines = rng.choice(files)
            start = rng.randrange(max(1, len(lines) - 12))
            text = "\n".join(lines[start : start + 12])
        else:
            write = rng.choice([*kinds.values()])
            text = "\n".join(write() for _ in range(12))
        written += len(text)
        yield text


def items(seed: int = 1) -> dict[str, list[Item]]:
    """`N_ITEMS` items of each task."""
    rng, known, files = random.Random(seed), names(), code_lines()

    def chosen(context: str, right: str, wrong: list[str]) -> Item:
        choices = [right, *wrong]
        rng.shuffle(choices)
        return context, choices, choices.index(right)

    def of_sum() -> Item:
        context, right = sums(rng, held_out=True)
        tens, ones = right.split()
        others = [[number for number in NUMBERS[:9] if number != digit] for digit in (tens, ones)]
        wrong = [f" {rng.choice(others[0])} {ones}", f" {tens} {rng.choice(others[1])}"]
        return chosen(context, right, [*wrong, f" {rng.choice(others[0])} {rng.choice(others[1])}"])

    def of_copy() -> Item:
        context, right = copies(rng)
        letters = right.split()
        wrong: set[str] = set()
        while len(wrong) < 3:
            wrong.add(" " + " ".join(rng.sample(letters, len(letters))))
            wrong.discard(right)
        return chosen(context, right, sorted(wrong))

    def of_name() -> Item:
        country, capital = rng.choice(known)
        return chosen(
            country, f" {capital}", [f" {other}" for other in rng.sample([c for _, c in known if c != capital], 3)]
        )

    def of_code() -> Item:
        lines = rng.choice(files)
        start = rng.randrange(len(lines) - 5)
        *context, right = lines[start : start + 4]
        return chosen("\n".join(context), f"\n{right}", [f"\n{rng.choice(rng.choice(files))}" for _ in range(3)])

    def of_grammar() -> Item:
        context, (right, wrong) = grammar(rng)
        return chosen(context, right, [wrong])

    made = {"grammar": of_grammar, "sums": of_sum, "turning": of_copy, "names": of_name, "code": of_code}
    return {name: [make() for _ in range(N_ITEMS)] for name, make in made.items()}


def write(folder: Path, n_characters: int) -> None:
    """Write the text to `text`, and the tasks to `tasks`."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    with (folder / "text" / "all.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in documents(n_characters))
    (folder / "tasks").mkdir(exist_ok=True)
    for name, rows in items().items():
        (folder / "tasks" / f"{name}.jsonl").write_text(
            "".join(json.dumps({"context": c, "choices": choices, "right": right}) + "\n" for c, choices, right in rows)
        )
        (folder / "tasks" / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {name}.jsonl}}\noutput_type: multiple_choice\n"
            'test_split: test\ndoc_to_text: "{{context}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: right\n'
            'target_delimiter: ""\nmetric_list:\n  - metric: acc\n'
        )
