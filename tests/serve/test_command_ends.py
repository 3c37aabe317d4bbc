"""How `serve` ends in a shell, and what it goes on after: signals, one and two, and engines that are killed."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil
import pytest

from mlxcel_nb.serve.server import GRACE_S
from tests.serve.callers import events
from tests.tiny import make_tiny
from tests.waiting import started, words_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

PATIENCE_S = 90.0
ON = {"ignore_eos": True}
LONG = {"prompt": "Hello", "max_tokens": 1_000_000, "stream": True, **ON}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose answers last longer than any test."""
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=1 << 24)


class Served:
    """The command in a process of its own, and all that it has said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said = ""
        self._changed = threading.Condition()
        for stream in (process.stdout, process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            with self._changed:
                self.said += line
                self._changed.notify_all()

    def says(self, words: str) -> None:
        """Wait for `words`."""
        self.says_times(words, 1)

    def says_times(self, words: str, times: int) -> None:
        """Wait until it has said `words` so many times."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.said.count(words) >= times, PATIENCE_S), (
                f"{words!r} is not in:\n{self.said}"
            )

    def ends(self) -> int:
        """Wait for its end, with nothing left of it."""
        family = self.process_family
        status = self.process.wait(PATIENCE_S)
        _, left = psutil.wait_procs(family, timeout=10)
        assert not left, left
        return status

    @property
    def process_family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    @property
    def engines(self) -> list[psutil.Process]:
        """Its engines, by their numbers."""
        found = [each for each in self.process_family if "mlxcel_nb.launch.engine" in words_of(each)]
        return sorted(found, key=words_of)

    @property
    def url(self) -> str:
        return self.said.partition("listening on ")[2].partition(";")[0]

    def health(self) -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=PATIENCE_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def complete(self) -> int:
        """How many tokens a short answer has."""
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            done = client.completions.create(model="tiny", prompt="Hello", max_tokens=3, extra_body=ON)
        assert done.usage is not None
        return done.usage.completion_tokens


@contextmanager
def serving(*words: str, ready: str = "is served at") -> Iterator[Served]:
    command = [sys.executable, "-m", "mlxcel_nb", "serve", *words, "--port", "0"]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        served = Served(process)
        served.says(ready)
        yield served


@contextmanager
def streaming(served: Served) -> Iterator[Callable[[], str]]:
    """An answer that has begun; what is yielded reads it to its end."""
    request = urllib.request.Request(f"{served.url}/v1/completions", json.dumps(LONG).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        first = answer.readline().decode()
        assert '"text"' in first, first
        yield lambda: first + answer.read().decode()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_answers_that_the_first_lets_end(
    tiny: Path, signum: signal.Signals, no_children_left: None
) -> None:
    with serving(str(tiny)) as served, streaming(served) as rest:
        served.process.send_signal(signum)
        served.says("stopping: 1 request is under way, for 5 s at most; Ctrl-C again ends what is left at once")
        assert served.process.poll() is None
        served.process.send_signal(signum)
        last = events(rest())[-1]
        assert last["error"]["code"] == "stopping"
        served.process.send_signal(signum)  # the engines are being stopped: that is not to be broken off
        assert served.ends() == 0
        served.says("stopped\n")
        assert "Traceback" not in served.said


def test_one_signal_is_enough_and_says_that_nobody_waits(tiny: Path, no_children_left: None) -> None:
    with serving(str(tiny), "--pp", "2") as served:
        served.says("2 micro-batches in 2 stages")
        assert served.said.index("Room for a request of ") < served.said.index("2 micro-batches in 2 stages")
        served.process.send_signal(signal.SIGTERM)
        assert served.ends() == 0
        served.says("stopping\nstopped\n")


def test_a_caller_who_takes_nothing_does_not_hold_up_a_second_signal(tiny: Path, no_children_left: None) -> None:
    with serving(str(tiny)) as served:
        where = urlsplit(served.url)
        with socket.create_connection((where.hostname, where.port), PATIENCE_S) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
            served.complete()  # the half request has come before this one
            served.process.send_signal(signal.SIGINT)
            served.says("stopping\n")
            begun = time.monotonic()
            served.process.send_signal(signal.SIGINT)
            assert not sock.recv(1)
            assert time.monotonic() - begun < GRACE_S, "it was not cut off by the first signal's end"
        assert served.ends() == 0


def test_a_lost_engine_is_started_again(tiny: Path, no_children_left: None) -> None:
    with serving(str(tiny)) as served:
        for times in (1, 2):
            (engine,) = served.engines
            with streaming(served) as rest:
                engine.kill()
                assert "engine-0" in events(rest())[-1]["error"]["message"]
            status, told = served.health()
            assert status == 503 and "engine-0 is lost" in told["reason"]
            served.says("engine-0 is lost: was killed by SIGKILL; engines are started again" + " in 2 s" * (times - 1))
            served.says_times("served again", times)
            assert served.health()[0] == 200 and served.complete() == 3
            assert [each.pid for each in served.engines] != [engine.pid]
        served.process.send_signal(signal.SIGTERM)
        assert served.ends() == 0


def test_it_ends_with_an_error_when_no_engines_can_be_had_any_more(tmp_path: Path, no_children_left: None) -> None:
    folder = make_tiny(tmp_path / "tiny")
    with serving(str(folder), "--pp", "2") as served:
        shutil.rmtree(folder)
        served.engines[1].kill()
        served.says("engine-1 is lost: was killed by SIGKILL; engines are started again\n")
        served.says("engines are started again in 10 s")
        status, told = served.health()
        assert status == 503 and "engines" in told["reason"]
        assert served.ends() == 1
        last = served.said.splitlines()[-1]
        assert last.startswith("error: ") and str(folder) in last and "3 times" in last
        with pytest.raises(urllib.error.URLError):
            served.health()


def test_replicas_go_on_without_one_that_is_lost(tiny: Path, no_children_left: None) -> None:
    """Case 28, over HTTP."""
    with serving(str(tiny), "--dp", "2") as served:
        served.engines[1].kill()
        served.says("engine-1 is lost (was killed by SIGKILL); requests go to the replicas that are left")
        status, told = served.health()
        assert status == 200 and "SIGKILL" in told["lost"]["engine-1"]
        assert served.complete() == 3
        assert "started again" not in served.said
        served.engines[0].kill()
        served.says("served again")
        assert "lost" not in served.health()[1] and len(served.engines) == 2 and served.complete() == 3
        served.process.send_signal(signal.SIGTERM)
        assert served.ends() == 0


def test_ctrl_c_while_engines_are_waited_for_again_ends_it(tmp_path: Path, no_children_left: None) -> None:
    folder = make_tiny(tmp_path / "tiny")
    with serving(str(folder)) as served:
        shutil.rmtree(folder)
        served.engines[0].kill()
        served.says("engines are started again in 10 s")
        served.process.send_signal(signal.SIGINT)
        assert served.ends() == 0
        served.says("stopped\n")
