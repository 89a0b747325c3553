"""The container file, carried out: every line in a root of its own, then the program that the image starts.

A builder needs a base image from a registry, which a test must not. In place of `FROM python` stands an empty
root with this system's /usr and a fresh virtual environment as /usr/local, in namespaces that end with the
test. Torch is not installed again: `PIP_ARGS` leaves dependencies out, and those of the tests are lent.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.deploy.test_deploy_files import instructions
from tests.docs.pages import ROOT

MOUNTS = r"""
set -eu
mount -t tmpfs tmpfs "$NEW"
for name in .upper .work usr etc proc dev tmp deps "$BASE"; do mkdir -p "$NEW/$name"; done
chmod 1777 "$NEW/tmp"
mount -t overlay overlay -o "lowerdir=/usr,upperdir=$NEW/.upper,workdir=$NEW/.work" "$NEW/usr"
for name in bin lib lib64 sbin; do ln -s "usr/$name" "$NEW/$name"; done
for name in passwd group shadow login.defs skel ssl resolv.conf nsswitch.conf; do
  cp -r "/etc/$name" "$NEW/etc/"
done
mount -t proc proc "$NEW/proc"
mount --rbind /dev "$NEW/dev"
mount --bind "$BASE" "$NEW$BASE"
mount --bind "$DEPS" "$NEW/deps"
for place in $LENT; do mkdir -p "$NEW$place"; mount --bind "$place" "$NEW$place"; done
rm -rf "$NEW/usr/local"
chroot "$NEW" "$PYTHON" -m venv /usr/local
export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/tmp PIP_ARGS="--no-deps"
"""
START = r"""
PYTHONPATH=/deps chroot --userspec=$USER_NAME "$NEW" $COMMAND > "$NEW/tmp/log" 2>&1 &
program=$!
tries=0
until chroot --userspec=$USER_NAME "$NEW" $HEALTH 2> /dev/null; do
  kill -0 $program || { cat "$NEW/tmp/log"; exit 1; }
  tries=$((tries + 1)); [ $tries -lt 120 ] || { cat "$NEW/tmp/log"; exit 1; }
  sleep 0.5
done
kill -TERM $program
wait $program
cat "$NEW/tmp/log"
"""


def script() -> str:
    """The container file in shell."""
    lines, folder, last = [MOUNTS], "/", {}
    for name, rest in instructions():
        last[name] = rest
        if name == "RUN":
            lines.append(f'chroot "$NEW" sh -ec {shlex.quote(f"cd {folder}; {rest}")}')
        elif name == "WORKDIR":
            folder = rest
            lines.append(f'mkdir -p "$NEW{folder}"')
        elif name == "COPY":
            *sources, target = rest.split()
            place = folder if target == "./" else f"{folder}/{target}"
            lines += [
                f'cp -rT {ROOT / one} "$NEW{place}{"/" + one if target == "./" else ""}"' for one in sources
            ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"])
    health = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    start = START.replace("$COMMAND", shlex.join(command)).replace("$HEALTH", shlex.join(health))
    start = start.replace("$USER_NAME", last["USER"]).replace(last["EXPOSE"], str(port))
    return "\n".join([*lines, start])


@pytest.mark.deploy
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, for its mounts")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="no namespaces here")
def test_every_line_of_the_container_file_runs_and_the_image_starts_a_healthy_coordinator(
    tmp_path: Path,
) -> None:
    environment = {
        **os.environ,
        "NEW": str(tmp_path), "BASE": sys.base_prefix, "PYTHON": str(Path(sys.base_prefix, "bin", "python3")),
        "DEPS": str(Path(torch.__file__).parent.parent),
        # Where pip looks for packages on this machine, if it was told.
        "LENT": " ".join(one for one in os.environ.get("PIP_FIND_LINKS", "").split() if Path(one).is_dir()),
    }  # fmt: skip
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", script()],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "coordinator ready" in done.stdout
