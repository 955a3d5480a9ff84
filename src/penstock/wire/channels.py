"""Connections with managers: how large their messages may be, and how either end notices that the other is gone."""

# Everything of a large cluster is one message; of an end that is cut off, only an unanswered ping tells.
_BOTH = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
)
MANAGER_CHANNEL = (
    *_BOTH,
    ("grpc.initial_reconnect_backoff_ms", 100),  # one that was not there just now may be there at once
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 2000),  # what an attempt to connect gets
)
MANAGER_SERVER = (
    *_BOTH,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
)
