"""The four raw files of MNIST: found, verified, and fetched if needed. Loads no torch.

They may be plain or .gz, in DATA_DIR/MNIST/raw or in DATA_DIR itself, and the folder may be
read-only. Fetched files are verified in a temporary folder and then renamed, so that a reader
finds a complete file or none.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ps.host.files import make_directories, remove_empty
from ps.settings.errors import ConfigError
from ps.settings.log import log
from ps.workloads.mirror import Mirror, MirrorError

# SHA-256 of the uncompressed files.
SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


@functools.cache
def read(data_dir: Path, name: str) -> bytearray:
    """The verified content of a file, uncompressed. Treat it as read-only: it is read only once.

    Raises:
        ConfigError: the file is missing, or every copy of it is damaged.
    """
    errors = []
    for path in _candidates(data_dir, name):
        try:
            return _verified(name, path)
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    raise ConfigError(f"{name} is not in {_raw_dir(data_dir)}")


def fetch_if_needed(data_dir: Path, mirror: Mirror, *, timeout_s: float) -> None:
    """Fetch the files that are missing or damaged. Blocks for about timeout_s at most.

    Raises:
        ConfigError: such a file cannot be fetched; says why.
    """
    errors = {}
    for name in SHA256:
        try:
            read(data_dir, name)
        except ConfigError as error:
            errors[name] = str(error)
    if not errors:
        return
    first = next(iter(errors.values()))
    try:
        mirror.reach()
        files = "1 file" if len(errors) == 1 else f"{len(errors)} files"
        log.info("%s; fetching %s from %s", first, files, mirror.url)
        _fetch(list(errors), _raw_dir(data_dir), mirror, timeout_s)
    except (OSError, MirrorError) as error:
        raise ConfigError(
            f"{first}, and it cannot be fetched ({error}); put the four files of MNIST there, "
            "or type --workload digits"
        ) from None


def _raw_dir(data_dir: Path) -> Path:
    return data_dir / "MNIST" / "raw"


def _candidates(data_dir: Path, name: str) -> Iterator[Path]:
    for folder in (_raw_dir(data_dir), data_dir):
        for path in (folder / name, folder / f"{name}.gz"):
            try:
                exists = path.exists()
            except OSError:
                exists = True  # reading it will tell what is wrong
            if exists:
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
            f"{path} is damaged: its {len(content)} bytes do not have the checksum of MNIST's"
        )
    return bytearray(content)


def _fetch(names: Sequence[str], raw_dir: Path, mirror: Mirror, timeout_s: float) -> None:
    created = make_directories(raw_dir)
    try:
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=raw_dir) as temporary:
            folder = Path(temporary)
            mirror.download(names, folder, timeout_s)
            for name in names:
                _verified(name, folder / name)
            for name in names:
                os.replace(folder / name, raw_dir / name)
    except ConfigError as error:
        raise MirrorError(f"{mirror.url} has something else: {error}") from None
    finally:
        remove_empty(created)
