"""A study file to start from, with the user's text and name in it, and a check whether the text is enough.

The file is the quickstart's, or a smaller one for a custom model family.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomlkit

from muscale.errors import StudyDirectoryError, StudyFileError
from muscale.formatting import counted, listed
from muscale.found_source import found_source
from muscale.layout import STUDY_FILE
from proxy_models.files import is_utf8, write_text

if TYPE_CHECKING:
    from muscale.settings.config import StudyConfig
    from proxy_models.data.sources import Source

_TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022 (arXiv 2203.15556), section 3.4: of a compute-optimal run, roughly
# passes over the text after which further ones are worth less; Muennighoff et al. 2023 (arXiv 2305.16264), abstract
MOST_OFTEN = 4
FAMILY = ("my_family.py", "test_my_family.py")
"""Files that --family writes: a custom family and its test."""


@dataclass(frozen=True, kw_only=True)
class NewStudy:
    """The written files, and the size of the text compared with the study file's budgets.

    Attributes:
        source: Source of the corpus; None if the study file's default was kept.
        n_bytes: Bytes in these files.
        training_tokens: Tokens at one byte each, without the held-out part; None if only reading the files would show them.
        uneven: Advice if the size of the held-out part is far from the setting; else empty.
        left_out: Files of the folder that are not read: documentation, and files whose names begin with a dot.
        needed: Tokens of the longest single run of each stage.
        held_out_short: Tokens missing from the held-out tokens that evaluate every run; 0 if none.
    """

    path: str
    source: str | None = None
    n_files: int = 0
    n_bytes: int = 0
    training_tokens: int | None = None
    needed: dict[str, int] | None = None
    held_out_short: int = 0
    uneven: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def too_much(self) -> bool:
        """Whether a budget requires far more tokens than the text has."""
        return bool(self.needed and self.training_tokens) and any(
            tokens > MOST_OFTEN * (self.training_tokens or 0) for tokens in (self.needed or {}).values()
        )

    @property
    def too_little(self) -> bool:
        """Whether the text is too small for the budgets, or for the evaluations."""
        return self.too_much or self.held_out_short > 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, including `too_much`."""
        return {**asdict(self), "too_much": self.too_much}

    def __str__(self) -> str:
        lines = [f"wrote {self.path}"]
        if self.source is None or self.needed is None:
            return lines[0]
        lines.append(f"  text: {counted(self.n_files, 'file')}, {self.n_bytes:,} bytes in {self.source}")
        if self.left_out:
            lines.append(f"  left out: {listed(self.left_out)}")
        if self.training_tokens is None:
            return "\n".join([*lines, "  `muscale check` counts its tokens once it has read them"])
        lines.append(f"  about {self.training_tokens:,} training tokens at one byte per token; the rest is held out")
        if self.uneven:
            lines.append(f"  {self.uneven}")
        for stage, tokens in self.needed.items():
            times = tokens / max(1, self.training_tokens)
            seen = "seen once or less" if times <= 1 else f"seen {times:.1f} times"
            lines.append(f"  {stage:<9} its longest run needs {tokens:,} tokens: the text is {seen}")
        if self.too_much:
            lines.append(
                f"  too little: text seen more than {MOST_OFTEN} times is worth much less than new text (Muennighoff et al., arXiv "
                "2305.16264); add text, or lower plan.compute_flops and the n_tokens of the stages above"
            )
        if self.held_out_short:
            lines.append(
                f"  too little: {self.held_out_short:,} held-out tokens are missing; "
                + (
                    "hold out more text, as said above"
                    if self.uneven
                    else "lower corpus.evaluation_tokens, or raise corpus.validation_fraction, or add text"
                )
            )
        return "\n".join(lines)


def write_study(
    directory: Path, source: Path | None = None, name: str | None = None, *, family: bool = False
) -> NewStudy:
    """Write the study file into a directory, which is created if missing.

    Args:
        source: A file or folder of any kind that [corpus] reads; None keeps the quickstart's.
        name: Name of the study; by default the directory's.
        family: Also write a model family to edit and its test, and name the family in the study file, which has smaller sizes.

    Raises:
        StudyDirectoryError: If the study file, or one of the family's files, exists already.
        StageError: If the source is missing, empty or can't be read; nothing is written then.
    """
    path = directory / STUDY_FILE
    if path.exists():
        raise StudyDirectoryError(f"{path}: already exists; edit it, or pass --keep to keep it")
    for module in FAMILY if family else ():
        if (directory / module).exists():
            raise StudyDirectoryError(f"{directory / module}: already exists; leave out --family, or move it")
    for above in (directory, *directory.parents):
        if above.exists() and not above.is_dir():
            raise StudyDirectoryError(f"{above}: is a file, but a study needs a directory; give another path")
    for given in (directory, source):
        if given and not is_utf8(path_given := str(given.absolute())):
            raise StudyDirectoryError(f"{path_given!a}: must have a name in UTF-8, since study files are; rename it")
    if name is not None and not (name.strip() and name.isprintable()):
        raise StudyFileError(f"--name: must be a name of printable characters, got {name!r}")
    of_directory = "".join(letter for letter in directory.absolute().name if letter.isprintable())
    text = (resources.files("muscale") / ("own_family.toml" if family else "quickstart.toml")).read_text()
    text = _with_value(text, "name", name or of_directory or "study")
    if source is None:
        _write_all(path, text, family=family)
        return NewStudy(path=str(path))
    found, files = found_source(source.expanduser())
    place = _place(source.expanduser().absolute(), directory.absolute())
    text = _with_value(text, "source", place)
    stated = {name: value for name, value in found.to_dict().items() if value != getattr(type(found), name, place)}
    lines = "".join(f"\n{name} = {json.dumps(value)}" for name, value in stated.items() if name != "path")
    text = re.sub(r"^(source = .*)$", lambda line: line[0] + lines, text, count=1, flags=re.MULTILINE)
    if found.vocab_size:
        sized = rf"\1\nvocab_size = {found.vocab_size}"
        text = re.sub(r"^(context_length = .*)$", sized, text, count=1, flags=re.MULTILINE)
    intro = (
        f"# A study of {tomlkit.string(source.name).as_string()}, whose sizes and budgets are for two CPU cores and about ten\n"
        "# minutes: raise them to what you have."
    )
    text = re.sub(r"\A#[^\n]*\n", lambda _: intro + "\n", text)
    measured = _measured(path, place, found, files, text)
    _write_all(path, text, family=family)
    return measured


