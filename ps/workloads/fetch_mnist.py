"""Fetch raw MNIST files into a folder with torchvision: fetch_mnist FOLDER MIRROR NAME...

A program of its own, run by ps.workloads.mnist, which verifies what it leaves.
"""

from __future__ import annotations

import socket
import sys
from urllib.parse import urlsplit
from urllib.request import getproxies

REACH_BOUND_S = 5.0


def main(folder: str, mirror: str, *names: str) -> None:
    try:
        _reach(mirror)
        from torchvision.datasets.utils import download_and_extract_archive

        for name in names:
            url = f"{mirror.rstrip('/')}/{name}.gz"
            download_and_extract_archive(url, download_root=folder, remove_finished=True)
    except (OSError, EOFError, RuntimeError) as error:
        sys.exit(f"{mirror}: {error}")


def _reach(mirror: str) -> None:
    """Find out that there is no network before seconds go into loading torchvision."""
    url = urlsplit(mirror)
    if url.hostname and not getproxies():
        port = url.port or {"https": 443, "http": 80}.get(url.scheme, 443)
        socket.create_connection((url.hostname, port), timeout=REACH_BOUND_S).close()


if __name__ == "__main__":
    main(*sys.argv[1:])
