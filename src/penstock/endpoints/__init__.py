"""The framework of HTTP and gRPC endpoints: servers, guard, limits on connections, statuses."""
