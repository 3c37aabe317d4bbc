"""MLX's products really run in OpenBLAS, and a host that cannot have it is told why.

Each case is a fresh interpreter: a process has one BLAS, chosen before MLX is imported.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.models import blas
from tests.conftest import REPO

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")

SOURCE = Path(blas.__file__).parent / "_blas" / "forward.c"
MACHINE = platform.machine()

PRODUCTS = """
FEW = [(m, 4 * m + m % 5, 15 + 3 * m) for m in range(1, 35)]  # rows of which the forwarder makes the products itself
import numpy as np, mlx.core as mx
rng = np.random.default_rng(0)
worst = 0.0
EVEN = [(m, 4 * (1 + m % 19), 8 + m) for m in range(1, 35)]  # whole registers, of a matrix as it is
LARGE = [(m, 700 + m, 200 + m) for m in (1, 2, 3, 7, 32)]  # worth the help of other threads
SHARED = [(40, 901, 99), (901, 40, 99), (300, 301, 70), (301, 300, 70)]  # shared out by columns, and by rows
ODD = [(1, 7, 5), (1, 300, 64), (5, 1, 9), (33, 65, 17), (1, 1, 1), (128, 128, 128)]
for m, n, k in [*ODD, *FEW, *EVEN, *LARGE, *SHARED]:
    for left, right in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        a = rng.standard_normal((k, m) if left else (m, k), dtype=np.float32)
        b = rng.standard_normal((n, k) if right else (k, n), dtype=np.float32)
        x, y = mx.array(a), mx.array(b)
        got = np.array((x.T if left else x) @ (y.T if right else y))
        worst = max(worst, float(np.abs(got - (a.T if left else a) @ (b.T if right else b)).max()))
        bias = mx.ones((m, n))
        got = np.array(mx.addmm(bias, x.T if left else x, y.T if right else y, alpha=2.0, beta=3.0))
        want = 3 + 2 * ((a.T if left else a) @ (b.T if right else b))
        worst = max(worst, float(np.abs(got - want).max()))
        z = mx.array(a.astype(np.complex64) * (1 + 2j))
        got = np.array((z.T if left else z) @ mx.array(b.astype(np.complex64)).T if right else (z.T if left else z)
                       @ mx.array(b.astype(np.complex64)))
        want = (1 + 2j) * ((a.T if left else a) @ (b.T if right else b))
        worst = max(worst, float(np.abs(got - want).max()) / 4)
"""


def fresh(code: str) -> Any:
    """What `code` prints last, as JSON, in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, cwd=REPO)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_products_of_every_form_go_through_openblas_and_agree_with_numpy(threads: int) -> None:
    seen = fresh(
        f"import json\nfrom mlxcel_nb.models import blas\nreport = blas.load_fast_blas({threads})\n"
        "before = blas.products()\n"
        + PRODUCTS
        + "print(json.dumps({'report': report.to_dict(), 'before': before, 'after': blas.products(), 'worst': worst}))"
    )
    assert seen["report"]["name"].startswith("OpenBLAS")
    assert seen["report"]["reason"] == ""
    assert seen["before"] == 0
    assert seen["after"] >= 480, "MLX did not call the forwarder"
    assert seen["worst"] < 2e-4


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_s_product_is_the_same_to_the_bit_whatever_rows_are_beside_it(threads: int) -> None:
    """The forwarder makes products of few rows; of the larger matrix, with the help of a second thread."""
    code = """
import json, numpy as np
from mlxcel_nb.models import blas
blas.load_fast_blas({threads})
import mlx.core as mx
mx.set_default_device(mx.cpu)
rng = np.random.default_rng(1)
worst = []
for columns in 130, 1300:
    a, b = (mx.array(rng.standard_normal(shape, dtype=np.float32)) for shape in ((32, 579), (columns, 579)))
    for right in b.T, b.T + 0:  # as it lies, and as it is written
        alone = [np.array(a[row : row + 1] @ right) for row in range(32)]
        worst += [float(np.abs(np.array(a[:m] @ right) - np.concatenate(alone[:m])).max()) for m in range(1, 33)]
print(json.dumps(worst))
"""
    worst = fresh(code.replace("{threads}", str(threads)))
    assert max(worst) < 1e-4
    most = 12 if MACHINE == "aarch64" else 32
    if makes_few_rows():
        assert worst[:most] == worst[64 : 64 + most] == [0.0] * most


