"""Registered policies: their records in the cluster, their commands, and the processes in which policies run."""
