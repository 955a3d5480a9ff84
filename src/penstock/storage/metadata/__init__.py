"""Where a cluster's desired state is kept: in SQLite for one manager, in etcd for several."""
