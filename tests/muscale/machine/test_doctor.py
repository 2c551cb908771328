"""The doctor: its findings are right, failures come with advice, and no secret is printed."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from muscale.actors.cluster import cluster
from muscale.errors import StageError
from muscale.machine import doctor, storage_checks
from muscale.machine.diagnosis import Diagnosis, Finding
from muscale.machine.handshake import Handshake, complete_handshake
from muscale.machine.storage_checks import storage_findings
from muscale.settings.tables import ResourceSettings, StorageSettings
from tests.muscale.command_lines import muscale
from tests.muscale.conftest import PostgresServer

MakeStudy = Callable[..., Path]
SECRET = "s3cret-of-the-tests"
TORCH = {"version": "2", "threads": 1, "cuda": None, "nccl": None, "gpus": [], "compiler": None, "backend": "gloo"}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No key, no token and no cluster of the machine's."""
    for name in ("WANDB_API_KEY", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return monkeypatch


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


def test_a_machine_that_runs_the_tests_is_well(make_study: MakeStudy, capfd: pytest.CaptureFixture[str]) -> None:
    path = make_study()
    before = sorted(path.parent.rglob("*"))
    done = muscale(capfd, "doctor", path, "--json")
    output = json.loads(done.out)
    status = {finding["what"]: finding["status"] for finding in output["findings"]}
    assert done.code == (0 if output["passed"] else 1)
    assert {status[name] for name in ("python", "packages", "writing", "ledger", "torch", "workers", "speed")} == {"ok"}
    assert {"disk", "W&B", "ray", "token", "GPUs", "compiler"} <= status.keys()
    assert sorted(path.parent.rglob("*")) == before, "it leaves nothing behind"


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--job", "job.json"], "--job"),
        (["--out", "file.json"], "--out"),
        (["--gpu", "--trainer", "x"], "--trainer"),
        (["--gpu", "study.toml"], "study.toml"),
        (["--trainer", "x", "study.toml"], "study.toml"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    words: list[str], option: str, capfd: pytest.CaptureFixture[str]
) -> None:
    done = muscale(capfd, "doctor", *words)
    assert done.code == 2
    assert option in done.err


def test_workers_that_do_not_meet_are_ended_and_the_reason_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = time.monotonic()
    late = complete_handshake(patience=0.2)
    assert time.monotonic() - begun < 10
    assert "within 0 s" in late.failure
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-device")
    broken = complete_handshake()
    assert broken.seconds is None
    assert "ended with exit code 1: " in broken.failure
    assert broken.torch["version"], "what the first reported before it ended is kept"
    finding = by_name(doctor._devices(broken, 0.0))["workers"]
    assert finding.status == "fail"
    assert "GLOO_SOCKET_IFNAME" in finding.do


def test_devices_are_held_against_what_the_study_wants() -> None:
    wanted = by_name(doctor._devices(Handshake(torch=TORCH, seconds=0.1, failure=""), 1.0))
    assert wanted["GPUs"].status == "fail"
    gpu = {**TORCH, "gpus": [{"name": "a GPU", "bytes": 80 * 2**30}], "cuda": "13", "nccl": "2.1"}
    idle = by_name(doctor._devices(Handshake(torch=gpu, seconds=0.1, failure=""), 0.0))
    assert (idle["GPUs"].status, idle["GPUs"].found) == ("warning", "a GPU (80 GiB)")
    assert "CUDA 13, NCCL 2.1" in idle["torch"].found
    eager = by_name(doctor._devices(Handshake(torch={**TORCH, "compiler": "no g++"}, seconds=0.1, failure=""), 0.0))
    assert eager["compiler"].status == "warning"


def test_keys_and_tokens_are_found_and_never_printed(alone: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "no key" in doctor._tracking().found
    assert doctor._token().status == "ok"
    alone.setenv("RAY_AUTH_MODE", "token")
    assert doctor._token().status == "fail"
    alone.setenv("RAY_AUTH_MODE", "disabled")
    assert doctor._token().status == "warning"
    alone.delenv("RAY_AUTH_MODE")
    netrc, token = tmp_path / "home" / ".netrc", tmp_path / "home" / ".ray" / "auth_token"
    netrc.write_text(f"machine api.wandb.ai login user password {SECRET}\n")
    netrc.chmod(0o600)
    token.parent.mkdir()
    token.write_text(SECRET)
    token.chmod(0o644)
    assert doctor._token().status == "warning"
    token.chmod(0o600)
    found = [doctor._tracking(), doctor._token()]
    assert [finding.status for finding in found] == ["ok", "ok"]
    assert str(netrc) in found[0].found
    alone.setenv("WANDB_BASE_URL", "http://localhost:8080")
    assert "no key" in doctor._tracking().found
    netrc.write_text(f"machine localhost login user password {SECRET}\n")
    assert "a key for localhost" in doctor._tracking().found, "as wandb keeps it, without the port"
    alone.setenv("WANDB_API_KEY", SECRET)
    alone.setenv("RAY_AUTH_TOKEN", SECRET)
    assert SECRET not in str([*found, doctor._tracking(), doctor._token()])


def test_a_cluster_that_is_not_there_fails(alone: pytest.MonkeyPatch) -> None:
    assert doctor._ray_cluster().status == "ok"
    alone.setenv("RAY_ADDRESS", "127.0.0.1:1")
    alone.setattr(doctor, "_RAY_SECONDS", 5.0)
    found = doctor._ray_cluster()
    assert found.status == "fail"
    assert "127.0.0.1:1 (RAY_ADDRESS)" in found.found
    assert found.do


@pytest.mark.cluster
def test_a_study_that_cannot_join_its_cluster_sends_to_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # by other tests
    monkeypatch.setenv("RAY_ADDRESS", "no-port")
    message = r"the cluster at no-port \(RAY_ADDRESS\) can't be joined: .*`muscale doctor`"
    with pytest.raises(StageError, match=message), cluster(ResourceSettings()):
        pass


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_cluster_that_is_there_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    monkeypatch.setattr(doctor, "_RAY_SECONDS", 60.0)
    found = doctor._ray_cluster()
    assert found.status == "ok", found
    assert "1 nodes" in found.found


def test_packages_are_held_against_what_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [finding.status for finding in doctor._packages()] == ["ok"]
    wanted = ["numpy>=999", "no-such-package-of-ours>=1", "psycopg>=999; extra == 'postgresql'", "rich>=13"]
    monkeypatch.setattr("importlib.metadata.requires", lambda _name: wanted)
    found = by_name(doctor._packages())
    assert found.keys() == {"packages", "numpy", "no-such-package-of-ours"}
    assert {finding.status for finding in found.values()} == {"fail"}
    assert found["numpy"].do.endswith("-m pip install 'numpy>=999'")


@pytest.mark.parametrize(
    ("versions", "statuses"),
    [
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, ["warning"]),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, []),
        ({"torch": "2.13.0+cpu"}, []),
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, []),
    ],
)
def test_a_torchvision_that_does_not_fit_torch_is_found(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], statuses: list[str]
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, "not installed"))
    assert [finding.status for finding in doctor._builds()] == statuses


