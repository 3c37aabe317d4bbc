"""What we use of ipyparallel and ipykernel without their promise is there. When one fails, mend launch/compat.py."""

from __future__ import annotations

import inspect
import multiprocessing
from typing import Any, ClassVar

import pytest
from ipykernel.iostream import OutStream
from ipykernel.kernelbase import Kernel
from ipyparallel import Client
from ipyparallel.client.magics import ParallelMagics
from ipyparallel.controller.app import IPController
from ipyparallel.engine.app import IPEngine
from ipyparallel.engine.kernel import IPythonParallelKernel

from mlxcel_nb.launch import compat


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_client_sends_on_a_stream_of_its_own_and_knows_engines_by_number() -> None:
    assert parameters(Client._send)[1:5] == ["socket", "msg_type", "content", "parent"]
    assert "ident" in parameters(Client._send)
    assert "_engines" in Client.class_traits()
    assert "self._control_stream = " in inspect.getsource(Client._setup_streams)


def test_a_control_reply_is_the_future_of_a_whole_message() -> None:
    assert "future.set_result(msg)" in inspect.getsource(Client._dispatch_single_reply.__wrapped__)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("next_port", ["self", "pool_name"]),
        ("construct_url", ["self", "kind", "channel", "index"]),
        ("save_connection_dict", ["self", "fname", "cdict"]),
        ("init_hub", ["self"]),
        ("init_signal", ["self"]),
    ],
)
def test_the_controller_has_what_ours_overrides(name: str, expected: list[str]) -> None:
    assert parameters(getattr(IPController, name)) == expected


def test_the_controller_makes_its_heart_monitor_a_process_not_yet_started() -> None:
    assert "self.heartmonitor_process = Process(" in inspect.getsource(IPController.init_hub)
    process = multiprocessing.Process(target=print, kwargs={"end": ""})
    assert (process._target, process._kwargs) == (print, {"end": ""})  # type: ignore[attr-defined]


def test_both_ends_write_a_colon_between_interface_and_port() -> None:
    controller = compat.controller_class()()
    controller.engine_info = {"interface": "ipc:///folder/z", "control": 3, "broadcast": [7, 8]}
    assert controller.construct_url("engine", "control") == "ipc:///folder/z:3"
    assert controller.construct_url("engine", "broadcast", 1) == "ipc:///folder/z:8"
    assert "{info['interface']}:{info[key]}" in inspect.getsource(IPEngine.complete_registration)
    assert "{cfg['interface']}:{cfg[key]}" in inspect.getsource(Client.__init__)


def test_the_engine_takes_its_connection_as_a_trait() -> None:
    traits = IPEngine.class_traits()
    assert {"connection_info_env", "enable_nanny", "max_heartbeat_misses", "kernel", "out_stream_factory"} <= set(
        traits
    )
    for name in ("load_connection_file", "init_engine", "init_signal"):
        assert parameters(getattr(IPEngine, name)) == ["self"]


def test_the_engine_loses_the_key_from_its_configuration_once_the_session_has_it() -> None:
    source = inspect.getsource(IPEngine.load_connection_file)
    assert source.index("config.Session.key =") < source.index("self.session = Session(parent=self)")


def test_a_stream_can_leave_the_descriptor_alone() -> None:
    assert "watchfd" in parameters(OutStream)


def test_control_handlers_are_a_table_of_functions_of_stream_idents_and_message() -> None:
    assert issubclass(IPythonParallelKernel, Kernel)
    assert "self.control_handlers = {}" in inspect.getsource(Kernel.__init__)
    assert "handler(self.control_stream, idents, msg)" in inspect.getsource(Kernel.process_control)


def test_px_belongs_to_an_object_that_has_a_view_of_a_client() -> None:
    assert "self.view = view" in inspect.getsource(ParallelMagics.__init__)
    assert "line_magics[px] = self.px" in inspect.getsource(ParallelMagics.__init__)
    assert Client._closed is False


def test_a_control_handler_answers_to_the_asker() -> None:
    class Session:
        sent: tuple[Any, ...] = ()

        def send(self, stream: Any, msg_type: str, content: Any, *, parent: Any, ident: Any) -> None:
            self.sent = (stream, msg_type, content, parent, ident)

    class Served:
        session = Session()
        control_handlers: ClassVar[dict[str, Any]] = {}

    compat.add_control_handler(Served, "mlxcel_echo", lambda content: {"got": content["x"]})
    message = {"content": {"x": 5}}
    Served.control_handlers["mlxcel_echo_request"]("stream", b"asker", message)
    assert Served.session.sent == ("stream", "mlxcel_echo_reply", {"got": 5}, message, b"asker")
