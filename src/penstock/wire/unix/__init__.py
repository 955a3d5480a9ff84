"""Sends job messages over unix sockets within one machine. README.md explains why, and how to turn this off."""
