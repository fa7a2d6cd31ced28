"""The files of launch/ray: commands that Heron's command line takes, and a token in each."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import heron.cli.main as cli
from heron.cli.arguments import Group, Verb, choose, parse

RAY = Path(__file__).parents[2] / "launch/ray"


def read(name: str) -> Any:
    return yaml.safe_load((RAY / name).read_text())


def test_the_job_on_kubernetes(tmp_path: Path) -> None:
    spec = read("kuberay.yaml")["spec"]
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    commands = [shlex.split(command) for command in spec["entrypoint"].split("&&")]
    assert [words[:3] for words in commands] == [
        ["heron", "shards", "build"],
        ["heron", "shards", "verify"],
        ["heron", "embed", "/source/runs/celeba"],
    ]  # fmt: skip
    for words in commands:
        assert words[words.index("--address") + 1] == "auto"
        local = [word.replace("/source", str(tmp_path)) for word in words]
        for word in local:
            if word.startswith(str(tmp_path)):  # source files must be there
                Path(word).parent.mkdir(parents=True, exist_ok=True)
                Path(word).touch()
        taken(local)
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in pods:
        (container,) = pod["template"]["spec"]["containers"]
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["template"]["spec"]["volumes"]}
    groups = cluster["workerGroupSpecs"]
    assert all(g["minReplicas"] <= g["replicas"] <= g["maxReplicas"] for g in groups)


def taken(words: list[str]) -> None:
    """Fails unless the command line takes the words; runs nothing."""
    verb: Verb | Group = cli.VERBS
    prog, rest = "heron", words[1:]
    while isinstance(verb, Group):
        verb, prog, rest = choose(prog, verb, rest), f"{prog} {rest[0]}", rest[1:]
    parse(prog, verb, rest)


def test_what_the_command_line_does_not_take_fails() -> None:
    with pytest.raises(SystemExit):
        taken(shlex.split("heron embed runs/faces --out x --no-such-option auto"))


def test_a_cluster_of_machines_has_a_token() -> None:
    tree = read("cluster.yaml")
    starts = [*tree["head_start_ray_commands"], *tree["worker_start_ray_commands"]]
    started = [command for command in starts if "ray start" in command]
    assert len(started) == 2 and all("RAY_AUTH_MODE=token" in command for command in started)
    assert "~/.ray/auth_token" in tree["file_mounts"]
