"""The process that verifies: `python -m mlxcel_nb.models.verifying`, started by `job`, one job a process.

A job is {"catalogue": [names], "layouts": [...]}, or {"model": folder, "layouts", "prompt", "tokens", "dtype",
"allow_code", "vocab_parallel", "judged"}. Lines come back: {"doing", "done", "total"}; a finding or a verdict;
{"error"}; and {"end"} at last.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from mlxcel_nb import errors
from mlxcel_nb.models.blas import load_fast_blas
from mlxcel_nb.util.cores import usable_cores

HERE = "the process that verifies"


def main() -> None:
    _keep_others_off_the_output()
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_input, daemon=True).start()
    load_fast_blas(usable_cores())  # before anything brings MLX
    try:
        for found in _catalogue(job) if "catalogue" in job else _model(job):
            _say(found)
        _say({"end": True})
    except Exception as error:  # noqa: BLE001  # whatever it was, it is the answer
        wrapped = errors.wrap(error, HERE)
        _say({"error": {**wrapped.to_dict(), "node": None if isinstance(error, errors.MlxcelError) else HERE}})


def _catalogue(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import mlx.core as mx

    from mlxcel_nb.models.verifying.catalogued import examine

    mx.disable_compile()  # on a processor it calls a C++ compiler for each fused kernel: minutes over all entries
    names = job["catalogue"]
    for done, name in enumerate(names):
        _doing(name, done, len(names))
        yield {"finding": examine(name, job["layouts"]).to_dict()}
        mx.clear_cache()


def _model(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import numpy as np

    from mlxcel_nb.models.info import model_info
    from mlxcel_nb.models.verifying.catalogued import compared, run_named, words_of
    from mlxcel_nb.models.verifying.comparing import Verdict

    folder, layouts, n = job["model"], job["layouts"], model_info(job["model"]).layers
    prompts = [np.array([job["prompt"]], np.int32)]

    def progress_of(name: str, done: int) -> Callable[[Any], None]:
        return lambda news: _doing(f"{name}: loading {news.what}", done, len(layouts) + 1)

    def answer(name: str, done: int, forced: Any) -> Any:
        _doing(name, done, len(layouts) + 1)
        return run_named(
            folder, n, name, prompts, job["tokens"], forced=forced, dtype=job["dtype"],
            allow_code=job["allow_code"], vocab_parallel=job["vocab_parallel"], progress=progress_of(name, done),
        )  # fmt: skip

    whole = answer("single", 0, None)
    forced = [record.tokens for record in whole.records]
    for done, name in enumerate(layouts, 1):
        warnings: list[str] = []
        try:
            split = answer(name, done, forced)
        except errors.ConfigError as error:
            verdict = Verdict(layout=name, refused=str(error))
        except errors.MlxcelError as error:
            verdict = Verdict(layout=name, failed=str(error))
        except Exception as error:  # noqa: BLE001  # the others are still to be tried
            verdict = Verdict(layout=name, failed=words_of(error))
        else:
            verdict = compared(name, whole.records, split.records, split.dtype, judged=job["judged"])
            warnings = split.warnings
        yield {"verdict": verdict.to_dict(), "warnings": warnings}


def _doing(what: str, done: int, total: int) -> None:
    _say({"doing": what, "done": done, "total": total})


def _keep_others_off_the_output() -> None:
    """From now on the output is for `_say`: what a library prints goes where errors go (mlx-lm's olmo prints)."""
    global _output
    _output = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


_output: TextIO = sys.stdout


def _say(message: dict[str, Any]) -> None:
    _output.write(json.dumps(message) + "\n")
    _output.flush()


def _end_with_the_input() -> None:
    """Whoever asked is gone, and nobody will read the answer."""
    while sys.stdin.readline():
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
