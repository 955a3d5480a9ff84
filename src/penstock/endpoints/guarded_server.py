"""A manager's gRPC server, whose guard checks every call of every service. Methods without a guard are not served.

An error that a method raises becomes the `failure` field of its answer, or the call's status if the answer has no such
field.
"""

import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Never, TypeAlias

import grpc
import structlog

from penstock.core.errors import Forbidden, InvalidRequest, NameTaken, PenstockError, Unauthenticated, UnknownModel
from penstock.core.principals import ANY_SCOPE, ANYBODY, NO_SCOPES, Needs, Principal, Scope
from penstock.endpoints.credentials import Credentials
from penstock.endpoints.edge_identity import read_metadata_identity
from penstock.endpoints.guard import Guard, get_declared_needs
from penstock.wire.credentials.certificate_names import read_call_names
from penstock.wire.failures import encode_failure
from penstock.wire.grpc_listener.header_memory import ArrivedMessages
from penstock.wire.manager_connection import ASKED_BY_HEADER, CALLERS_KEY_HEADER, MAX_NAME_CHARS

log = structlog.get_logger()
Context: TypeAlias = grpc.aio.ServicerContext
UNIX_PREFIX = "unix:"
OPERATOR = Principal("operator", scopes=ANY_SCOPE)  # a caller who can open the manager's socket can also read its files
THIRD_PARTY_NEEDS: Mapping[str, Needs] = {
    "grpc.health.v1.Health": NO_SCOPES
}  # services whose methods declare no scopes
STATUS_CODES: Mapping[type[PenstockError], grpc.StatusCode] = {
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    NameTaken: grpc.StatusCode.ALREADY_EXISTS,
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
}
current_call: ContextVar["CurrentCall | None"] = ContextVar("current_call", default=None)  # set during unary calls
stream_caller: ContextVar[Principal | None] = ContextVar("stream_caller", default=None)  # set during streamed calls


class CurrentCall:
    """The caller and the method of the current call."""

    __slots__ = ("method", "principal")

    def __init__(self, principal: Principal, method: str) -> None:
        self.principal = principal
        self.method = method


def get_caller() -> Principal:
    asked = current_call.get()
    return ANYBODY if asked is None else asked.principal


def may_use(model: str, block_id: str = "") -> bool:
    """Return whether the allow list of the caller's key permits the model or block."""
    return get_caller().may_use(model, block_id)


def check_change(model: str, block_ids: Iterable[str] = ()) -> None:
    """Raise UnknownModel unless the caller may use all blocks of the model, so that hidden models stay unknown."""
    if not all(may_use(model, block_id) for block_id in [*block_ids] or [""]):
        raise UnknownModel(f"there is no model '{model[:128]}': it is neither deployed nor in the registry")


