"""The raw files of MNIST: found, verified and where needed fetched. No torch.

They may be plain or .gz, in DATA_DIR/MNIST/raw or in DATA_DIR itself, and the folder may be
read-only. What is fetched goes to a temporary folder first, is verified and then renamed, so
that a reader finds a whole file or none.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import os
import socket  # noqa: TID251
import subprocess  # noqa: TID251
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from ps.host.files import make_directories, remove_empty
from ps.host.timeouts import call_with_timeout
from ps.settings.errors import ConfigError
from ps.settings.log import log

REACH_BOUND_S = 3.0

# SHA-256 of the uncompressed files.
SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

# Runs in a process of its own: torchvision takes seconds and memory, and cannot be interrupted.
_FETCH_PROGRAM = """
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


class _FetchError(Exception):
    """Why fetching did not work, in one line."""


@functools.cache
def read(data_dir: Path, name: str) -> bytearray:
    """The whole verified file, uncompressed. A process reads each only once: treat as read-only.

    Raises:
        ConfigError: it is missing, or damaged; names the first damaged one.
    """
    faults = []
    for path in _candidates(data_dir, name):
        try:
            return _verified(name, path)
        except ConfigError as error:
            faults.append(error)
    if faults:
        raise faults[0]
    raise ConfigError(f"{name} is not in {_raw_dir(data_dir)}")


def fetch_if_needed(data_dir: Path, mirror: str, *, bound_s: float) -> None:
    """Make sure that every file is there and whole; replace what is not.

    mirror is the URL of a folder that holds the .gz files. Blocks for bound_s at most.

    Raises:
        ConfigError: a file is missing or damaged and cannot be had; it says why.
    """
    faults = {}
    for name in SHA256:
        try:
            read(data_dir, name)
        except ConfigError as error:
            faults[name] = str(error)
    if not faults:
        return
    first = next(iter(faults.values()))
    try:
        _reach(mirror)
        log.info("%s; fetching %s from %s", first, _files(len(faults)), mirror)
        _fetch(list(faults), _raw_dir(data_dir), mirror, bound_s)
    except (OSError, _FetchError) as error:
        raise ConfigError(
            f"{first}, and it cannot be fetched ({error}); put the four files of MNIST there, "
            "or type --workload digits"
        ) from None


def _raw_dir(data_dir: Path) -> Path:
    return data_dir / "MNIST" / "raw"


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _candidates(data_dir: Path, name: str) -> Iterator[Path]:
    for folder in (_raw_dir(data_dir), data_dir):
        for path in (folder / name, folder / f"{name}.gz"):
            try:
                found = path.exists()
            except OSError:
                found = True  # reading it will tell what is wrong
            if found:
                yield path


def _verified(name: str, path: Path) -> bytearray:
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if hashlib.sha256(content).hexdigest() != SHA256[name]:
        raise ConfigError(
            f"{path} is damaged: its {len(content)} bytes have another checksum than MNIST's"
        )
    return bytearray(content)


def _reach(mirror: str) -> None:
    """Find out within REACH_BOUND_S whether there is a network at all.

    A name server that does not answer blocks for longer than that, hence the thread.
    """
    try:
        url = urlsplit(mirror)
        address = (url.hostname or "", url.port or {"http": 80}.get(url.scheme, 443))
    except ValueError as error:
        raise _FetchError(f"{mirror} is no URL: {error}") from None
    if getproxies():
        return
    try:
        call_with_timeout(
            REACH_BOUND_S,
            lambda: socket.create_connection(address, timeout=REACH_BOUND_S).close(),
            "reach",
        )
    except TimeoutError:
        text = f"{url.hostname} does not answer within {REACH_BOUND_S:.0f} s"
        raise _FetchError(text) from None
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _FetchError(f"{url.hostname}: {reason}") from None


def _fetch(names: Sequence[str], raw_dir: Path, mirror: str, bound_s: float) -> None:
    created = make_directories(raw_dir)
    try:
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=raw_dir) as folder:
            _download(names, folder, mirror, bound_s)
            for name in names:
                _verified(name, Path(folder, name))
            for name in names:
                os.replace(Path(folder, name), raw_dir / name)
    except ConfigError as error:
        raise _FetchError(f"{mirror} gives something else: {error}") from None
    finally:
        remove_empty(created)


def _download(names: Sequence[str], folder: str, mirror: str, bound_s: float) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _FETCH_PROGRAM, mirror, folder, *names],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=bound_s,
        )
    except subprocess.TimeoutExpired:
        raise _FetchError(f"{mirror}: not done within {bound_s:.0f} s") from None
    if done.returncode:
        raise _FetchError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
