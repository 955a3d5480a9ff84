"""What the registry's objects are called: files and manifests by their SHA-256, so that equal ones are kept once."""


def blob_key(sha256: str) -> str:
    return f"blobs/{sha256[:2]}/{sha256}"


def manifest_key(digest: str) -> str:
    return f"manifests/{digest}"
