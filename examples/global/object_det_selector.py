"""A search policy: prefers blocks with few waiting requests, and among those the model with the shortest name.

    penstock policy push policies.search.object-det-selector:v0.0.01-stable examples/global/object_det_selector.py
"""


def rank(candidates, context):
    """Return the ids of the candidates, best first.

    A candidate has what `blockQuery` reads, and `instances` with its live metrics. `context` has `settings`,
    `parameters`, `user_query` and `session_id`.
    """

    def busy(block):
        return sum(instance["in_flight"] + instance["waiting"] for instance in block["instances"])

    return [block["id"] for block in sorted(candidates, key=lambda block: (busy(block), len(block["model"])))]
