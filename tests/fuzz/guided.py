"""The coverage-guided run, outside the suite: `python -m tests.fuzz.guided --target tensors --runs 1000000`.

Needs atheris (`pip install 'mlxcel_nb[fuzz]'`), which traces every branch of `wire/` and breeds inputs that reach new
ones. It begins with the corpus of the repository and keeps what it finds in a folder of its own. With `--minimise` it
only takes, from there, the few inputs that add something into the corpus, which `test_corpus.py` replays on every run
of the suite. A crash, a hang of five seconds, or memory above the limit ends a run and leaves the input that did it.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from pathlib import Path

from tests.fuzz.corpus import minimised, read_corpus, write_corpus

MEMORY_MB = 600
"""Of the process, interpreter and instrumentation included: the caps let no input take more than a few tens of
megabytes."""

HANG_S = 5


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz one target, guided by coverage.")
    parser.add_argument("--target", required=True)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="0 draws one")
    parser.add_argument("--work", type=Path, help="folder for new inputs; a temporary one if not given")
    parser.add_argument("--minimise", action="store_true", help="only bring what adds coverage into the corpus")
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix=f"fuzz-{options.target}-"))
    work.mkdir(parents=True, exist_ok=True)
    if options.minimise:
        minimise(options.target, work)
        return
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(read_corpus(options.target)):
            Path(folder, str(number)).write_bytes(data)
        runs = [f"-runs={options.runs}", f"-seed={options.seed}", "-print_final_stats=1"]
        fuzz(options.target, work, *runs, str(work), folder)


def minimise(name: str, work: Path) -> None:
    """Replace the corpus by the smallest inputs that together reach all that it and `work` reach."""
    from tests.fuzz.targets import MAX_BYTES, TARGETS, prepared

    before = read_corpus(name)
    found = [path.read_bytes() for path in work.iterdir() if path.stat().st_size <= MAX_BYTES[name]]
    with prepared():
        write_corpus(name, minimised(TARGETS[name], [*before, *found]))
    print(f"{name}: {len(read_corpus(name))} inputs, before {len(before)}")


def fuzz(target: str, work: Path, *arguments: str) -> None:
    """Hand over to libFuzzer, which ends the process."""
    import atheris

    with atheris.instrument_imports(include=["mlxcel_nb"], enable_loader_override=False):
        from tests.fuzz import targets
    limits = [
        f"-max_len={targets.MAX_BYTES[target]}",
        f"-timeout={HANG_S}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-artifact_prefix={work}/found-",
    ]
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    with targets.prepared():
        atheris.Setup([sys.argv[0], *limits, *arguments], targets.TARGETS[target])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
