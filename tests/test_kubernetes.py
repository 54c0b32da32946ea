"""The job for Kubernetes keeps the operator's schema, as it stands and with its commented lines; no cluster is here."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, check, render
from jsonschema import Draft202012Validator

SCHEMA = Draft202012Validator(json.loads((ROOT / "tests/mpijob-v2beta1.json").read_text()))


@pytest.fixture(scope="module")
def project(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render(template, tmp_path_factory.mktemp("kubernetes"), use_kubernetes=True)


def jobs(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    claim, job = yaml.safe_load_all(text)
    return claim, job


def uncommented(text: str) -> str:
    """With every line that is there to be switched on; the comments behind values stay."""
    head, mark, body = text.partition("apiVersion")
    body = re.sub(r"^( *)# (?!with a GPU)", r"\1", body, flags=re.MULTILINE)
    return head + mark + body


def argument_lists(job: dict[str, Any]) -> list[list[str]]:
    kinds = job["spec"]["mpiReplicaSpecs"].values()
    return [container["args"] for kind in kinds for container in kind["template"]["spec"]["containers"]]


@pytest.mark.parametrize("prepare", [str, uncommented])
def test_it_keeps_the_schema(project: Path, prepare: Any) -> None:
    claim, job = jobs(prepare((project / "launch/kubernetes.yaml").read_text()))
    assert [error.message for error in SCHEMA.iter_errors(job)] == []
    for kind in job["spec"]["mpiReplicaSpecs"].values():
        pod = kind["template"]["spec"]
        names = {volume["name"] for volume in pod["volumes"]}
        claims = {volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]}
        assert claim["metadata"]["name"] in claims
        assert {mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]} <= names


def test_the_schema_refuses_what_the_operator_does(project: Path) -> None:
    text = (project / "launch/kubernetes.yaml").read_text()
    for good, bad in (
        ("cleanPodPolicy: Running", "cleanPodPolicy: Some"),
        ("slotsPerWorker", "slots"),
        (": 1 ", ": no "),
    ):
        assert good in text
        assert list(SCHEMA.iter_errors(jobs(text.replace(good, bad))[1]))


def test_it_asks_the_image_for_what_it_has(project: Path) -> None:
    text = (project / "launch/kubernetes.yaml").read_text()
    launcher, worker = argument_lists(jobs(uncommented(text))[1])
    assert worker == ["worker"]
    assert (project / launcher[0]).exists()
    entry = (project / "docker/entrypoint.sh").read_text()
    assert "== worker ]]" in entry
    assert f"SSH_SECRET:-{jobs(text)[1]['spec']['sshAuthMountPath']}" in entry
    assert "Port 2222" in (project / "docker/sshd_config").read_text()
    sources = "".join(file.read_text() for file in (project / "src").glob("*/*/command.py"))
    for option in launcher[1:-1]:
        assert f'("{option.partition("=")[0]}"' in sources, option


def test_its_pods_may_do_little(project: Path) -> None:
    _, job = jobs((project / "launch/kubernetes.yaml").read_text())
    for kind in job["spec"]["mpiReplicaSpecs"].values():
        pod = kind["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["securityContext"]["runAsNonRoot"]
        for one in pod["containers"]:
            assert one["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_the_rehearsal_gains_no_privileges(project: Path) -> None:
    services = yaml.safe_load((project / "compose.yaml").read_text())["services"]
    assert all(service["security_opt"] == ["no-new-privileges:true"] for service in services.values())


def test_its_key_is_taken_under_the_operators_names(project: Path, tmp_path: Path) -> None:
    """The operator mounts id_rsa, id_rsa.pub and authorized_keys, whatever kind of key it is."""
    check("ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", tmp_path / "id_rsa")
    script = (project / "docker/entrypoint.sh").read_text().replace("/tmp/ssh", str(tmp_path / "ssh"))
    (tmp_path / "entry.sh").write_text(script)
    ask = "import os; print(os.environ['OMPI_MCA_plm_rsh_args'])"
    command = ["bash", str(tmp_path / "entry.sh"), sys.executable, "-c", ask]
    done = subprocess.run(
        command, env={"SSH_SECRET": str(tmp_path), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert f"-F {tmp_path}/ssh/config" in done.stdout
    assert (tmp_path / "ssh/key").read_bytes() == (tmp_path / "id_rsa").read_bytes()
    kind_and_key = (tmp_path / "id_rsa.pub").read_text().split()[:2]
    assert (tmp_path / "ssh/known_hosts").read_text().split() == ["*", *kind_and_key]
    assert "StrictHostKeyChecking yes" in (tmp_path / "ssh/config").read_text()
