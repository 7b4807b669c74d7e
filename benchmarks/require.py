"""Fail unless a figure of a report is high enough: require KEY LEAST REPORT."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(key: str, least: str, report: str) -> None:
    got = json.loads(Path(report).read_text())[key]
    if got is None or got < float(least):
        sys.exit(f"{key} must be {least} or more, got {got}; see {report}")
    print(f"{key} {got:.4f}, {least} or more was required")


if __name__ == "__main__":
    main(*sys.argv[1:])
