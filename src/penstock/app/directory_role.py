"""The directory role: the directory's REST endpoint, with its own keys, and the removal of expired records."""

from contextlib import AsyncExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from penstock.app.ports import open_default_port, open_unshared_socket
from penstock.app.role_process import RoleRun, RoleStart, run_role, start_role_logs, tune_garbage_collection
from penstock.core.cluster.addresses import Address
from penstock.core.cluster.manager_records import ManagerRecord
from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.storage.process_addresses import choose_http_scheme
from penstock.storage.server_folders import lock_data_folder
from penstock.telemetry.background import BackgroundTasks
from penstock.telemetry.metrics import share_metrics

if TYPE_CHECKING:
    from fastapi import FastAPI

    from penstock.endpoints.guard import Guard
    from penstock.endpoints.http.openapi import Admit
    from penstock.features.directory.directory import Directory
    from penstock.features.directory.directory_store import DirectoryStore
    from penstock.wire.credentials.certificates import Certificates

log = structlog.get_logger()
DEFAULT_PORT = 7450
EXPIRE_S = 5.0  # between two removals of records whose lease has ended
MAX_CONNECTIONS = 1024


def run_directory(start: RoleStart) -> None:
    assert start.config is not None
    start.config.check_reach()
    if start.config.cluster.join:
        raise ConfigError("a directory has its own keys and storage: remove cluster.join")
    start_role_logs("directory", start, start.config)
    with lock_data_folder(start.config.data_dir):
        run_role("directory", start, _run)


async def _run(run: RoleRun) -> None:
    from penstock.app.health_listeners import DIRECTORY_PORTS, open_health_listeners
    from penstock.app.manager_role import open_manager
    from penstock.app.role_certificates import open_certificates
    from penstock.features.directory.directory import Directory

    config = run.config
    run.paths.write_config(config, only={"data_dir"})  # commands on this machine find the server by this file
    share_metrics(run.paths.metrics, run.name)
    async with AsyncExitStack() as stack:
        certificates = open_certificates(config, stack)
        # As in a cluster, a manager manages the keys. This manager has neither models nor workers.
        me = ManagerRecord(manager_id=run.name, address=run.paths.manager)
        opened = await open_manager(config, stack, me, certificates, run.paths.manager, is_fresh=True, has_models=False)
        await open_health_listeners(
            config,
            run.paths,
            DIRECTORY_PORTS,
            opened.problem,
            certificates,
            stack,
            opened.cluster_metrics,
            opened.health,
            opened.guard,
        )
        store = await open_directory_store(config)
        stack.push_async_callback(store.close)
        directory = Directory(store)
        tasks = BackgroundTasks("directory")
        tasks.supervise("directory-leases", directory.remove_expired, every=EXPIRE_S)
        stack.push_async_callback(tasks.close)
        http = await _open_http(config, directory, opened.guard, certificates, stack)
        log.info(
            "directory_started",
            http=f"{choose_http_scheme(config)}://{http}",
            store=config.directory.store.partition(":")[0],
        )
        tune_garbage_collection()
        await run.stop.wait()


async def open_directory_store(config: Config) -> "DirectoryStore":
    """Open the directory's configured store; raise ConfigError if the store's URL is not supported."""
    url = config.directory.store
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "sqlite" and rest.startswith("/") and Path(rest[1:]).name:
        from penstock.features.directory.sqlite_directory import SqliteDirectory

        return await SqliteDirectory.open(config.data_dir / rest[1:])
    if separator and scheme in ("mongodb", "mongodb+srv"):
        from penstock.features.directory.mongo_directory import MongoDirectory

        return await MongoDirectory.open(url)
    # Not the whole URL, which may contain a password.
    raise ConfigError(
        f"directory.store: this URL ('{scheme[:20]}') is not supported; give sqlite:///file or mongodb://host:port/name"
    )


async def _open_http(
    config: Config, directory: "Directory", guard: "Guard", certificates: "Certificates", stack: AsyncExitStack
) -> Address:
    from penstock.endpoints.http.http_guard import HttpGuard, list_machine_names
    from penstock.endpoints.http.http_server import serve_app
    from penstock.features.admin.apps import ManagerApp

    listen = partial(open_unshared_socket, config.host, "directory.http_port")
    opened = await open_default_port(listen, config.directory.http_port, DEFAULT_PORT)
    app = ManagerApp(HttpGuard(config, guard, list_machine_names()), partial(_build_app, directory))
    stack.push_async_callback(serve_app(app, opened, config.limits, MAX_CONNECTIONS, certificates))
    return Address(config.host, opened.getsockname()[1])


def _build_app(directory: "Directory", admit: "Admit") -> "FastAPI":
    from penstock.core.config import SERVER_NAME
    from penstock.endpoints.guard import get_declared_needs
    from penstock.endpoints.http import schemas
    from penstock.endpoints.http.api_reference import create_reference_routes
    from penstock.endpoints.http.openapi import build_openapi_document, create_router, list_models
    from penstock.endpoints.http.refusals import create_routed_app
    from penstock.features.directory.directory_rest import DirectoryRest

    app = create_routed_app(f"{SERVER_NAME} directory", version("penstock-serve"), "the directory has none")

    async def reference() -> dict[str, object]:
        return build_openapi_document(app, list_models(schemas))

    for router in (
        create_router(DirectoryRest(directory), "Directory", admit),
        create_reference_routes(reference, admit),
    ):
        for route in router.routes:
            get_declared_needs(getattr(route, "endpoint", route))  # raises if a route declares no permission
        app.include_router(router)
    return app
