"""Checks whether this machine can run a study: versions, devices, workers, Ray, storage, keys. Secrets are never shown."""

from __future__ import annotations

import netrc
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from packaging.requirements import Requirement

from muscale.machine.diagnosis import Diagnosis, Finding
from muscale.machine.handshake import Handshake, complete_handshake
from muscale.machine.storage_checks import storage_findings

if TYPE_CHECKING:
    from muscale.settings.config import StudyConfig

_NAMED = ("torch", "ray", "lightning", "mup", "optuna", "wandb")
_RAY_SECONDS = 20.0  # several times as long as joining a cluster takes (assumed)
_JOIN = """
import logging, ray
ray.init(address="auto" if not {address!r} else {address!r}, logging_level=logging.ERROR, log_to_driver=False)
r = ray.cluster_resources()
print("FOUND", sum(node["Alive"] for node in ray.nodes()), int(r.get("CPU", 0)), int(r.get("GPU", 0)))
"""


def diagnose(study: Path | None = None) -> Diagnosis:
    """Run all checks; without waits they take under ten seconds, and some more to train a study's model.

    Args:
        study: A study file, whose directory, storage and resources are checked; None: this directory.

    Raises:
        StudyFileError: If the study file can't be used.
    """
    with ThreadPoolExecutor() as pool:
        handshake, joined = pool.submit(complete_handshake), pool.submit(_ray_cluster)  # both wait for processes
        config = _read(study) if study else None
        directory = study.absolute().parent if study else Path.cwd()
        findings = [
            _python(),
            *_packages(),
            *_builds(),
            *storage_findings(directory, config.storage if config else None),
        ]
        findings += [_tracking(), joined.result(), _token()]
        findings += _devices(handshake.result(), config.resources.gpus_per_worker if config else 0.0)
    if config:
        from muscale.machine.speed import speed_findings  # after everything else has finished; imports torch

        findings += speed_findings(config)
    return Diagnosis(findings=tuple(findings))


def _read(study: Path) -> StudyConfig:
    from muscale.settings.config import StudyConfig  # imports torch, which users without a study need not wait for

    return StudyConfig.read(study, trains=True)


def _python() -> Finding:
    version = platform.python_version()
    wanted = metadata.metadata("muscale")["Requires-Python"]
    return Finding(
        what="python", status="ok", found=f"{version} (needs {wanted}), {platform.system()}, {os.cpu_count()} CPUs"
    )


def _packages() -> list[Finding]:
    """Compare declared requirements with the installed packages."""
    declared = [Requirement(text) for text in metadata.requires("muscale") or []]
    wrong, versions = [], {}
    for wanted in declared:
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            versions[wanted.name] = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            wrong.append(Finding(what=wanted.name, status="fail", found="not installed", do=_install(wanted)))
            continue
        if not wanted.specifier.contains(versions[wanted.name], prereleases=True):
            found = f"{versions[wanted.name]}, but muscale needs {wanted.specifier}"
            wrong.append(Finding(what=wanted.name, status="fail", found=found, do=_install(wanted)))
    named = ", ".join(f"{name} {versions[name]}" for name in _NAMED if name in versions)
    found = f"{len(versions)} installed, {len(wrong)} not as declared: {named}"
    return [
        Finding(what="packages", status="fail" if wrong else "ok", found=found, do="see below" if wrong else ""),
        *wrong,
    ]


def _builds() -> list[Finding]:
    """Find a CPU build of torch with a torchvision for GPUs, which mup requires; transformers then imports no model."""
    torch, torchvision = _version("torch"), _version("torchvision")
    if not torch.endswith("+cpu") or torchvision.endswith(("+cpu", "not installed")):
        return []
    found = f"{torchvision}, a build for GPUs, with torch {torch}: transformers can't load an export here"
    do = "pip uninstall torchvision, which muscale does not need, or install its CPU build"
    return [Finding(what="torchvision", status="warning", found=found, do=do)]


def _install(wanted: Requirement) -> str:
    return f"{Path(sys.executable).name} -m pip install '{wanted.name}{wanted.specifier}'"


def _tracking() -> Finding:
    """Whether Weights & Biases has a key; in a netrc file only the host's entry is looked up."""
    if os.environ.get("WANDB_API_KEY"):
        return Finding(what="W&B", status="ok", found="a key in WANDB_API_KEY")
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        known = path.exists() and netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return Finding(
            what="W&B", status="warning", found=f"{path} can't be read", do="mend the file, or set WANDB_API_KEY"
        )
    if known:
        return Finding(what="W&B", status="ok", found=f"a key for {host} in {path}")
    return Finding(what="W&B", status="ok", found="no key (none is needed; `wandb login` puts one there)")


