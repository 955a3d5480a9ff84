"""Blocks, workers, keys and rollouts over REST: each route is one call of the manager."""

from collections.abc import Iterable
from dataclasses import replace

import orjson
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import UnknownModel
from penstock.core.principals import CHANGING, MEASURING
from penstock.gateway.http.cluster import schemas
from penstock.gateway.http.cluster.answers import PAGING, documented, expected, page, resource, told
from penstock.gateway.http.cluster.bodies import body_of
from penstock.gateway.http.cluster.calls import ClusterCalls
from penstock.gateway.http.openapi import Route, json_answer, principal_of
from penstock.pb.v1 import access_pb2, cluster_pb2

ROOT = "/v1/admin"
BLOCKS, BLOCK = ROOT + "/blocks", ROOT + "/blocks/{block_id}"
WORKERS, WORKER = ROOT + "/workers", ROOT + "/workers/{worker_id}"
KEYS, KEY = ROOT + "/keys", ROOT + "/keys/{key}"
ROLLOUTS, ROLLOUT = ROOT + "/rollouts", ROOT + "/rollouts/{name}"
START_S = 60.0  # what a rollout may take to begin, or to be changed
UNLOAD_S = 60.0
TEXT = {"type": "string", "description": "The key itself, told this once"}


class BlocksRest:
    def __init__(self, calls: ClusterCalls) -> None:
        self._calls = calls

    @Route(
        "GET",
        BLOCKS,
        "What is deployed",
        needs=MEASURING,
        binary_answer=documented("BlockStatus", is_list=True),
        query={"model": "of this model alone", **PAGING},
    )
    async def all(self, request: Request) -> Response:
        asked = cluster_pb2.ListBlocksRequest(model=request.query_params.get("model", ""))
        found = await self._calls.ask(request, "Cluster.ListBlocks", asked)
        return page(request, map(told, seen_blocks(request, found.blocks)), lambda block: block["block_id"])

    @Route(
        "POST",
        BLOCKS,
        "Deploy a model, or anew",
        "Answers with the blocks that it is now; with `wait_s` once the workers have them.",
        needs=CHANGING,
        body=schemas.DeployBody,
        binary_answer=documented("DeployBlockResponse"),
        status=201,
    )
    async def deploy(self, request: Request) -> Response:
        body = await body_of(request, schemas.DeployBody)
        await check_change(self._calls, request, body.model)
        fields = body.model_dump(exclude={"is_beside", "wait_s", "metadata"}, exclude_unset=True)
        metadata = orjson.dumps(body.metadata).decode() if body.metadata else ""
        asked = cluster_pb2.DeployBlockRequest(
            spec=cluster_pb2.BlockSpec(**fields, metadata=metadata), is_beside=body.is_beside, wait_s=body.wait_s
        )
        made = await self._calls.ask(request, "Cluster.DeployBlock", asked, body.wait_s)
        return json_answer(told(made), 201, {"location": f"{BLOCKS}/{made.block_ids[-1]}"})

    @Route("GET", BLOCK, "One block, and who holds it", needs=MEASURING, binary_answer=documented("BlockStatus"))
    async def find(self, request: Request) -> Response:
        return resource(await self._find(request), request)

    @Route(
        "PATCH",
        BLOCK,
        "Scale a block, or change what else is asked for of it",
        "Nothing is loaded anew.",
        needs=CHANGING,
        body=schemas.BlockPatch,
        binary_answer=documented("BlockStatus"),
    )
    async def change(self, request: Request) -> Response:
        body = await body_of(request, schemas.BlockPatch)
        await self._check(request)
        changes = body.model_dump_json(exclude_unset=True)
        asked = cluster_pb2.ChangeBlockRequest(block_id=_id(request), changes=changes, expected=expected(request))
        return resource((await self._calls.ask(request, "Cluster.ChangeBlock", asked)).block, request)

    @Route("DELETE", BLOCK, "Remove a block; the last of a model is unloaded", needs=CHANGING, status=204)
    async def remove(self, request: Request) -> Response:
        await self._check(request)
        asked = cluster_pb2.RemoveBlockRequest(block_id=_id(request), expected=expected(request))
        await self._calls.ask(request, "Cluster.RemoveBlock", asked, UNLOAD_S)
        return Response(status_code=204)

    @Route(
        "GET",
        BLOCK + "/explanation",
        "Why it is on these workers",
        needs=MEASURING,
        binary_answer=documented("ExplainBlockResponse"),
    )
    async def explain(self, request: Request) -> Response:
        await self._check(request)
        asked = cluster_pb2.ExplainBlockRequest(block_id=_id(request))
        return json_answer(told(await self._calls.ask(request, "Cluster.ExplainBlock", asked)))

    async def _find(self, request: Request) -> cluster_pb2.BlockStatus:
        asked = cluster_pb2.ListBlocksRequest(block_id=_id(request))
        found = seen_blocks(request, (await self._calls.ask(request, "Cluster.ListBlocks", asked)).blocks)
        if not found:
            raise UnknownModel(f"there is no block '{_id(request)}'; 'penstock block list' shows them")
        return found[0]

    async def _check(self, request: Request) -> None:
        """Raises where it is a block that the caller's key may not ask."""
        if principal_of(request).is_bound:
            await self._find(request)


