"""The files that start runs elsewhere: they parse, and torchrun understands their commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from t5_fsdp.cli.options import parse_layers, resolve
from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"

# What is there of a file's fields: a type, a mapping of them, or a list with the form of its items.
# A field with "?" may be absent; others than these are misspelled ones.
ANY = object
POD = {
    "terminationGracePeriodSeconds": int,
    "containers": [
        {
            "name": str, "image": str, "command": [str], "env": [{"name": str, "value": str}],
            "resources": {"requests": ANY, "limits": ANY},
            "volumeMounts": [{"name": str, "mountPath": str}],
        }
    ],
    "volumes": [{"name": str, "persistentVolumeClaim?": ANY, "emptyDir?": ANY}],
}  # fmt: skip
# kubeflow.org/v1 PyTorchJob, after the training operator's CRD.
PYTORCH_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "nprocPerNode": str,
        "elasticPolicy": {
            "rdzvBackend": str, "minReplicas": int, "maxReplicas": int, "maxRestarts": int,
        },
        "runPolicy": {"backoffLimit": int, "cleanPodPolicy": str},
        "pytorchReplicaSpecs": {
            "Worker": {"replicas": int, "restartPolicy": str, "template": {"spec": POD}}
        },
    },
}  # fmt: skip
# docs.skypilot.co/en/latest/reference/yaml-spec.html
SKYPILOT = {
    "name": str, "num_nodes": int, "workdir": str, "envs": ANY, "setup": str, "run": str,
    "resources": {
        "infra": str, "accelerators": str, "network_tier": str, "use_spot": bool,
        "disk_size": int, "job_recovery": {"max_restarts_on_errors": int},
    },
}  # fmt: skip


def misfits(form: Any, value: Any, place: str = "") -> list[str]:
    """Where a value is not of the form."""
    if isinstance(form, list):
        if not isinstance(value, list) or not value:
            return [f"{place}: no list"]
        return [m for n, item in enumerate(value) for m in misfits(form[0], item, f"{place}[{n}]")]
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return [f"{place}: no mapping"]
        names = {name.rstrip("?") for name in form}
        found = [f"{place}.{name}: unknown" for name in value.keys() - names]
        for name, inner in form.items():
            if name.rstrip("?") in value:
                found += misfits(inner, value[name.rstrip("?")], f"{place}.{name}")
            elif not name.endswith("?"):
                found.append(f"{place}.{name}: missing")
        return found
    good = isinstance(value, form) and (form is not int or not isinstance(value, bool))
    return [] if good else [f"{place}: {value!r} is no {form.__name__}"]


def load(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))


def check_command(words: list[str], run_dir: str) -> Any:
    """torchrun's words after its own name; what torchrun itself makes of them."""
    parsed = get_args_parser().parse_args(words)
    assert parsed.training_script == "scripts/train.py"
    assert (ROOT / parsed.training_script).is_file()
    layers = parse_layers(
        parsed.training_script_args, command="train", description="", config_required=True
    )
    assert resolve(layers).run_dir == run_dir
    return parsed


def environment_file() -> dict[str, str]:
    lines = (EXAMPLES / "p4d.env").read_text().splitlines()
    pairs = [line for line in lines if line and not line.startswith("#")]
    return dict(pair.split("=", 1) for pair in pairs)


def test_misfits_are_found() -> None:
    job = load("kubernetes_pytorchjob.yaml")
    assert misfits(PYTORCH_JOB, job) == []
    job["spec"]["elasticPolicy"]["minReplica"] = job["spec"]["elasticPolicy"].pop("minReplicas")
    job["spec"]["nprocPerNode"] = 8
    assert sorted(misfits(PYTORCH_JOB, job)) == [
        ".spec.elasticPolicy.minReplica: unknown",
        ".spec.elasticPolicy.minReplicas: missing",
        ".spec.nprocPerNode: 8 is no str",
    ]


