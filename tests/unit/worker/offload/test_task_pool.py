"""Real task processes: they prepare and finish like the worker itself, and may die."""

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator
from io import BytesIO

import ml_dtypes
import numpy as np
import psutil
import pytest
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from benchmarks.waiting import until
from penstock.core.config import Limits
from penstock.core.errors import ConfigError, InvalidImage, InvalidTensor, RequestTooLarge, Unavailable
from penstock.core.signature import Signature
from penstock.core.tensors import Tensor, TensorSpec, from_array, pack_bytes
from penstock.models.building import TaskSpec
from penstock.models.model_yaml import ModelSettings
from penstock.models.samples.photos import photos
from penstock.tasks.base import TaskRequest
from penstock.worker.offload.task_pool import LEAST_BYTES, TaskPool, TaskProcesses, choose_placement
from penstock.worker.offload.task_process import RemoteContext
from tests.unit.worker.offload.task_calls import (
    NOWHERE,
    UPSCALE,
    check_pieces,
    files,
    images,
    locally,
    opened,
    run,
    same,
)

GRAPH_INPUTS = tuple(TensorSpec(name, "INT64", (-1, -1)) for name in ("input_ids", "attention_mask"))
GRAPH = Signature(GRAPH_INPUTS, (TensorSpec("sentence_embedding", "FP32", (-1, 4)),), "onnx", "fp32")


@pytest.fixture
async def processes() -> AsyncIterator[TaskProcesses]:
    made = TaskProcesses(2)
    yield made
    await made.close()