class WorkersRest:
    def __init__(self, calls: ClusterCalls) -> None:
        self._calls = calls

    @Route(
        "GET",
        WORKERS,
        "The workers",
        needs=MEASURING,
        binary_answer=documented("WorkerStatus", is_list=True),
        query={"state": "those that are alive, suspect or offline", **PAGING},
    )
    async def all(self, request: Request) -> Response:
        found = await self._calls.ask(request, "Cluster.ListWorkers", cluster_pb2.ListWorkersRequest())
        state = request.query_params.get("state", "")
        shown = [told(worker) for worker in found.workers if state in ("", worker.state)]
        return page(request, shown, lambda worker: worker["worker_id"])

    @Route("GET", WORKER, "One worker, and what it holds", needs=MEASURING, binary_answer=documented("WorkerStatus"))
    async def find(self, request: Request) -> Response:
        asked = cluster_pb2.ListWorkersRequest(worker_id=_id(request))
        return resource((await self._calls.ask(request, "Cluster.ListWorkers", asked)).workers[0], request)

    @Route(
        "PATCH",
        WORKER,
        "Drain a worker or open it again; lay labels over its own",
        needs=CHANGING,
        body=schemas.WorkerPatch,
        binary_answer=documented("WorkerStatus"),
    )
    async def change(self, request: Request) -> Response:
        body = await body_of(request, schemas.WorkerPatch)
        return await self._change(request, body)

    @Route(
        "POST",
        WORKER + "/drain",
        "It gets no more blocks, and those that it has go elsewhere",
        needs=CHANGING,
        binary_answer=documented("WorkerStatus"),
    )
    async def drain(self, request: Request) -> Response:
        return await self._change(request, schemas.WorkerPatch(is_draining=True))

    @Route(
        "POST",
        WORKER + "/undrain",
        "It may get blocks again",
        needs=CHANGING,
        binary_answer=documented("WorkerStatus"),
    )
    async def undrain(self, request: Request) -> Response:
        return await self._change(request, schemas.WorkerPatch(is_draining=False))

    @Route("DELETE", WORKER, "Remove a worker; a new process of its name may join", needs=CHANGING, status=204)
    async def remove(self, request: Request) -> Response:
        asked = cluster_pb2.RemoveWorkerRequest(worker_id=_id(request), expected=expected(request))
        await self._calls.ask(request, "Cluster.RemoveWorker", asked)
        return Response(status_code=204)

    async def _change(self, request: Request, patch: schemas.WorkerPatch) -> Response:
        changes = patch.model_dump_json(exclude_unset=True)
        asked = cluster_pb2.ChangeWorkerRequest(worker_id=_id(request), changes=changes, expected=expected(request))
        return resource((await self._calls.ask(request, "Cluster.ChangeWorker", asked)).worker, request)