def test_the_pytorch_job_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    job = load("kubernetes_pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    elastic = job["spec"]["elasticPolicy"]
    assert worker["replicas"] == elastic["minReplicas"] == elastic["maxReplicas"]
    pod = worker["template"]["spec"]
    [container] = pod["containers"]
    assert container["name"] == "pytorch"
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    # Kubernetes wants the two equal for extended resources and huge pages.
    for name in limits:
        assert name == "memory" or limits[name] == requests[name]
    assert str(limits["nvidia.com/gpu"]) == job["spec"]["nprocPerNode"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}
    assert {entry["name"]: entry["value"] for entry in container["env"]} == environment_file()
    program, *words = container["command"]
    assert program == "torchrun"
    # What the operator sets for an elastic job.
    monkeypatch.setenv("PET_NNODES", "2:2")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "8")
    parsed = check_command(words, "/mnt/runs/wikihow-t5-3b")
    assert (parsed.nnodes, parsed.nproc_per_node) == ("2:2", "8")
    assert parsed.shutdown_timeout < pod["terminationGracePeriodSeconds"]


TORCHRUN = """#!/bin/bash
printf '%s\\n' "$NCCL_SOCKET_IFNAME" "$@" > called
"""


def test_the_skypilot_task_starts_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = load("skypilot.yaml")
    assert misfits(SKYPILOT, task) == []
    for script in (task["setup"], task["run"]):
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
    (tmp_path / "examples").symlink_to(EXAMPLES)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/torchrun").write_text(TORCHRUN)
    (tmp_path / ".venv/bin/torchrun").chmod(0o755)
    environment = {
        "PATH": os.environ["PATH"],
        **{name: value for name, value in task["envs"].items() if value is not None},
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.9",
    }
    done = subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env=environment)
    assert done.returncode == 0
    interface, *words = (tmp_path / "called").read_text().splitlines()
    assert interface == environment_file()["NCCL_SOCKET_IFNAME"]
    monkeypatch.chdir(ROOT)
    parsed = check_command(words, "/mnt/runs/wikihow-t5-3b")
    assert (parsed.nnodes, parsed.nproc_per_node) == ("2", "8")
    assert parsed.rdzv_endpoint == "10.0.0.7:29400"


def test_the_environment_of_p4d_is_explained(tmp_path: Path) -> None:
    variables = environment_file()
    text = (ROOT / "docs/launching.md").read_text(encoding="utf-8")
    for name, value in variables.items():
        assert f"| `{name}={value}` |" in text
    command = f"set -a; . {EXAMPLES}/p4d.env; env"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert {name: seen[name] for name in variables} == variables


def test_the_torchrun_line_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs/launching.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^\.venv/bin/torchrun (--nnodes.*?)^```", text, re.M | re.S)
    monkeypatch.chdir(ROOT)
    parsed = check_command(shlex.split(command.replace("\\\n", " ")), "/mnt/runs/wikihow-t5-3b")
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_endpoint) == (
        "2", "8", "node-1:29400",
    )  # fmt: skip


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """(instruction, arguments) in their order, lines that go on joined."""
    lines = [line for line in dockerfile.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (words[0], words[1])
        for line in joined.splitlines()
        if len(words := line.split(None, 1)) > 1
    ]


def test_the_dockerfile_is_sound() -> None:
    found = instructions((ROOT / "Dockerfile").read_text())
    names = [name for name, _ in found]
    assert names[:2] == ["ARG", "FROM"]
    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}
    assert set(names) <= known and names.count("CMD") == 1
    for name, text in found:
        if name == "RUN":
            done = subprocess.run(["sh", "-n"], input=text, text=True, capture_output=True)
            assert done.returncode == 0, done.stderr
        if name == "COPY":
            *sources, _ = text.split()
            assert all((ROOT / source).exists() for source in sources)
    # Packages before the code, so that a change of code does not install them anew.
    copies = [text for name, text in found if name == "COPY"]
    assert copies == ["requirements.txt ./", ". ."]
    # The Makefile takes the image's .venv as it is.
    stamp = re.search(r"^STAMP := \$\(VENV\)/(\S+)", (ROOT / "Makefile").read_text(), re.M)
    assert stamp is not None
    assert any(f"touch .venv/{stamp[1]}" in text for name, text in found if name == "RUN")


def test_the_image_gets_code_and_no_data() -> None:
    ignored = {
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    }
    assert {".git", ".venv", "runs", "data/wikihow"} <= ignored
    needed = ("t5_fsdp", "scripts", "configs", "examples", "data", "Makefile", "requirements.txt")
    assert not ignored & set(needed)
