"""Discover at a gateway: the request that it forwards to the manager, and the caller that it names."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.core.blocks import BlockDescription
from penstock.core.cluster.routes import BlockShare, NameRoute
from penstock.core.errors import Forbidden, Overloaded, PenstockError, Unavailable, UnknownModel
from penstock.core.principals import ANYBODY, KeyLimits, Principal, Scope
from penstock.core.settings import BlockSettings, Sessions
from penstock.features.direct import direct_grpc as direct
from penstock.features.direct.direct_grpc import DirectGrpc
from penstock.pb.v1 import access_pb2 as pb
from penstock.serving.resolve import Resolver

BLOCK = BlockDescription("blk-1", "m", "1", "", "", (), (), 8, 1, BlockSettings())
ORDERED = replace(BLOCK, block_id="blk-2", model="o", settings=BlockSettings(sessions=Sessions(order=True)))
KEY = Principal("shop", "key-1", frozenset((Scope.INFERENCE,)), ("m*",), (), KeyLimits(rows_per_s=3.0), 99.0)


class Blocks:
    def __init__(self) -> None:
        self.routes: dict[str, NameRoute] = {}

    def resolve(self, model: str, version: str, principal: Principal) -> BlockDescription:
        found = {("m", ""): BLOCK, ("m", "1"): BLOCK, ("blk-1", ""): BLOCK, ("o", ""): ORDERED}.get((model, version))
        if found is None:
            raise UnknownModel(model)
        return found

    def find_split(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(route=self.routes[name]) if name in self.routes else None


class Asked:
    def __init__(self) -> None:
        self.blocks, self.passed_on = Blocks(), pb.DiscoverRequest()
        self.edge = DirectGrpc(cast(Resolver, self.blocks), self.manager, "here")

    async def manager(self, request: pb.DiscoverRequest) -> pb.DiscoverResponse:
        self.passed_on = request
        return pb.DiscoverResponse(address="there")

    async def ask(self, principal: Principal = ANYBODY, **asked: Any) -> pb.DiscoverRequest:
        answer = await self.edge.Discover(pb.DiscoverRequest(**asked), principal)
        assert answer.address == "there"
        return self.passed_on

    async def refused(self, **asked: Any) -> PenstockError:
        with pytest.raises(PenstockError) as raised:
            await self.ask(**asked)
        return raised.value


async def test_the_block_and_the_caller_are_forwarded() -> None:
    found = await Asked().ask(KEY, model="m", version="1", avoid=["w"], zone="z", session_id="s")
    assert (found.block_id, found.model, found.version, found.host, found.zone) == ("blk-1", "", "", "here", "z")
    assert (list(found.avoid), found.session_id, found.is_ordered) == (["w"], "s", False)
    told = found.caller
    assert (told.name, told.key_id, list(told.models), told.expires_at) == ("shop", "key-1", ["m*"], 99.0)
    assert told.limits.rows_per_s == 3.0
    anybody = (await Asked().ask(block_id="blk-1", host="mine")).caller
    assert (anybody.key_id, anybody.expires_at, anybody.HasField("limits")) == ("", 0.0, False)


async def test_a_session_of_an_ordered_block_has_an_order() -> None:
    assert (await Asked().ask(model="o", session_id="s")).is_ordered
    assert not (await Asked().ask(model="o")).is_ordered
    assert (await Asked().ask(model="m", session_id="s", is_ordered=True)).is_ordered


async def test_a_split_name_is_not_served_directly() -> None:
    asked = Asked()
    asked.blocks.routes["m"] = NameRoute("m", (BlockShare("blk-1", 1.0), BlockShare("blk-2", 1.0)))
    assert type(await asked.refused(model="m")) is Unavailable
    assert (await asked.ask(block_id="blk-1")).block_id == "blk-1"
    asked.blocks.routes["m"] = NameRoute("m", (BlockShare("blk-1", 1.0),))
    assert (await asked.ask(model="m")).block_id == "blk-1"


async def test_a_caller_field_and_too_many_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(await Asked().refused(model="m", caller=pb.DirectCaller(name="x"))) is Forbidden
    assert type(await Asked().refused(model="absent")) is UnknownModel
    monkeypatch.setattr(direct, "MAX_ASKING", 0)
    assert type(await Asked().refused(model="m")) is Overloaded