def _ray_cluster() -> Finding:
    """Whether the cluster of RAY_ADDRESS can be joined; a separate process tries."""
    version, address = _version("ray"), os.environ.get("RAY_ADDRESS", "")
    if not address:
        found = f"{version}; RAY_ADDRESS is not set, so a study starts its own Ray on this machine"
        return Finding(what="ray", status="ok", found=found)
    do = "is the head up, its port open from here, and the token the cluster's? docs/cluster.md; or unset RAY_ADDRESS"
    command = [sys.executable, "-c", _JOIN.format(address=address)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RAY_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        found = f"{version}; no answer from {address} (RAY_ADDRESS) within {_RAY_SECONDS:.0f} s"
        return Finding(what="ray", status="fail", found=found, do=do)
    found_lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("FOUND")]
    if not found_lines:
        why = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        return Finding(what="ray", status="fail", found=f"{version}; can't join {address} (RAY_ADDRESS): {why}", do=do)
    nodes, cpus, gpus = found_lines[-1]
    found = f"{version}; cluster at {address}: {nodes} nodes, {cpus} CPUs, {gpus} GPUs"
    return Finding(what="ray", status="ok", found=found)


def _token() -> Finding:
    """The source of Ray's token, in Ray's order; the token itself is not read."""
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if mode == "disabled":
        return Finding(
            what="token",
            status="warning",
            found="RAY_AUTH_MODE=disabled: anyone who reaches the cluster's ports can run code on it",
            do="leave RAY_AUTH_MODE out, or set it to token",
        )
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    if os.environ.get("RAY_AUTH_TOKEN"):
        return Finding(what="token", status="ok", found="Ray's token authentication is on; token in RAY_AUTH_TOKEN")
    if path.exists():
        if path.stat().st_mode & 0o077:
            found = f"Ray's token authentication is on; others may read the token in {path}"
            return Finding(what="token", status="warning", found=found, do=f"chmod 600 {path}")
        return Finding(what="token", status="ok", found=f"Ray's token authentication is on; token in {path}")
    if mode == "token" or named:
        found = f"Ray's token authentication is asked for, and there is no token in {path}"
        return Finding(what="token", status="fail", found=found, do="(umask 077; ray get-auth-token --generate)")
    return Finding(
        what="token", status="ok", found="no token yet; a local Ray creates one, a cluster needs its token here"
    )


def _devices(met: Handshake, gpus_per_worker: float) -> list[Finding]:
    """Findings about torch, its devices and the handshake of the two workers."""
    torch, findings = met.torch, []
    if torch:
        cuda = f"CUDA {torch['cuda']}, NCCL {torch['nccl']}" if torch["cuda"] and torch["nccl"] else "no CUDA"
        found = f"{torch['version']}, {torch['threads']} CPU threads, {cuda}"
        findings.append(Finding(what="torch", status="ok", found=found))
        gpus = [f"{gpu['name']} ({gpu['bytes'] / 2**30:.0f} GiB)" for gpu in torch["gpus"]]
        if gpus_per_worker and not gpus:
            found = f"none that torch sees, and the study wants resources.gpus_per_worker = {gpus_per_worker:g}"
            do = "install the driver and a CUDA build of torch, or set resources.gpus_per_worker = 0"
            findings.append(Finding(what="GPUs", status="fail", found=found, do=do))
        elif gpus and not gpus_per_worker:
            do = "resources.gpus_per_worker = 1 in the study file trains on them"
            findings.append(Finding(what="GPUs", status="warning", found=", ".join(gpus), do=do))
        else:
            findings.append(Finding(what="GPUs", status="ok", found=", ".join(gpus) or "none; training is on the CPU"))
        missing = torch["compiler"]
        findings.append(
            Finding(
                what="compiler",
                status="warning" if missing else "ok",
                found=missing or "torch.compile has what it needs",
                do="apt-get install g++ python3-dev, or the like; without it training is eager" if missing else "",
            )
        )
    if met.failure:
        do = "set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME with GPUs) to an interface that the workers share, such as lo"
        findings.append(Finding(what="workers", status="fail", found=met.failure, do=do))
    else:
        found = f"two met over {torch['backend']} and added up in {met.seconds:.2f} s"
        findings.append(Finding(what="workers", status="ok", found=found))
    return findings


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
