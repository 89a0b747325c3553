"""pip-audit where there is no network: the same tool, answered from a folder of advisories.

    git clone https://github.com/pypa/advisory-database      # where there is one; carry the folder over
    python benchmarks/offline_audit.py advisory-database --local

A server on loopback answers pip-audit's OSV questions from the folder's YAML files; all further options are
pip-audit's own, and so is the exit code (1 where something was found). Whose folder has no advisory on a
package is told nothing about it: how many were found for how many packages is printed, and how new the newest
is. Covered: ECOSYSTEM ranges and listed versions. An end of a range that cannot be read counts as no end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

Advisory = Mapping[str, Any]


class Advisories:
    """A checkout of the advisory database, or any folder of folders named like packages."""

    def __init__(self, folder: Path) -> None:
        root = folder / "vulns" if (folder / "vulns").is_dir() else folder
        self._folders = {canonicalize_name(one.name): one for one in root.iterdir() if one.is_dir()}
        self._lock = threading.Lock()
        self.asked = self.read = 0
        self.newest = ""

    def touching(self, package: str, version: Version) -> list[Advisory]:
        folder = self._folders.get(canonicalize_name(package))
        files = sorted(folder.glob("*.yaml")) if folder else []
        found: list[Advisory] = [yaml.safe_load(file.read_text()) for file in files]
        with self._lock:
            self.asked += 1
            self.read += len(found)
            self.newest = max([self.newest, *(str(one.get("modified", "")) for one in found)])
        return [_plain(one) for one in found if touches(one, package, version)]


def touches(advisory: Advisory, package: str, version: Version) -> bool:
    for affected in advisory.get("affected", ()):
        if canonicalize_name(affected["package"]["name"]) != canonicalize_name(package):
            continue
        if version in {_version(one) for one in affected.get("versions", ())}:
            return True
        ranges = (one for one in affected.get("ranges", ()) if one["type"] == "ECOSYSTEM")
        if any(_within(one["events"], version) for one in ranges):
            return True
    return False


def _within(events: Sequence[Mapping[str, Any]], version: Version) -> bool:
    """Whether the last event at or before `version` began the range."""
    inside = False
    for event in events:
        start, end, last = (_version(event.get(key)) for key in ("introduced", "fixed", "last_affected"))
        if start is not None and version >= start:
            inside = True
        if (end is not None and version >= end) or (last is not None and version > last):
            inside = False
    return inside


def _version(text: object) -> Version | None:
    """Local versions are sometimes written 2.6.0-cu124; None where it is no version."""
    for form in (str(text), str(text).replace("-", "+", 1)):
        try:
            return Version(form)
        except InvalidVersion:
            continue
    return None


def _plain(advisory: Advisory) -> Advisory:
    """As pip-audit reads it: only ends of ranges that are versions, times as text."""
    plain: dict[str, Any] = json.loads(json.dumps(advisory, default=str))
    plain.pop("published", None)
    for affected in plain["affected"]:
        affected["package"]["name"] = canonicalize_name(affected["package"]["name"])
    return plain


def handler(advisories: Advisories) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = advisories.touching(asked["package"]["name"], Version(asked["version"]))
            body = json.dumps({"vulns": found} if found else {}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """One line per package would bury the result."""

    return Handler


def main(arguments: Sequence[str]) -> int:
    if not arguments or not Path(arguments[0]).is_dir():
        missing = f"no folder {arguments[0]}; " if arguments else ""
        print(f"{missing}usage: offline_audit.py FOLDER [options of pip-audit]", file=sys.stderr)
        return 2
    advisories = Advisories(Path(arguments[0]))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(advisories)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1/query"
        command = [sys.executable, "-m", "pip_audit", "-s", "osv", "--osv-url", url, *arguments[1:]]
        code = subprocess.run(command, check=False).returncode
        server.shutdown()
    newest = advisories.newest[:10] or "none"
    told = f"compared {advisories.asked} packages with {advisories.read} advisories on them, newest {newest}"
    print(told, file=sys.stderr)
    if not advisories.read:
        print(f"nothing was audited: no advisory in {arguments[0]} is on any of them", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