def _write_all(path: Path, text: str, *, family: bool) -> None:
    """Write the study file, after the family files that it names, if any."""
    for module in FAMILY if family else ():
        _write(path.parent / module, (resources.files("muscale") / f"{module}.txt").read_text())
    named = f'family = "{FAMILY[0].removesuffix(".py")}:Convolutions"\nargs = {{ kernel = 4 }}'
    _write(path, text.replace("head_dim = 16", named, 1) if family else text)


def _with_value(text: str, key: str, value: str) -> str:
    """Return the file with the string of the first such key replaced; a comment after it keeps its column if there is room."""
    quoted = f"{key} = {tomlkit.string(value).as_string()}"

    def put(found: re.Match[str]) -> str:
        return f"{quoted} ".ljust(len(found[0]) - 1) + "#" if found[1] else quoted

    return re.sub(rf'^{key} = "[^"]*"( *#)?', put, text, count=1, flags=re.MULTILINE)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def _place(source: Path, directory: Path) -> str:
    """Return the source relative to the study's directory if it is inside, so that both can move together; else the full path."""
    source, directory = Path(os.path.normpath(source)), Path(os.path.normpath(directory))
    return source.relative_to(directory).as_posix() if source.is_relative_to(directory) else str(source)


def _measured(path: Path, place: str, source: Source, files: list[Path], text: str) -> NewStudy:
    from muscale.settings.config import StudyConfig
    from proxy_models.data.file_contents import UTF8, encoding_of
    from proxy_models.data.sources import decompressor

    root = Path(source.path) if Path(source.path).is_dir() else files[0].parent
    n_bytes = sum(source.sizes().values())
    config = StudyConfig.from_dict(tomllib.loads(text), where=str(path))
    corpus = config.corpus
    known = source.kind == "text" and not any(decompressor(file) or encoding_of(file, None) != UTF8 for file in files)
    everything = root.rglob("*") if Path(source.path).is_dir() else ()
    left_out = {path for path in everything if path.is_file()} - set(files)
    held_out, uneven = _held_out(root, files, corpus.validation_fraction) if known else (0, "")
    return NewStudy(
        path=str(path),
        source=place,
        n_files=len(files),
        n_bytes=n_bytes,
        training_tokens=n_bytes - held_out if known else None,
        needed=_longest_runs(config),
        held_out_short=max(0, corpus.evaluation_tokens + config.model.context_length - held_out) if known else 0,
        uneven=uneven,
        left_out=tuple(sorted(path.relative_to(root).as_posix() for path in left_out)),
    )


def _held_out(root: Path, files: list[Path], fraction: float) -> tuple[int, str]:
    """Return the held-out bytes of the text files, and advice if they are far from the fraction."""
    from proxy_models.data.documents import in_validation

    sizes = {path: path.stat().st_size for path in files}
    if len(files) == 1:  # cut by position
        return int(sum(sizes.values()) * fraction), ""
    held_out = sum(size for path, size in sizes.items() if in_validation(path.relative_to(root).as_posix(), fraction))
    share = held_out / sum(sizes.values())
    if fraction / 2 <= share <= 2 * fraction:
        return held_out, ""
    largest = max(files, key=lambda path: sizes[path])
    return held_out, (
        f"{share:.0%} of the text is held out where corpus.validation_fraction asks for {fraction:.0%}, as a file goes whole to one "
        "side: put the text into one file (`cat`), whose end is held out, or cut large files (`split -C 64K`), such as "
        f"{largest.name} ({sizes[largest]:,} bytes)"
    )


def _longest_runs(config: StudyConfig) -> dict[str, int]:
    """Return the tokens of the longest run of each stage; the full run is assumed compute-optimal, which only the law can confirm."""
    budget = config.plan.budget.compute_flops
    longest = {
        "sweep": config.sweep.n_tokens,
        "transfer": round(config.transfer.n_tokens * max(1.0, *config.transfer.horizons)),
        "ladder": max(stem.n_tokens for stem in config.ladder.stems),
    }
    if budget:
        longest["full run"] = round(math.sqrt(budget * _TOKENS_PER_PARAMETER / 6))
    return longest