class KeysRest:
    def __init__(self, calls: ClusterCalls) -> None:
        self._calls = calls

    @Route(
        "GET",
        KEYS,
        "The keys, never their texts",
        needs=CHANGING,
        binary_answer=documented("KeyStatus", is_list=True),
        query={"state": "those that are valid, expired or revoked", **PAGING},
    )
    async def all(self, request: Request) -> Response:
        found = await self._calls.ask(request, "Access.ListKeys", access_pb2.ListKeysRequest())
        state = request.query_params.get("state", "")
        shown = [told(key) for key in found.keys if state in ("", key.state)]
        return page(request, shown, lambda key: key["spec"]["name"])

    @Route(
        "POST",
        KEYS,
        "Make a key; its text is told this once",
        needs=CHANGING,
        body=schemas.KeyBody,
        binary_answer=documented("KeyStatus", text=TEXT),
        status=201,
    )
    async def create(self, request: Request) -> Response:
        body = await body_of(request, schemas.KeyBody)
        limits = access_pb2.LimitsOfKey(**body.limits.model_dump()) if body.limits is not None else None
        fields = body.model_dump(exclude={"limits", "expires_at"})
        spec = access_pb2.KeySpec(**fields, expires_at=body.expires_at or 0.0, limits=limits)
        made = await self._calls.ask(request, "Access.CreateKey", access_pb2.CreateKeyRequest(spec=spec))
        return _secret(resource(made.key, request, 201, text=made.text), f"{KEYS}/{made.key.key_id}")

    @Route("GET", KEY, "One key, by its id or its name", needs=CHANGING, binary_answer=documented("KeyStatus"))
    async def find(self, request: Request) -> Response:
        asked = access_pb2.GetKeyRequest(key=_id(request))
        return resource((await self._calls.ask(request, "Access.GetKey", asked)).key, request)

    @Route(
        "PATCH",
        KEY,
        "Change what a key may do; its text stays",
        needs=CHANGING,
        body=schemas.KeyPatch,
        binary_answer=documented("KeyStatus"),
    )
    async def change(self, request: Request) -> Response:
        body = await body_of(request, schemas.KeyPatch)
        changes = body.model_dump_json(exclude_unset=True)
        asked = access_pb2.ChangeKeyRequest(key=_id(request), changes=changes, expected=expected(request))
        return resource((await self._calls.ask(request, "Access.ChangeKey", asked)).key, request)

    @Route("DELETE", KEY, "Revoke a key, at once and everywhere; it stays in the list", needs=CHANGING, status=204)
    async def delete(self, request: Request) -> Response:
        await self._revoke(request)
        return Response(status_code=204)

    @Route(
        "POST",
        KEY + "/revoke",
        "The same, and tell how it stands",
        needs=CHANGING,
        binary_answer=documented("KeyStatus"),
    )
    async def revoke(self, request: Request) -> Response:
        return resource(await self._revoke(request), request)

    @Route(
        "POST",
        KEY + "/rotate",
        "Give a key a new text; the old one may go on for a while",
        needs=CHANGING,
        body=schemas.RotateBody,
        is_body_required=False,
        binary_answer=documented("KeyStatus", text=TEXT),
    )
    async def rotate(self, request: Request) -> Response:
        body = await body_of(request, schemas.RotateBody)
        asked = access_pb2.RotateKeyRequest(key=_id(request), grace_s=body.grace_s, expected=expected(request))
        made = await self._calls.ask(request, "Access.RotateKey", asked)
        return _secret(resource(made.key, request, text=made.text))

    async def _revoke(self, request: Request) -> access_pb2.KeyStatus:
        asked = access_pb2.RevokeKeyRequest(key=_id(request), expected=expected(request))
        revoked: access_pb2.KeyStatus = (await self._calls.ask(request, "Access.RevokeKey", asked)).key
        return revoked