class GuardedServer:
    """A gRPC server whose methods are guarded: services register their handlers here."""

    def __init__(
        self,
        server: grpc.aio.Server,
        guard: Guard,
        arrived: ArrivedMessages | None = None,
        is_behind_edge: bool = False,
    ) -> None:
        """Guard the server; `arrived` counts the bytes of the messages that it receives.

        `is_behind_edge`: all calls come from the edge over a unix socket, with the identities of its clients.
        """
        self._server = server
        self._is_behind_edge = is_behind_edge
        self._guard = guard
        self._arrived = arrived or ArrivedMessages()

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Do nothing, because only registered methods are served."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        guarded = {name: self._guard_method(service, name, handler) for name, handler in handlers.items()}
        self._server.add_registered_method_handlers(service, guarded)

    def _guard_method(self, service: str, name: str, handler: Any) -> Any:
        asked, answered = (
            "stream" if is_stream else "unary" for is_stream in (handler.request_streaming, handler.response_streaming)
        )
        kind = f"{asked}_{answered}"
        answer = getattr(handler, kind)
        needs = THIRD_PARTY_NEEDS[service] if service in THIRD_PARTY_NEEDS else get_declared_needs(answer)
        wrap = self._wrap_streaming if inspect.isasyncgenfunction(answer) else self._wrap_unary
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        wrapped = wrap(answer, needs, f"{service.rpartition('.')[2]}.{name}")
        return make(wrapped, handler.request_deserializer, handler.response_serializer)

    def _wrap_unary(self, answer: Callable[..., Any], needs: Needs, method: str) -> Callable[..., Any]:
        kind: Any = getattr(answer, "__annotations__", {}).get("return")
        has_failure = hasattr(kind, "DESCRIPTOR") and "failure" in kind.DESCRIPTOR.fields_by_name

        async def guarded(request: Any, context: Context) -> Any:
            request = self._count_messages(request, context)
            principal = await self._admit(context, needs)
            current_call.set(CurrentCall(_find_original_caller(context, principal), method))
            try:
                return await answer(request, context)
            except PenstockError as error:
                log.warning("call_failed", method=method, code=error.code, error=error.message)
                if not has_failure:
                    await abort_with_error(context, error)
                return kind(failure=encode_failure(error))

        return guarded

    def _wrap_streaming(self, answer: Callable[..., Any], needs: Needs, method: str) -> Callable[..., Any]:
        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            request = self._count_messages(request, context)
            stream_caller.set(await self._admit(context, needs))
            try:
                async for answered in answer(request, context):
                    if Scope.JOIN not in needs:  # roles of the cluster are checked once per stream
                        await self._admit(context, needs)
                    yield answered
            except PenstockError as error:
                await abort_with_error(context, error)

        return guarded

    def _count_messages(self, request: Any, context: Context) -> Any:
        """Return the message of a call after counting its bytes, or an iterator that counts a stream's messages."""
        peer, arrived = context.peer(), self._arrived
        if not isinstance(request, AsyncIterator):
            arrived.add(peer, request.ByteSize(), is_call=True)
            return request

        async def counted() -> AsyncIterator[Any]:
            async for message in request:
                arrived.add(peer, message.ByteSize(), is_call=False)
                yield message

        return counted()

    async def _admit(self, context: Context, needs: Needs) -> Principal:
        """Return the caller. A key that a gateway forwards takes precedence over the gateway's own credentials."""
        metadata = context.invocation_metadata() or ()
        forwarded = tuple(bytes(value).decode("latin-1") for name, value in metadata if name == CALLERS_KEY_HEADER)
        if not self._is_behind_edge and context.peer().startswith(UNIX_PREFIX) and not forwarded:
            return OPERATOR
        certificate = self._read_certificate(context) if self._guard.reads_certificates else ()
        credentials = Credentials(forwarded) if forwarded else Credentials.from_metadata(metadata, certificate)
        try:
            return self._guard.admit(credentials, needs, time.time())
        except PenstockError as error:
            await abort_with_error(context, error)

    def _read_certificate(self, context: Context) -> tuple[str, ...]:
        if self._is_behind_edge:
            return read_metadata_identity(context.invocation_metadata() or ()).certificate
        return read_call_names(context.auth_context())


def get_peer(context: Context) -> str:
    """Return the caller's address in gRPC's notation, also behind the edge."""
    identity = (
        read_metadata_identity(context.invocation_metadata() or ()) if context.peer().startswith(UNIX_PREFIX) else None
    )
    return identity.peer if identity is not None and identity.client[0] else str(context.peer())


def _find_original_caller(context: Context, principal: Principal) -> Principal:
    """Return the caller for whom a gateway forwards a call. Only roles of the cluster may name another caller."""
    for name, value in context.invocation_metadata() or ():
        if name == ASKED_BY_HEADER and isinstance(value, bytes) and Scope.JOIN in principal.scopes:
            return Principal(value.decode(errors="replace")[:MAX_NAME_CHARS], scopes=principal.scopes)
    return principal


async def abort_with_error(context: Context, error: PenstockError) -> Never:
    code = STATUS_CODES.get(type(error), grpc.StatusCode.UNAVAILABLE)
    metadata = (("penstock-code", error.code), ("penstock-leader", error.fields.get("leader", "")))
    await context.abort(code, error.message, metadata)
    raise AssertionError("abort raises")
