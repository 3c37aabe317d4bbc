"""What every test shares: the user's Jupyter stays out of it, hypothesis repeats itself, and slow things are marked.

Tests under tests/cluster, tests/browser and tests/security, and the notebooks, start engines, kernels or a browser.
They carry the marker `cluster` by themselves, so that `make test` can run them apart from the rest.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from tests.waiting import words_of

REPO = Path(__file__).parents[1]

# One example list for everybody: a red test is red again on the next run, on any machine.
# None of them may fail because the machine is slow.
hypothesis.settings.register_profile(
    "house",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("house")

# Set before any test imports IPython or Jupyter, and inherited by the processes that tests start.
_scratch = tempfile.mkdtemp(prefix="mlxcel-tests-")
for _variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
    os.environ[_variable] = str(Path(_scratch) / _variable.lower())
os.environ["JUPYTER_PLATFORM_DIRS"] = "1"
for _variable in ("MLXCEL_CLUSTER_SECRET", "MLXCEL_CLUSTER_SECRET_FILE", "MLXCEL_NB_LOG"):
    os.environ.pop(_variable, None)

# A shell's background job ignores Ctrl-C, and so would every process that tests start and press it on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path
        if path.suffix == ".ipynb" or {"cluster", "browser", "security"} & set(path.relative_to(REPO).parts):
            item.add_marker(pytest.mark.cluster)


def pytest_sessionfinish() -> None:
    shutil.rmtree(_scratch, ignore_errors=True)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model as an MLX folder; fetched once into the user's cache."""
    from mlxcel_nb.models import store

    return store.fetch("smollm2-135m")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the system's Chromium. CI demands one; elsewhere a machine without it leaves browser tests out."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    if os.environ.get("MLXCEL_NB_REQUIRE_ALL"):
        pytest.fail("no Chromium on this machine")
    pytest.skip("no Chromium on this machine; Debian: apt-get install chromium")  # a user need not own one


@pytest.fixture
def no_children_left() -> Iterator[None]:
    """Fails the test when a process it started outlives it."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive, f"left running: {[(p.pid, words_of(p)[:6]) for p in alive]}"