async def kill_all(processes: TaskProcesses) -> None:
    killed = processes.pids()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    while set(killed) & set(processes.pids()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_images_are_prepared_like_in_the_worker(processes):
    pool, task = await opened(processes, UPSCALE)
    requests = [images(photo) for photo in photos()] + [images(*photos()[:3])]

    async def serve(request: TaskRequest) -> list[Tensor]:
        prepared = await pool.prepare(request)
        assert isinstance(prepared.context, RemoteContext)
        check_pieces(prepared, task.prepare(request))
        return await pool.finish(request, prepared.context, run(task, prepared))

    for request, found in zip(requests, await asyncio.gather(*map(serve, requests)), strict=True):
        assert same(found, locally(task, request))


async def test_texts_are_finished_by_the_worker_itself(processes, tmp_path):
    vocabulary = {"[UNK]": 0, "water": 1, "falls": 2, "onto": 3}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    pool, task = await opened(processes, TaskSpec(tmp_path, ModelSettings(task="embed"), GRAPH, Limits()))
    texts = ["water falls", "", "falls onto zażółć water", *["water " * n for n in range(200)]]
    request = TaskRequest([Tensor("text", "BYTES", (len(texts),), pack_bytes(texts))], [])
    prepared = await pool.prepare(request)
    check_pieces(prepared, task.prepare(request))
    assert not isinstance(prepared.context, RemoteContext)
    results = [[np.full((piece.rows, 4), number, np.float32)] for number, piece in enumerate(prepared.pieces)]
    assert same(task.finish(request, prepared, results), task.finish(request, task.prepare(request), results))


def test_long_requests_of_a_gpu_model_are_prepared_in_task_processes_by_default(processes):
    assert choose_placement("auto", "cpu") == ("inline", 0)
    assert choose_placement("auto", "cuda:1") == ("pool", LEAST_BYTES)
    assert choose_placement("pool", "cpu") == ("pool", 0)
    assert choose_placement("inline", "cuda") == ("inline", 0)
    pool = TaskPool(processes, 1, LEAST_BYTES)
    halves = [TaskRequest([Tensor("text", "BYTES", (1,), bytes(size))] * 2, []) for size in (511, 512)]
    assert [pool.accepts(request) for request in halves] == [False, True]
    assert TaskPool(processes, 1).accepts(TaskRequest([], []))


async def test_tensors_of_every_kind_and_size_are_prepared(processes):
    inputs = (TensorSpec("half", "BF16", (-1, -1)), TensorSpec("texts", "BYTES", (-1,)))
    settings = ModelSettings(is_batched=False)
    pool, task = await opened(
        processes, TaskSpec(NOWHERE, settings, Signature(inputs, inputs, "onnx", "fp32"), Limits())
    )
    keys = set()
    for columns in (1, 20_000_000, 3):
        half = np.full((1, columns), 0.5, ml_dtypes.bfloat16)
        texts = np.array([b"a", b"", b"\xff\x00"], dtype=object)
        request = TaskRequest([from_array("half", half), from_array("texts", texts)], ["texts"], {"mine": 1.5})
        prepared = await pool.prepare(request)
        (piece,) = prepared.pieces
        np.testing.assert_array_equal(piece.arrays["half"], half)
        assert piece.arrays["texts"].tolist() == texts.tolist()
        assert hash(piece.key)
        keys.add(piece.key)
        assert not isinstance(prepared.context, RemoteContext)
        assert same(task.finish(request, prepared, run(task, prepared)), locally(task, request))
    assert len(keys) == 3  # requests_that_must not be joined are still not joined


async def test_errors_of_the_task_are_returned(processes):
    pool, _ = await opened(processes, UPSCALE)
    photo = photos()[0]
    for request, error, words in [
        (images(b"no image"), InvalidImage, "element 0: the data is not a JPEG"),
        (images(*[photo] * 9), RequestTooLarge, "at most 8"),
        (TaskRequest([Tensor("x", "FP32", (1,), bytes(4))], []), InvalidTensor, "'image' BYTES"),
    ]:
        with pytest.raises(error, match=words) as caught:
            await pool.prepare(request)
        assert type(caught.value) is error
    assert (await pool.prepare(images(photo))).pieces


async def test_a_task_that_cannot_be_built_is_reported(processes):
    spec = TaskSpec(NOWHERE, ModelSettings(task="embed"), GRAPH, Limits())
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        await processes.open(spec)
    pool, _ = await opened(processes, UPSCALE)  # the other processes are not affected
    assert (await pool.prepare(images(photos()[0]))).pieces


async def test_blocks_share_the_processes(processes):
    first, task = await opened(processes, UPSCALE)
    pids = set(processes.pids())
    second, _ = await opened(processes, UPSCALE)
    request = images(photos()[1])
    for pool in (first, second):
        prepared = await pool.prepare(request)
        assert same(await pool.finish(request, prepared.context, run(task, prepared)), locally(task, request))
    first.close()
    first.close()
    prepared = await second.prepare(request)
    assert same(await second.finish(request, prepared.context, run(task, prepared)), locally(task, request))
    assert pids <= set(processes.pids())


async def test_requests_kept_by_a_dead_process_are_prepared_again(processes):
    pool, task = await opened(processes, UPSCALE)
    request = images(*photos()[:2])
    prepared = await pool.prepare(request)
    results = run(task, prepared)
    before = set(processes.pids())
    await kill_all(processes)
    assert same(await pool.finish(request, prepared.context, results), locally(task, request))
    assert not before & set(processes.pids())


async def test_requests_in_a_dying_process_are_prepared_elsewhere(processes):
    pool, task = await opened(processes, UPSCALE)
    requests = [images(photo) for photo in photos() * 4]
    preparing = [asyncio.create_task(pool.prepare(request)) for request in requests]
    await asyncio.sleep(0)
    await kill_all(processes)
    for request, prepared in zip(requests, await asyncio.gather(*preparing), strict=True):
        check_pieces(prepared, task.prepare(request))


async def test_a_request_that_kills_processes_is_given_up():
    processes = TaskProcesses(1)
    try:
        pool, _ = await opened(processes, UPSCALE)
        file = BytesIO()
        Image.effect_noise((4000, 3000), 50).save(file, "PNG")  # takes long enough to be killed during the request
        preparing = asyncio.create_task(pool.prepare(images(file.getvalue())))
        for _ in range(3):
            await until(processes.pids, "one has started")
            await asyncio.sleep(0.05)
            await kill_all(processes)
        with pytest.raises(Unavailable, match="processes that prepared the request died") as caught:
            await preparing
        assert caught.value.is_retryable
        assert (await pool.prepare(images(photos()[0]))).pieces
    finally:
        await processes.close()


async def test_a_caller_that_leaves_affects_no_other(processes):
    pool, task = await opened(processes, UPSCALE)
    requests = [images(photo) for photo in photos() * 3]
    tasks = [asyncio.create_task(pool.prepare(request)) for request in requests]
    await asyncio.sleep(0.01)
    for leaving in tasks[::2]:
        leaving.cancel()
    for request, staying in zip(requests[1::2], tasks[1::2], strict=True):
        check_pieces(await staying, task.prepare(request))


async def test_close_ends_the_processes_and_frees_their_files():
    before = files(os.getpid())
    processes = TaskProcesses(2)
    pool, task = await opened(processes, UPSCALE)
    request = images(photos()[0])
    prepared = await pool.prepare(request)
    await pool.finish(request, prepared.context, run(task, prepared))
    pids = processes.pids()
    await processes.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    del prepared, pool, processes
    await until(lambda: gc.collect() >= 0 and files(os.getpid()) <= before)  # ending threads keep some for a moment
