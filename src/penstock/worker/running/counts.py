"""Counts a running block's work, in its statistics and in metrics."""

import time

from penstock.core.blocks import BlockDescription
from penstock.core.errors import PenstockError
from penstock.core.statistics import BatchStatistics, BlockStatistics
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.tally import Tallies
from penstock.worker.running.batcher import CloseReason
from penstock.worker.running.instances import BatchOutcome
from penstock.worker.worker_job import WorkerJob


class BlockCounts:
    """Counts one block's work in its statistics and in metrics; `flush` adds the metrics to the worker's."""

    def __init__(self, metrics: WorkerMetrics, block: BlockDescription) -> None:
        self.statistics = BlockStatistics(block.block_id, block.model, block.version)
        labels = (block.model, block.version)
        self._all, self._labels = metrics, labels
        self._tallies = tallies = Tallies()
        self._queue_seconds = tallies.add_histogram(metrics.queue_seconds.labels(*labels))
        self.cancelled = tallies.add_counter(metrics.cancelled.labels(*labels))
        self._batch_seconds = tallies.add_histogram(metrics.batch_seconds.labels(*labels))
        self._compute_seconds = tallies.add_histogram(metrics.compute_seconds.labels(*labels))
        self._rows = tallies.add_histogram(metrics.batch_rows.labels(*labels))
        self._real = tallies.add_counter(metrics.tokens.labels(*labels, "real"))
        self._padded = tallies.add_counter(metrics.tokens.labels(*labels, "padded"))
        self._closed = {closed: tallies.add_counter(metrics.batches.labels(*labels, closed)) for closed in CloseReason}

    def flush(self) -> None:
        self._tallies.flush()

    def count_failure(self, job: WorkerJob, error: PenstockError, now: float) -> None:
        self.statistics.fail.add(int((now - job.arrived) * 1e9))
        self._all.failures.labels(*self._labels, error.code).inc()

    def count_success(self, job: WorkerJob, now: float) -> None:
        statistics, timing = self.statistics, job.timing
        statistics.success.add(int((now - job.arrived) * 1e9))
        statistics.queue.add(timing.queue_ns)
        # The protocol requires times per request: each job of a batch took the time of the whole batch.
        statistics.compute_input.add(timing.batch_ns)
        statistics.compute_infer.add(timing.compute_ns)
        statistics.compute_output.add(timing.finish_ns)
        self._queue_seconds.observe(timing.queue_ns / 1e9)

    def count_batch(self, outcome: BatchOutcome) -> None:
        batch, statistics = outcome.batch, self.statistics
        statistics.last_inference_ms = int(time.time() * 1000)
        statistics.inference_count += batch.rows
        statistics.execution_count += 1
        statistics.closed[batch.closed] = statistics.closed.get(batch.closed, 0) + 1
        by_rows = statistics.batches.get(batch.rows)
        if by_rows is None:
            by_rows = statistics.batches[batch.rows] = BatchStatistics()
        by_rows.compute_input.add(outcome.input_ns)
        by_rows.compute_infer.add(outcome.infer_ns)
        by_rows.compute_output.add(outcome.output_ns)
        self._batch_seconds.observe(outcome.input_ns / 1e9)
        self._compute_seconds.observe(outcome.infer_ns / 1e9)
        self._rows.observe(batch.rows)
        self._closed[batch.closed].inc()
        self._real.inc(batch.real_tokens)
        self._padded.inc(batch.padded_tokens)
