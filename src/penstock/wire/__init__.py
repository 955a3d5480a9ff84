"""Messages and sockets between gateways, workers and managers. Only this package uses ZeroMQ."""
