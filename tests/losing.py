"""`python -m tests.losing [TRIALS] [SEED]`: a node of prefill and decode groups is killed, at a moment drawn by chance.

In each trial eight requests are under way when a node dies, in a phase that is drawn: while requests wait, while
prompts are read, while keys and values travel, or while tokens are made. There is another group of either kind, so each
request has to end with the text that one process gives, and within a minute. A trial that does not is told, and the run
fails.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.stream import Stream
from mlxcel_nb.models.params import SamplingParams
from tests.cluster.harness import activity, nothing_left, pid_of
from tests.tiny import make_tiny

REQUESTS = 8
WITHIN_S = 60.0
LAYOUTS = (("single", "single"), ("tp2", "single"), ("single", "pp2"))
PHASES = ("queued", "prefilling", "transferring", "decoding")
SLOW = "1ms,40Mbit"
"""Of links, so that a transfer takes a while."""


def prompts(number: int) -> list[list[int]]:
    rng = random.Random(number)
    return [[rng.randrange(1, 257) for _ in range(rng.choice((40, 300, 900)))] for _ in range(REQUESTS)]


def params(number: int) -> list[SamplingParams]:
    rng = random.Random(number)
    return [
        SamplingParams(max_tokens=rng.choice((4, 40, 160)), temperature=rng.choice((0.0, 0.9)), seed=n, ignore_eos=True)
        for n in range(REQUESTS)
    ]


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)  # between two looks
    return condition()


def in_phase(phase: str, cluster: Cluster, readers: list[str], streams: list[Stream]) -> bool:
    """Whether things are as far as that; the moment after is drawn."""
    if phase == "queued":
        return True
    if phase == "prefilling":
        return wait_for(lambda: any(activity(cluster, node) == "prefill" for node in readers), 5)
    made = 1 if phase == "transferring" else 3
    return wait_for(lambda: any(len(stream.token_ids) >= made for stream in streams), 10)


def trial(model: str, number: int, rng: random.Random) -> tuple[str, list[str]]:
    """What was done, and what went wrong."""
    reader, answerer = rng.choice(LAYOUTS)
    phase = rng.choice(PHASES)
    sizes = [2 if layout != "single" else 1 for layout in (reader, answerer)]
    count = 2 * sum(sizes)
    with nothing_left(Cluster(count, threads=1, link=SLOW)) as cluster:
        cluster.load(model)
        asked, how = prompts(number), params(number)
        expected = [cluster.generate(each, wish).token_ids for each, wish in zip(asked, how, strict=True)]
        cluster.unload()
        cluster.load(model, prefill=2, decode=2, prefill_layout=reader, decode_layout=answerer, prefill_from=0)
        nodes = [node.node_id for node in cluster.nodes]
        readers = nodes[: 2 * sizes[0]]
        killed = rng.choice(nodes)
        streams = [cluster.stream(each, wish) for each, wish in zip(asked, how, strict=True)]
        results: list[str] = [""] * REQUESTS

        def follow(index: int) -> None:
            try:
                answer = streams[index].result()
                results[index] = "" if answer.token_ids == expected[index] else "another text"
            except Exception as error:  # noqa: BLE001  # told below
                results[index] = f"{type(error).__name__}: {error}"

        followers = [threading.Thread(target=follow, args=(index,), daemon=True) for index in range(REQUESTS)]
        for follower in followers:
            follower.start()
        in_phase(phase, cluster, readers, streams)
        time.sleep(rng.random() * 0.1)  # the moment that is drawn
        os.kill(pid_of(cluster, killed), signal.SIGKILL)
        end = time.monotonic() + WITHIN_S
        for follower in followers:
            follower.join(max(0.0, end - time.monotonic()))
        wrong = [f"request {n}: {result}" for n, result in enumerate(results) if result]
        wrong += [f"request {n}: hangs" for n, follower in enumerate(followers) if follower.is_alive()]
        role = "prefill" if killed in readers else "decode"
        return f"{role} {reader if role == 'prefill' else answerer}, {phase}", wrong


def main() -> int:
    given = [int(word) for word in sys.argv[1:3]]
    trials, seed = given[0] if given else 100, given[1] if len(given) > 1 else 0
    rng, seen, failed = random.Random(seed), Counter[str](), 0
    with tempfile.TemporaryDirectory(prefix="mlxcel-losing-") as folder:
        model = str(make_tiny(Path(folder) / "tiny", max_position_embeddings=2048))
        for number in range(trials):
            began = time.monotonic()
            what, wrong = trial(model, number, rng)
            seen[what] += 1
            failed += bool(wrong)
            print(f"{number}: {what}: {'; '.join(wrong) or 'all saved'} ({time.monotonic() - began:.1f} s)", flush=True)
    print(f"{trials} trials, {failed} with losses: {dict(sorted(seen.items()))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