def test_storage_that_cannot_hold_a_study_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    well = by_name(storage_findings(tmp_path))
    assert (well["writing"].status, well["ledger"].status) == ("ok", "ok")
    monkeypatch.setattr(storage_checks, "file_system", lambda _path: "nfs4")
    far = by_name(storage_findings(tmp_path))
    assert (far["ledger"].status, far["ledger"].found) == ("fail", "SQLite can't keep a ledger on nfs4")
    assert by_name(storage_findings(tmp_path, StorageSettings(ledger="actor")))["ledger"].status == "ok"
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1e9))
    assert by_name(storage_findings(tmp_path))["disk"].status == "warning"
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1e6))
    assert by_name(storage_findings(tmp_path))["disk"].status == "fail"


def test_a_directory_that_takes_no_files_fails() -> None:
    found = by_name(storage_findings(Path("/proc")))
    assert found["writing"].status == "fail"
    assert "ledger" not in found


def test_a_server_that_answers_and_one_that_does_not(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StorageSettings(ledger="postgresql")
    found = by_name(storage_findings(Path.cwd(), settings))["ledger"]
    assert (found.status, found.found.split()[0]) == ("ok", "PostgreSQL")
    assert postgres.password not in str(found)
    monkeypatch.setenv("MUSCALE_LEDGER_URL", f"postgresql://user:{SECRET}@127.0.0.1:1/none")
    found = by_name(storage_findings(Path.cwd(), settings))["ledger"]
    assert found.status == "fail"
    assert SECRET not in str(found)
    monkeypatch.delenv("MUSCALE_LEDGER_URL")
    assert "it is not set" in by_name(storage_findings(Path.cwd(), settings))["ledger"].found


def test_a_diagnosis_shows_what_to_do_and_fails_with_one_finding() -> None:
    well, ill = (
        Finding(what="a", status="ok", found="good"),
        Finding(what="b", status="fail", found="bad", do="mend it"),
    )
    lines = str(Diagnosis(findings=(well, ill))).splitlines()
    assert lines[0].split() == ["ok", "a", "good"]
    assert lines[2].strip() == "→ mend it"
    assert lines[-1] == "ok: 1, warnings: 0, failed: 1"
    assert Diagnosis(findings=(well,)).passed
    assert not Diagnosis(findings=(well, ill)).passed
