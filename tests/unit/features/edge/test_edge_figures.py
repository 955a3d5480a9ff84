"""Envoy's figures, summed for our metrics."""

from penstock.features.edge.edge_figures import REFUSED, grown, summed


def test_refusals_are_summed_by_reason() -> None:
    stats = {
        "listener.0.0.0.0_8080.downstream_global_cx_overflow": 2.0,
        "listener.0.0.0.0_50051.downstream_global_cx_overflow": 1.0,
        "listener.0.0.0.0_8080.ssl.connection_error": 4.0,
        "envoy.overload_actions.reset_high_memory_stream.count": 5.0,
        "http.edge.downstream_rq_header_timeout": 6.0,
        "wasmcustom.connections_of_address_refused": 7.0,
        "http.admin.downstream_rq_header_timeout": 100.0,
    }
    found = {reason: count for reason, count in summed(stats, REFUSED).items() if count}
    assert found == {"connections": 3.0, "address": 7.0, "tls": 4.0, "memory": 5.0, "headers": 6.0}


def test_counters_continue_after_a_restart_of_envoy() -> None:
    assert grown({"requests": 10.0}, {"requests": 12.0}) == {"requests": 2.0}
    assert grown({"requests": 10.0}, {"requests": 3.0}) == {"requests": 3.0}
