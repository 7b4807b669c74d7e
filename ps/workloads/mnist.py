"""Workload `mnist`: the real data set, found, verified and where needed fetched.

The raw files may be plain or .gz, in DATA_DIR/MNIST/raw or in DATA_DIR itself, and the folder
may be read-only. What is fetched goes to a temporary folder first, is verified and then renamed,
so that a reader finds a whole file or none.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from ps.config import Config
from ps.errors import ConfigError
from ps.log import log
from ps.workload import Workload
from ps.workloads.images import Images, image_workload

# SHA-256 of the uncompressed files.
SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
IMAGES_HEADER_BYTES = 16
LABELS_HEADER_BYTES = 8
MEAN, STD = 0.1307, 0.3081


def build(config: Config) -> Workload:
    """Read the data set from config.data_dir; nothing is fetched.

    Raises:
        ConfigError: a file is missing or damaged; it is named.
    """

    def read(part: str) -> Images:
        images = _read(config.data_dir, f"{part}-images-idx3-ubyte")
        labels = _read(config.data_dir, f"{part}-labels-idx1-ubyte")
        return Images(
            torch.frombuffer(images, dtype=torch.uint8, offset=IMAGES_HEADER_BYTES).view(-1, 28, 28),
            torch.frombuffer(labels, dtype=torch.uint8, offset=LABELS_HEADER_BYTES),
            mean=MEAN,
            std=STD,
        )

    return image_workload("mnist", read("train"), read("t10k"))


def fetch_if_needed(data_dir: Path, mirror: str, *, bound_s: float) -> None:
    """Make sure that every file is there and whole; replace what is not.

    mirror is the URL of a folder that holds the .gz files. Blocks for bound_s at most.

    Raises:
        ConfigError: a file is missing or damaged and cannot be had; it says why.
    """
    faults = {}
    for name in SHA256:
        try:
            _read(data_dir, name)
        except ConfigError as error:
            faults[name] = str(error)
    if not faults:
        return
    for fault in faults.values():
        log.warning("%s; fetching it", fault)
    try:
        _fetch(sorted(faults), data_dir / "MNIST" / "raw", mirror, bound_s)
    except (OSError, subprocess.SubprocessError, _FetchError) as error:
        first = next(iter(faults.values()))
        raise ConfigError(
            f"{first}, and it cannot be fetched: {error}; put the four MNIST files into "
            f"{data_dir / 'MNIST' / 'raw'}, or type --workload digits"
        ) from None


class _FetchError(Exception):
    """The fetching process failed; the text is its last line."""


def _fetch(names: list[str], raw_dir: Path, mirror: str, bound_s: float) -> None:
    raw_dir.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".fetch-", dir=raw_dir))
    try:
        command = [sys.executable, "-m", "ps.workloads.fetch_mnist", str(temporary), mirror, *names]
        # A process of its own: a name server that does not answer cannot be interrupted, and
        # torchvision stays out of the server's memory.
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=bound_s,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        if done.returncode:
            raise _FetchError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
        for name in names:
            _verified(name, temporary / name)
        for name in names:
            os.replace(temporary / name, raw_dir / name)
    except subprocess.TimeoutExpired:
        raise _FetchError(f"no answer within {bound_s:.0f} s") from None
    except ConfigError as error:
        raise _FetchError(str(error)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read(data_dir: Path, name: str) -> bytearray:
    """The whole verified file, uncompressed: the first candidate that is whole.

    Raises:
        ConfigError: there is none; names the first one found damaged.
    """
    faults = []
    for path in _candidates(data_dir, name):
        try:
            return _verified(name, path)
        except ConfigError as error:
            faults.append(error)
    if faults:
        raise faults[0]
    raise ConfigError(f"{name} is not in {data_dir / 'MNIST' / 'raw'}")


def _candidates(data_dir: Path, name: str) -> Iterator[Path]:
    for folder in (data_dir / "MNIST" / "raw", data_dir):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.exists():
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
            f"{path} is damaged ({len(content)} bytes uncompressed, checksum differs)"
        )
    return bytearray(content)
