"""The metadata store of a cluster's desired state: SQLite for one manager, etcd for several."""
