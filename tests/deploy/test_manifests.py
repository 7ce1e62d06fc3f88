"""The manifests of `deploy/`: their fields are those of their kinds, and icejax takes their commands."""

import copy
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement

from icejax.commands import options, serve
from icejax.commands.many.run import check, shard
from tests.deploy.kinds import schema

FOLDER = Path(__file__).parents[2] / "deploy"
FILES = sorted(FOLDER.glob("*.yaml"))


def manifests(name: str) -> list[dict]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pods(value) -> list[dict]:
    """Returns the specs of pods anywhere in a manifest."""
    if isinstance(value, dict):
        own = [value] if "containers" in value else []
        return own + [pod for other in value.values() for pod in pods(other)]
    return [pod for other in value for pod in pods(other)] if isinstance(value, list) else []


def generate_line(text: str, **variables: str):
    """Returns the arguments of `icejax generate` in a command of a shell, with its variables set."""
    for name, value in variables.items():
        text = text.replace(f"${name}", value)
    words = shlex.split(text)
    words = words[words.index("icejax") :]
    assert words[:2] == ["icejax", "generate"]
    arguments = options.parser("icejax generate").parse_args(words[2:])
    check(arguments)
    return arguments


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_fields_are_those_of_their_kinds(file):
    for manifest in manifests(file.name):
        jsonschema.validate(manifest, schema(manifest))
        for pod in pods(manifest):
            volumes = {volume["name"] for volume in pod.get("volumes", [])}
            assert {mount["name"] for c in pod["containers"] for mount in c.get("volumeMounts", [])} == volumes


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_who_writes_files_is_the_user_of_the_image(file):
    [user] = re.findall(r"^USER (\d+)$", (FOLDER.parent / "Containerfile").read_text(), re.MULTILINE)
    for pod in (pod for manifest in manifests(file.name) for pod in pods(manifest)):
        mounts = [mount for container in pod["containers"] for mount in container["volumeMounts"]]
        if not all(mount.get("readOnly") for mount in mounts if mount["name"] == "documents"):
            assert pod["securityContext"]["fsGroup"] == int(user)


@pytest.mark.parametrize(("name", "cluster"), [("ray-job.yaml", "rayClusterSpec"), ("ray-service.yaml", "rayClusterConfig")])
def test_rays_version_is_one_that_icejax_takes(name, cluster):
    extras = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [ray] = [need for need in map(Requirement, extras["ray"]) if need.name == "ray"]
    [manifest] = manifests(name)
    assert ray.specifier.contains(manifest["spec"][cluster]["rayVersion"])


def test_a_misspelt_field_is_refused():
    [job] = manifests("indexed-job.yaml")
    for place, name in ((job["spec"], "completionsMode"), (pods(job)[0]["containers"][0], "volumeMount")):
        place[name] = "x"
        with pytest.raises(jsonschema.ValidationError, match=name):
            jsonschema.validate(copy.deepcopy(job), schema(job))
        del place[name]
    jsonschema.validate(job, schema(job))


def test_the_shares_of_a_job_are_all_lines():
    [job] = manifests("indexed-job.yaml")
    count = job["spec"]["completions"]
    [line] = pods(job)[0]["containers"][0]["args"]
    asked = [generate_line(line, JOB_COMPLETION_INDEX=str(i)) for i in range(count)]
    assert [shard(arguments.shard) for arguments in asked] == [(i, count) for i in range(count)]
    assert len({arguments.output for arguments in asked}) == count


def test_the_slurm_script_runs_a_share(tmp_path):
    told = tmp_path / "told"
    (tmp_path / "icejax").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {told}\n')
    (tmp_path / "icejax").chmod(0o700)
    variables = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_ARRAY_TASK_COUNT": "2",
    }  # of a second run
    subprocess.run(["bash", FOLDER / "slurm-array.sh"], env=variables, check=True)
    arguments = generate_line(shlex.join(["icejax", *told.read_text().splitlines()]))
    assert shard(arguments.shard) == (3, 8) and arguments.output.name == "answers-3.jsonl"
    assert "#SBATCH --array=0-7\n" in (FOLDER / "slurm-array.sh").read_text()


def test_ray_has_icejaxs_commands(monkeypatch):
    monkeypatch.setattr(options, "check_ray", lambda _: None)  # the package need not be there
    [job] = manifests("ray-job.yaml")
    assert generate_line(job["spec"]["entrypoint"]).ray == "auto"
    [service] = manifests("ray-service.yaml")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    [application] = config["applications"]
    assert application["import_path"] == "icejax.ray.serving:server"
    own = {name: value for name, value in application["args"].items() if name not in ("replicas", "gpus")}
    serve.parser("x").parse_args([word for name, value in own.items() for word in (f"--{name.replace('_', '-')}", str(value))])
    [workers] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert workers["replicas"] == application["args"]["replicas"]


@pytest.mark.parametrize("name", ["leader-worker-set.yaml", "leader-worker-set-tpu.yaml"])
def test_a_group_of_pods_is_a_group_of_processes(name):
    group, service = manifests(name)
    parts = group["spec"]["leaderWorkerTemplate"]
    (leader,), (worker,) = (parts[part]["spec"]["containers"] for part in ("leaderTemplate", "workerTemplate"))
    assert leader["command"] == worker["command"] and leader["command"][:2] == ["icejax", "serve"]
    arguments = serve.parser("icejax serve").parse_args(leader["command"][2:] + ["--api-key", "x"])
    serve.check(arguments)
    limits = leader["resources"]["limits"]
    chips = int(limits.get("nvidia.com/gpu") or limits["google.com/tpu"])
    assert (arguments.coordinator, arguments.mesh) == ("auto", f"heads={parts['size'] * chips}")
    assert leader["env"] == worker["env"] and leader["env"][0]["name"] == serve.KEY_VARIABLE
    labels = {"leaderworkerset.sigs.k8s.io/name": group["metadata"]["name"]} | parts["leaderTemplate"]["metadata"]["labels"]
    [port] = [port["port"] for port in service["spec"]["ports"]]
    assert service["metadata"]["name"] != group["metadata"]["name"]  # by which the pods know each other
    assert service["spec"]["selector"] == labels and port == arguments.port == leader["ports"][0]["containerPort"]
    assert parts["leaderTemplate"]["spec"]["terminationGracePeriodSeconds"] > arguments.drain_seconds
    assert group["spec"]["startupPolicy"] == "LeaderCreated"  # a leader is ready when its workers have joined
