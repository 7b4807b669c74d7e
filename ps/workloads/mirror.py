"""Where the files of MNIST are fetched from: a folder on the web. Loads no torch.

The download runs in a process of its own: torchvision takes seconds and memory to load, and a
download cannot be interrupted from within.
"""

from __future__ import annotations

import socket  # noqa: TID251
import subprocess  # noqa: TID251
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from ps.host.timeouts import call_with_timeout

REACH_TIMEOUT_S = 3.0

_PROGRAM = """
import sys
from torchvision.datasets.utils import download_and_extract_archive
mirror, folder, *names = sys.argv[1:]
try:
    for name in names:
        url = f"{mirror.rstrip('/')}/{name}.gz"
        download_and_extract_archive(url, download_root=folder, remove_finished=True)
except Exception as error:
    sys.exit(f"{url}: {error}")
"""


class MirrorError(Exception):
    """Why fetching failed, in one line."""


class Mirror:
    """A folder on the web that holds the .gz files."""

    def __init__(
        self,
        url: str,
        *,
        connect: Callable[..., Any] = socket.create_connection,
        reach_timeout_s: float = REACH_TIMEOUT_S,
    ) -> None:
        """connect takes what socket.create_connection() takes."""
        self.url = url
        self._connect = connect
        self._reach_timeout_s = reach_timeout_s

    def reach(self) -> None:
        """Connect to it once, or do nothing behind a proxy. Blocks for reach_timeout_s at most.

        Raises:
            MirrorError: it has no address, or does not answer.
        """
        host, port = self._address()
        timeout_s = self._reach_timeout_s
        if getproxies():
            return

        def connect() -> None:
            self._connect((host, port), timeout=timeout_s).close()

        try:
            call_with_timeout(
                timeout_s, connect, "reach"
            )  # a name server may not answer for longer
        except TimeoutError:
            raise MirrorError(f"{host} does not answer within {timeout_s:g} s") from None
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise MirrorError(f"{host}: {reason}") from None

    def download(self, names: Sequence[str], folder: Path, timeout_s: float) -> None:
        """Write these files, unpacked, into the folder. Blocks for timeout_s at most.

        Raises:
            MirrorError: a file is not there, cannot be unpacked, or takes too long.
        """
        try:
            done = subprocess.run(
                [sys.executable, "-c", _PROGRAM, self.url, str(folder), *names],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise MirrorError(f"{self.url}: not done within {timeout_s:g} s") from None
        if done.returncode:
            raise MirrorError((done.stderr.strip().splitlines() or ["no reason given"])[-1])

    def _address(self) -> tuple[str, int]:
        try:
            url = urlsplit(self.url)
            return url.hostname or "", url.port or {"http": 80}.get(url.scheme, 443)
        except ValueError as error:
            raise MirrorError(f"{self.url} is no URL: {error}") from None
