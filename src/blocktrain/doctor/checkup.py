"""What the doctor looks at, in order: this machine, then the run that somebody wants to join."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path

from blocktrain.client.address import RunLink
from blocktrain.doctor import findings, machine
from blocktrain.doctor.findings import Finding, Severity
from blocktrain.doctor.network import read_certificate, read_coordinator, read_text_problem, run_need
from blocktrain.errors import BlocktrainError


def about_machine(device_name: str, data_dir: Path, url: str | None) -> list[Finding]:
    device = machine.read_device(device_name)
    return [
        *findings.about_versions(machine.read_versions()),
        findings.about_device(device),
        findings.about_blocks(device, machine.shipped_needs()),
        findings.about_disk(machine.read_disk(data_dir)),
        findings.about_files(machine.read_file_limit()),
        findings.about_tcp(machine.read_tcp()),
        findings.about_proxy(machine.read_proxy(os.environ), url),
    ]


def about_run(link: RunLink, device_name: str, corpus: str | None) -> list[Finding]:
    reading, run = read_coordinator(link, time.time)
    found = [
        findings.about_coordinator(reading),
        findings.about_clock(reading),
    ]
    # Without a connection a finding about TLS would be a second complaint about the same fault.
    if reading.failed_at not in ("name", "connection"):
        shown = read_certificate(link.url)
        found.append(findings.about_tls(link.url, shown, datetime.now(UTC), link.pin))
    if run is not None:
        try:
            device = machine.read_device(device_name)
            need = run_need(run, device.name.partition(":")[0])
            found.append(findings.about_blocks(device, [need], of_run=True))
            found.append(findings.about_text(read_text_problem(run, corpus)))
        except BlocktrainError as error:
            found.append(Finding("run", Severity.ERROR, "this machine cannot train it", str(error),
                                 "tell its operator"))  # fmt: skip
    return [finding for finding in found if finding is not None]
