"""The fuzzer: valid files made wrong for so many seconds, each reading with a limit of its own.

    python -m tests.fuzz.fuzz study csv --seconds 300
    python -m tests.fuzz.fuzz study --seconds 300 --coverage      # atheris, of the extra `fuzz`, looks for new paths

The first finding of each kind (target, exception and the place that raised it) is kept in --findings with its stack.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.fuzz.mutations import mutated
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

LIMIT = 10.0
"""Seconds of the processor for one reading; the slowest valid one takes a tenth of a second."""
MEMORY = 8 << 30


class TookTooLongError(BaseException):
    """Nothing that is fuzzed may catch it."""


@contextmanager
def limited(seconds: float = LIMIT) -> Iterator[None]:
    """End what takes longer on the processor, so that a busy machine is no finding."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise TookTooLongError(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def finding(target: Target, data: bytes) -> tuple[str, str] | None:
    """Kind and stack of what the bytes show, or None."""
    try:
        with limited(), warnings.catch_warnings():
            warnings.simplefilter("error")
            target(data)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        ours = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
        place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
        return f"{type(error).__name__} at {place}", "".join(traceback.format_exception(error))
    return None


def fuzz(target: Target, seed: int, keep: Callable[[bytes, str, str], None], *, until: Callable[[int], bool]) -> int:
    """Mutate and read until told to end; returns how many were read."""
    generator, count = random.Random(seed), 0
    while not until(count):
        data = mutated(generator.choice(target.seeds), generator)
        if found := finding(target, data):
            keep(data, *found)
        count += 1
    return count


def _with_coverage(target: Target, keep: Callable[[bytes, str, str], None], seconds: int, corpus: Path) -> None:
    """atheris ends the process by itself."""
    import atheris

    def one(data: bytes) -> None:
        if found := finding(target, data):
            keep(data, *found)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        generator = random.Random(seed)
        if generator.random() < 0.2:
            return bytes(atheris.Mutate(data, max_size))
        return mutated(data or generator.choice(target.seeds), generator)[:max_size]

    for number, seed in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    arguments = [
        sys.argv[0],
        f"-max_total_time={seconds}",
        "-max_len=20000",
        "-rss_limit_mb=0",
        "-verbosity=1",
        str(corpus),
    ]
    atheris.Setup(arguments, one, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--findings", type=Path, default=Path(tempfile.gettempdir()) / "muscale-findings")
    parser.add_argument("--coverage", action="store_true", help="by atheris; of one target")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    given.findings.mkdir(parents=True, exist_ok=True)
    if given.coverage:
        import atheris

        with atheris.instrument_imports(include=["muscale", "scaling", "search_spaces", "proxy_models"]):
            _preload(given.targets[0])
    for name in given.targets:
        kinds: dict[str, int] = {}

        def keep(data: bytes, kind: str, stack: str, name: str = name, kinds: dict[str, int] = kinds) -> None:
            kinds[kind] = kinds.get(kind, 0) + 1
            if kinds[kind] == 1:
                print(f"{name}: {kind}", flush=True)
                short = hashlib.sha256(data).hexdigest()[:8]
                (given.findings / f"{name}-{short}").write_bytes(data)
                (given.findings / f"{name}-{short}.txt").write_text(stack)

        with tempfile.TemporaryDirectory(prefix="muscale-fuzz-") as folder:
            place = Path(folder) / "given"
            place.mkdir()
            target = TARGETS[name](place)
            if given.coverage:
                corpus = Path(folder) / "corpus"
                corpus.mkdir()
                _with_coverage(target, keep, given.seconds, corpus)
            count = fuzz(target, given.seed, keep, until=_after(given.seconds))
            print(f"{name}: {count:,} readings, {sum(kinds.values()):,} findings of {len(kinds)} kinds", flush=True)


def _after(seconds: float) -> Callable[[int], bool]:
    end = time.monotonic() + seconds
    return lambda _count: time.monotonic() > end


def _preload(name: str) -> None:
    """The code of a target is instrumented as it is imported."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "given"
        place.mkdir()
        target = TARGETS[name](place)
        target(target.seeds[0])


if __name__ == "__main__":
    main()
