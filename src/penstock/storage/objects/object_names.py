"""Keys of the registry's objects. They contain the SHA-256 of the content, so that equal files are stored once."""


def make_blob_key(sha256: str) -> str:
    return f"blobs/{sha256[:2]}/{sha256}"


def make_manifest_key(digest: str) -> str:
    return f"manifests/{digest}"
