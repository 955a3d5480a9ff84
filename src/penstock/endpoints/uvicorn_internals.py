"""The only imports of uvicorn's protocol classes, which are not part of uvicorn's public interface.

tests/unit/endpoints/http/test_library_internals.py fails if a new version changes the parts that the endpoints use.
"""

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

__all__ = ["STATUS_LINE", "HttpToolsProtocol", "WebSocketsSansIOProtocol"]