def test_two_that_ask_at_once_both_get_their_products() -> None:
    """Threads of two of MLX's streams: one has the helpers, the other one makes its product without."""
    code = """
import json, threading, numpy as np
from mlxcel_nb.models import blas
blas.load_fast_blas(3)
import mlx.core as mx
rng = np.random.default_rng(2)
worst = []
def work():
    stream = mx.new_stream(mx.cpu)
    for m in range(1, 200):
        a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((1 + m % 64, 300), (900, 300)))
        got = mx.matmul(mx.array(a), mx.array(b).T, stream=stream)
        worst.append(float(np.abs(np.array(got) - a @ b.T).max()))
threads = [threading.Thread(target=work) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps([len(worst), max(worst)]))
"""
    count, worst = fresh(code)
    assert count == 3 * 199 and worst < 1e-3


def makes_few_rows() -> bool:
    """Whether this processor has the instructions for it."""
    flags = Path("/proc/cpuinfo").read_text("utf-8")
    return MACHINE == "aarch64" or "avx512f" in flags or ("avx2" in flags and "fma" in flags)


def test_products_are_shared_out_here_or_by_the_library_and_not_by_both() -> None:
    seen = fresh(
        "import json\nfrom mlxcel_nb.models import blas\nfirst = blas.load_fast_blas(2).threads\n"
        "lib, prefix = blas._openblas\nget = lib[prefix + 'openblas_get_num_threads']\n"
        "shared = [get(), len(blas._helpers)]\nblas._forwarder = None\n"
        "second = blas.load_fast_blas(2).threads\n"
        "print(json.dumps([first, shared, second, get()]))"
    )
    assert seen == [2, [1, 1], 2, 2]


def test_loading_it_after_mlx_is_reported_and_does_not_fail() -> None:
    seen = fresh(
        "import json, mlx.core\nfrom mlxcel_nb.models import blas\nprint(json.dumps(blas.load_fast_blas(2).to_dict()))"
    )
    assert seen["name"] == "reference"
    assert "imported before" in seen["reason"]


def test_a_host_without_openblas_is_told_what_to_install() -> None:
    seen = fresh(
        "import json, sys\nfrom mlxcel_nb.models import blas\n"
        "sys.modules['scipy_openblas32'] = None\nblas.importlib.util.find_spec = lambda name: None\n"
        "blas.SYSTEM_LIBRARIES = ()\nblas.ctypes.util.find_library = lambda name: None\n"
        "report = blas.load_fast_blas(2)\nimport mlx.core as mx\n"
        "print(json.dumps([report.to_dict(), (mx.ones((2, 2)) @ mx.ones((2, 2))).sum().item()]))"
    )
    assert seen[0]["name"] == "reference"
    assert "scipy-openblas32" in seen[0]["reason"]
    assert seen[1] == 8.0


def test_idle_threads_sleep_and_the_environment_is_left_as_it_was() -> None:
    assert fresh(
        "import json, os\nfrom mlxcel_nb.models import blas\nbefore = dict(os.environ)\nblas.load_fast_blas(2)\n"
        "print(json.dumps(dict(os.environ) == before))"
    )


def test_loading_the_blas_does_not_import_mlx() -> None:
    assert fresh(
        "import sys\nfrom mlxcel_nb.models import blas\nblas.load_fast_blas(1)\n"
        "print('true' if 'mlx.core' not in sys.modules and 'numpy' not in sys.modules else 'false')"
    )


def test_a_forwarder_is_shipped_for_both_machines_and_needs_no_other_library() -> None:
    for machine, elf_machine in (("x86_64", 62), ("aarch64", 183)):
        data = (SOURCE.parent / f"forward-{machine}.so").read_bytes()
        assert data[:4] == b"\x7fELF"
        assert int.from_bytes(data[18:20], "little") == elf_machine
        assert len(data) < 65536
        for name in (b"libc", b"memcpy", b"memset", b"malloc"):
            assert name not in data


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on this machine")
def test_the_shipped_forwarder_behaves_as_its_source(tmp_path: Path) -> None:
    built = tmp_path / f"forward-{MACHINE}.so"
    flags = ["-O2", "-shared", "-fPIC", "-nostdlib", "-fno-tree-loop-distribute-patterns", "-fno-stack-protector"]
    flags += ["-fvisibility=hidden"]
    subprocess.run(["cc", *flags, "-o", built, SOURCE], check=True, timeout=30)
    seen = fresh(
        "import json\nfrom pathlib import Path\nfrom mlxcel_nb.models import blas\n"
        f"blas._FORWARDERS = Path({str(tmp_path)!r})\nreport = blas.load_fast_blas(1)\n"
        + PRODUCTS
        + "print(json.dumps([report.name, blas.products(), worst]))"
    )
    assert seen[0].startswith("OpenBLAS")
    shipped = fresh(
        "import json\nfrom mlxcel_nb.models import blas\nreport = blas.load_fast_blas(1)\n"
        + PRODUCTS
        + "print(json.dumps([report.name, blas.products(), worst]))"
    )
    assert seen == shipped