class RolloutsRest:
    def __init__(self, calls: ClusterCalls) -> None:
        self._calls = calls

    @Route(
        "GET",
        ROLLOUTS,
        "The rollouts, also those that are over",
        needs=MEASURING,
        binary_answer=documented("RolloutStatus", is_list=True),
        query=PAGING,
    )
    async def all(self, request: Request) -> Response:
        found = await self._calls.ask(request, "Rollouts.ListRollouts", cluster_pb2.ListRolloutsRequest())
        return page(request, map(told, found.rollouts), lambda rollout: rollout["name"])

    @Route(
        "POST",
        ROLLOUTS,
        "Move a name to another block, in steps",
        needs=CHANGING,
        body=schemas.RolloutBody,
        binary_answer=documented("RolloutStatus"),
        status=201,
    )
    async def start(self, request: Request) -> Response:
        plan = (await body_of(request, schemas.RolloutBody)).model_dump_json()
        asked = cluster_pb2.StartRolloutRequest(plan=plan)
        started = (await self._calls.ask(request, "Rollouts.StartRollout", asked, START_S)).rollout
        answer = resource(started, request, 201)
        answer.headers["location"] = f"{ROLLOUTS}/{started.name}"
        return answer

    @Route("GET", ROLLOUT, "One rollout", needs=MEASURING, binary_answer=documented("RolloutStatus"))
    async def find(self, request: Request) -> Response:
        asked = cluster_pb2.ListRolloutsRequest(name=_id(request))
        return resource((await self._calls.ask(request, "Rollouts.ListRollouts", asked)).rollouts[0], request)

    @Route("POST", ROLLOUT + "/pause", "Stay at this step", needs=CHANGING, binary_answer=documented("RolloutStatus"))
    async def pause(self, request: Request) -> Response:
        return await self._change(request, "PauseRollout")

    @Route("POST", ROLLOUT + "/resume", "Go on", needs=CHANGING, binary_answer=documented("RolloutStatus"))
    async def resume(self, request: Request) -> Response:
        return await self._change(request, "ResumeRollout")

    @Route(
        "POST",
        ROLLOUT + "/undo",
        "All to the old block again",
        needs=CHANGING,
        binary_answer=documented("RolloutStatus"),
    )
    async def undo(self, request: Request) -> Response:
        return await self._change(request, "UndoRollout")

    @Route(
        "DELETE",
        ROLLOUT,
        "Forget a rollout that is over",
        needs=CHANGING,
        status=204,
    )
    async def forget(self, request: Request) -> Response:
        asked = cluster_pb2.ChangeRolloutRequest(name=_id(request), expected=expected(request))
        await self._calls.ask(request, "Rollouts.ForgetRollout", asked, START_S)
        return Response(status_code=204)

    async def _change(self, request: Request, method: str) -> Response:
        asked = cluster_pb2.ChangeRolloutRequest(name=_id(request), expected=expected(request))
        return resource((await self._calls.ask(request, f"Rollouts.{method}", asked, START_S)).rollout, request)


def seen_blocks(request: Request, blocks: Iterable[cluster_pb2.BlockStatus]) -> list[cluster_pb2.BlockStatus]:
    """What a key may not ask is to it as if it were not there."""
    principal = principal_of(request)
    return [block for block in blocks if principal.may_ask(block.spec.model, block.block_id)]


def check_model(request: Request, model: str) -> None:
    principal = principal_of(request)
    if principal.models and not replace(principal, blocks=()).may_ask(model, ""):
        raise no_model(model)


async def check_change(calls: ClusterCalls, request: Request, model: str) -> None:
    """What is done to a model is done to all its blocks."""
    check_model(request, model)
    principal = principal_of(request)
    if not principal.blocks:
        return
    deployed = await calls.ask(request, "Cluster.ListBlocks", cluster_pb2.ListBlocksRequest(model=model))
    block_ids = [block.block_id for block in deployed.blocks if block.spec.model == model]
    if not all(principal.may_ask(model, block_id) for block_id in block_ids or [""]):
        raise no_model(model)


def no_model(model: str) -> UnknownModel:
    return UnknownModel(f"there is no model '{model[:128]}': it is neither deployed nor in the registry")


def _id(request: Request) -> str:
    """The only name in the path of a resource."""
    (found,) = request.path_params.values()
    return str(found)


def _secret(answer: Response, location: str = "") -> Response:
    answer.headers["cache-control"] = "no-store"
    if location:
        answer.headers["location"] = location
    return answer
