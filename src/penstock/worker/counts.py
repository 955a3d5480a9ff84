"""What a block counts while it runs, tallied until it is time to add it to the shared metrics."""

from penstock.core.blocks import BlockDescription
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.tally import Tallies
from penstock.worker.batcher import Batch, Closed


class BlockCounts:
    """The worker's metrics with this block's labels bound once."""

    def __init__(self, metrics: WorkerMetrics, block: BlockDescription) -> None:
        labels = (block.model, block.version)
        self._all, self._labels = metrics, labels
        self.tallies = tallies = Tallies()
        self.queue_seconds = tallies.histogram(metrics.queue_seconds.labels(*labels))
        self.cancelled = tallies.counter(metrics.cancelled.labels(*labels))
        self._batch_seconds = tallies.histogram(metrics.batch_seconds.labels(*labels))
        self._compute_seconds = tallies.histogram(metrics.compute_seconds.labels(*labels))
        self._rows = tallies.histogram(metrics.batch_rows.labels(*labels))
        self._real = tallies.counter(metrics.tokens.labels(*labels, "real"))
        self._padded = tallies.counter(metrics.tokens.labels(*labels, "padded"))
        self._closed = {closed: tallies.counter(metrics.batches.labels(*labels, closed)) for closed in Closed}

    def failure(self, code: str) -> None:
        self._all.failures.labels(*self._labels, code).inc()

    def batch(self, batch: Batch, batch_s: float, compute_s: float) -> None:
        self._batch_seconds.observe(batch_s)
        self._compute_seconds.observe(compute_s)
        self._rows.observe(batch.rows)
        self._closed[batch.closed].inc()
        self._real.inc(sum(entry.rows * entry.length for entry in batch.entries))
        self._padded.inc(batch.padded_tokens)
