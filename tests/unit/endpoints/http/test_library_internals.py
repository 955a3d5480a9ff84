"""The private parts of uvicorn, websockets and asyncio that the HTTP endpoints override still exist and are used."""

import asyncio
import inspect
import re
from asyncio.sslproto import SSLProtocol
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from websockets.server import ServerProtocol
from websockets.streams import StreamReader

from penstock.endpoints.http.bounded_protocol import BoundedProtocol, BoundedServer
from penstock.endpoints.http.handshake import Handshake
from penstock.endpoints.http.websocket_protocol import StreamProtocol
from penstock.endpoints.uvicorn_internals import STATUS_LINE, HttpToolsProtocol, WebSocketsSansIOProtocol
from penstock.gateway.short_path.infer_protocol import InferProtocol, PlainRequest

OURS = {  # methods of ours that the libraries do not have
    BoundedProtocol: {
        "check_framing", "make_error_body", "check_timeouts", "disconnect_client", "hold_body", "read_edge_identity",
        "refuse", "complete_request", "_encode_refusal", "_count_header_bytes", "_create_headers_error",
        "_apply_target_host", "_refuse_in_parser", "_send_refusal", "_stop_counting",
    },
    InferProtocol: {"_infer", "_read_plain_request", "check_framing"},
    StreamProtocol: {
        "check_timeouts", "refuse", "_close_with_error", "_allow_control", "_parse", "_stop_counting_message",
    },
    BoundedServer: set[str](),
    Handshake: set[str](),
}  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "library"),
    [
        (BoundedProtocol, HttpToolsProtocol),
        (InferProtocol, HttpToolsProtocol),
        (StreamProtocol, WebSocketsSansIOProtocol),
        (BoundedServer, uvicorn.Server),
        (Handshake, SSLProtocol),
    ],
)
def test_every_overridden_method_exists_in_the_library_with_the_same_parameters(ours: type, library: type) -> None:
    overridden = {name for name, found in vars(ours).items() if inspect.isfunction(found)} - {"__init__", *OURS[ours]}
    assert overridden
    for name in overridden:
        theirs = inspect.unwrap(getattr(library, name))
        mine = inspect.unwrap(getattr(ours, name))
        assert len(inspect.signature(mine).parameters) == len(inspect.signature(theirs).parameters), name


@pytest.mark.parametrize(
    ("library", "attributes"),
    [
        (
            HttpToolsProtocol,
            "app_state client cycle expect_100_continue flow headers loop parser pipeline scope server_state tasks "
            "transport url _should_upgrade _start_asgi_task handle_websocket_upgrade",
        ),
        (
            RequestResponseCycle,
            "disconnected message_event response_complete response_started keep_alive body more_body on_response",
        ),
        (FlowControl, "drain pause_reading read_paused resume_reading write_paused"),
        (
            WebSocketsSansIOProtocol,
            "client close_sent close_timeout conn curr_msg_data_type frames handle_parser_exception "
            "handshake_complete handshake_initiated initial_response loop ping_timeout pong_timer queue read_paused "
            "stop_keepalive transport writable",
        ),
        (ServerProtocol, "events fail handshake_exc reader reject"),
        (StreamReader, "buffer"),
        (SSLProtocol, "_get_write_buffer_size _ssl_buffer _transport"),
        (uvicorn.Server, "capture_signals on_tick server_state should_exit"),
    ],
)
def test_every_private_attribute_that_endpoints_use_is_set_by_the_library(library: type, attributes: str) -> None:
    source = "".join(inspect.getsource(each) for each in library.__mro__ if each.__module__ != "builtins")
    for name in attributes.split():
        is_set = any(f"self.{name}{end}" in source for end in (" =", ":", " +="))
        assert is_set or hasattr(library, name), f"{library.__name__} has no '{name}'"


def test_uvicorn_has_a_line_for_each_status() -> None:
    lines: Any = STATUS_LINE
    assert lines[429] == b"HTTP/1.1 429 Too Many Requests\r\n"


def test_uvicorn_and_asyncio_call_the_overridden_methods() -> None:
    assert "on_response=self.on_response_complete" in inspect.getsource(HttpToolsProtocol)
    assert "self.conn.events_received()" in inspect.getsource(WebSocketsSansIOProtocol.handle_events) or (
        "self.conn.events" in inspect.getsource(WebSocketsSansIOProtocol.handle_events)
    )
    assert "self.keepalive_timeout" in inspect.getsource(WebSocketsSansIOProtocol.send_keepalive_ping)
    control_writing: Any = getattr(SSLProtocol, "_control_app_writing")  # noqa: B009 - not in its type stubs
    assert "self._get_write_buffer_size()" in inspect.getsource(control_writing)
    assert "await self.on_tick(" in inspect.getsource(uvicorn.Server.main_loop)
    assert "self.capture_signals()" in inspect.getsource(uvicorn.Server.serve)


def test_a_plain_request_has_all_that_uvicorn_reads_of_its_cycle() -> None:
    """`body` and `more_body` are used only in callbacks of the parser that InferProtocol overrides."""
    read = set(re.findall(r"self\.cycle\.(\w+)", inspect.getsource(HttpToolsProtocol)))
    assert {"disconnected", "message_event", "response_complete"} <= read
    assert all(hasattr(PlainRequest, name) for name in read - {"more_body"}), read


def test_a_real_connection_has_the_attributes_that_endpoints_use() -> None:
    config = uvicorn.Config(lambda scope: None, log_config=None)
    config.load()

    async def connection() -> HttpToolsProtocol:
        return HttpToolsProtocol(config, uvicorn.Server(config).server_state, {})

    found: Any = asyncio.run(connection())
    for name in ("app_state", "cycle", "expect_100_continue", "headers", "loop", "parser", "pipeline", "tasks"):
        assert hasattr(found, name), name
