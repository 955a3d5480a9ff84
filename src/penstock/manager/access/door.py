"""The guard of a manager's gRPC door: every method of every service passes it, or is not served.

What a method raises is told here: as its answer's failure, or as the status of a call whose answer has none.
"""

import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Never, TypeAlias

import grpc
import structlog

from penstock.access.guard import Guard, declared_needs
from penstock.access.showing import Shown
from penstock.core.errors import Forbidden, InvalidRequest, NameTaken, PenstockError, Unauthenticated, UnknownModel
from penstock.core.principals import ANY_SCOPE, ANYBODY, PUBLIC, Needs, Principal, Scope
from penstock.wire.control import ASKED_BY, CALLERS_KEY, NAME_CHARS
from penstock.wire.credentials.names import names_of_call
from penstock.wire.failures import encode_failure

log = structlog.get_logger()
Context: TypeAlias = grpc.aio.ServicerContext
UNIX = "unix:"
OPERATOR = Principal("operator", scopes=ANY_SCOPE)  # who reaches the manager's socket has its files as well
OF_OTHERS: Mapping[str, Needs] = {"grpc.health.v1.Health": PUBLIC}  # services that others wrote
CODES: Mapping[type[PenstockError], grpc.StatusCode] = {
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    NameTaken: grpc.StatusCode.ALREADY_EXISTS,
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
}
acting: ContextVar["Acting | None"] = ContextVar("acting", default=None)  # for whom a call does what it does

watching: ContextVar[Principal | None] = ContextVar("watching", default=None)  # who is told what a stream tells


class Acting:
    """Who asked for what is being done, and by which method."""

    __slots__ = ("method", "principal")

    def __init__(self, principal: Principal, method: str) -> None:
        self.principal = principal
        self.method = method


def caller() -> Principal:
    """For whom a call is."""
    asked = acting.get()
    return ANYBODY if asked is None else asked.principal


def may_ask(model: str, block_id: str = "") -> bool:
    """Whether whoever a call is for may: the allow list of a key counts in every service."""
    return caller().may_ask(model, block_id)


def check_change(model: str, block_ids: Iterable[str] = ()) -> None:
    """What is done to a model is done to all its blocks; what a key may not ask is to it as if it were not there."""
    if not all(may_ask(model, block_id) for block_id in [*block_ids] or [""]):
        raise UnknownModel(f"there is no model '{model[:128]}': it is neither deployed nor in the registry")


class GuardedDoor:
    """Stands for the server where services are added to it."""

    def __init__(self, server: grpc.aio.Server, guard: Guard) -> None:
        self._server = server
        self._guard = guard

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Registered ones are all that there are."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        guarded = {name: self._guarded(service, name, handler) for name, handler in handlers.items()}
        self._server.add_registered_method_handlers(service, guarded)

    def _guarded(self, service: str, name: str, handler: Any) -> Any:
        asked, answered = (
            "stream" if is_stream else "unary" for is_stream in (handler.request_streaming, handler.response_streaming)
        )
        kind = f"{asked}_{answered}"
        answer = getattr(handler, kind)
        needs = OF_OTHERS[service] if service in OF_OTHERS else declared_needs(answer)
        wrap = self._streaming if inspect.isasyncgenfunction(answer) else self._answering
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        wrapped = wrap(answer, needs, f"{service.rpartition('.')[2]}.{name}")
        return make(wrapped, handler.request_deserializer, handler.response_serializer)

    def _answering(self, answer: Callable[..., Any], needs: Needs, method: str) -> Callable[..., Any]:
        kind: Any = getattr(answer, "__annotations__", {}).get("return")
        has_failure = hasattr(kind, "DESCRIPTOR") and "failure" in kind.DESCRIPTOR.fields_by_name

        async def guarded(request: Any, context: Context) -> Any:
            principal = await self._admit(context, needs)
            acting.set(Acting(_asked_by(context, principal), method))
            try:
                return await answer(request, context)
            except PenstockError as error:
                log.warning(
                    "not_done", method=method, code=error.code, error=error.message
                )  # in full: callers hear less
                if not has_failure:
                    await refuse(context, error)
                return kind(failure=encode_failure(error))

        return guarded

    def _streaming(self, answer: Callable[..., Any], needs: Needs, method: str) -> Callable[..., Any]:
        """What roles of the cluster say for as long as they live is nobody's act."""

        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            watching.set(await self._admit(context, needs))
            try:
                async for answered in answer(request, context):
                    if Scope.JOIN not in needs:  # parts of the cluster stay what they are until they call again
                        await self._admit(context, needs)
                    yield answered
            except PenstockError as error:
                await refuse(context, error)

        return guarded

    async def _admit(self, context: Context, needs: Needs) -> Principal:
        """A key that was passed on counts in place of what the channel shows, also on the machine's own socket."""
        metadata = context.invocation_metadata() or ()
        passed_on = tuple(bytes(value).decode("latin-1") for name, value in metadata if name == CALLERS_KEY)
        if context.peer().startswith(UNIX) and not passed_on:
            return OPERATOR
        certificate = names_of_call(context.auth_context()) if self._guard.reads_certificates else ()
        shown = Shown(passed_on) if passed_on else Shown.of_metadata(metadata, certificate)
        try:
            return self._guard.admit(shown, needs, time.time())
        except PenstockError as error:
            await refuse(context, error)


def _asked_by(context: Context, principal: Principal) -> Principal:
    """Whom a gateway has admitted, where one asks: nobody but a part of the cluster may say for whom it acts."""
    for name, value in context.invocation_metadata() or ():
        if name == ASKED_BY and isinstance(value, bytes) and Scope.JOIN in principal.scopes:
            return Principal(value.decode(errors="replace")[:NAME_CHARS], scopes=principal.scopes)
    return principal


async def refuse(context: Context, error: PenstockError) -> Never:
    code = CODES.get(type(error), grpc.StatusCode.UNAVAILABLE)
    metadata = (("penstock-code", error.code), ("penstock-leader", error.fields.get("leader", "")))
    await context.abort(code, error.message, metadata)
    raise AssertionError("abort raises")
