"""The accelerate configurations and the scripts: read, dry-run, with the right environment."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from tests.launch import runs

LAUNCH = runs.ROOT / "launch"
CONFIGURATIONS = sorted((LAUNCH / "accelerate").glob("*.yaml"))
SBATCH = LAUNCH / "slurm" / "pretrain.sbatch"
BY_HAND = LAUNCH / "hosts" / "pretrain.sh"
COMMAND = re.compile(r"^# (accelerate launch .*)$", re.MULTILINE)
SHOWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_there_is_one_for_every_way() -> None:
    names = {path.stem for path in CONFIGURATIONS}
    assert names == {
        *("cpu", "single_gpu", "ddp", "fsdp", "multi_node"),
        *("zero1", "zero2", "zero3", "cpu_zero2"),
    }


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda p: p.stem)
def test_accelerate_reads_it(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    assert config.mixed_precision == "no"
    known = vars(launch_command_parser().parse_args(["x.py"]))
    assert set(config.deepspeed_config) <= set(known)
    with_deepspeed = config.distributed_type == DistributedType.DEEPSPEED
    assert with_deepspeed == ("zero" in path.stem)
    assert with_deepspeed == bool(config.deepspeed_config)
    if with_deepspeed:
        assert config.use_cpu is False  # else accelerate leaves DeepSpeed out, and says nothing
        assert config.deepspeed_config["zero_stage"] == int(path.stem[-1])


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda p: p.stem)
def test_its_commands_start_what_they_say(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.ROOT)
    for name in runs.environment().keys() ^ os.environ.keys():
        monkeypatch.delenv(name, raising=False)
    text = path.read_text()
    commands = COMMAND.findall(text)
    assert commands
    for command in commands:
        assert f"--config_file launch/accelerate/{path.name} " in command
        words = command.replace(" R ", " 1 ").replace("HOST", "10.0.0.1").split()[2:]
        arguments = launch_command_parser().parse_args(words)
        assert arguments.training_script == "pipeline/pretrain.py"
        arguments, _, _ = _validate_launch_command(arguments)
        assert arguments.use_deepspeed == ("zero" in path.stem)
        if arguments.use_deepspeed:
            arguments.deepspeed_fields_from_accelerate_config = ""
            _, environment = prepare_deepspeed_cmd_env(arguments)
            assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == path.stem[-1]
            assert float(environment["ACCELERATE_GRADIENT_CLIPPING"]) == 0
        elif arguments.use_fsdp:
            environment = prepare_multi_gpu_env(arguments)
            known = {name: environment[name] for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION")}
            assert known == {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        elif arguments.multi_gpu:
            prepare_multi_gpu_env(arguments)
        else:
            assert arguments.num_processes == 1
        if "--machine_rank" in command:
            assert (arguments.nnodes, arguments.node_rank) == ("2", 1)
            assert arguments.nproc_per_node == "8"
            assert arguments.rdzv_endpoint == "10.0.0.1:29517"


@pytest.mark.parametrize("script", [SBATCH, BY_HAND], ids=lambda p: p.name)
def test_the_scripts_are_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        found = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout
    assert max(map(len, script.read_text().splitlines())) <= 100
    assert BY_HAND.stat().st_mode & 0o111


def fake(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Programs that note what they were called with, instead of SLURM and Python."""
    called = tmp_path / "called"
    fake(
        tmp_path,
        "srun",
        f'echo srun "$@" >> {called}; while [[ $1 = --* ]]; do shift; done\n'
        "for SLURM_PROCID in 0 1 2 3; do\n"
        "  export SLURM_PROCID SLURM_LOCALID=$((SLURM_PROCID % 2))\n"
        '  "$@" || exit $?\n'
        "done",
    )
    fake(
        tmp_path,
        "scontrol",
        f'echo scontrol "$@" >> {called}\n'
        '[[ $1 = show && $2 = hostnames ]] && printf "alpha\\nbeta\\n"\n'
        '[[ $1 = show && $2 = node ]] && echo "NodeName=alpha NodeAddr=10.0.0.7 NodeHostName=a"\n'
        '[[ $1 = show && $2 = job ]] && echo "JobId=20042 JobState=${STATE:-RUNNING} Reason=None"\n'
        "true",
    )
    shown = " ".join(f"{name}=${name}" for name in (*SHOWN, "ACCELERATE_DEEPSPEED_ZERO_STAGE"))
    fake(tmp_path, "python", f'echo "python $* {shown}" >> {called}; exit ${{STATUS:-0}}')
    return tmp_path


def submit(place: Path, **more: str) -> tuple[int, list[str]]:
    allocated = {
        "SLURM_JOB_ID": "20042",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NTASKS": "4",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "PATH": f"{place}{os.pathsep}{os.environ['PATH']}",
    }
    job = subprocess.run(
        ["bash", str(SBATCH), "--config", "a b.yaml"],
        env=runs.environment(**allocated) | {"PYTHON": str(place / "python")} | more,
        cwd=place,
    )
    return job.returncode, (place / "called").read_text().splitlines()


def test_slurm_s_variables_become_those_of_the_processes(place: Path) -> None:
    status, lines = submit(place)
    assert status == 0
    started = [line for line in lines if line.startswith("python")]
    assert len(started) == 4
    command = "python -m heron.api.job --config a b.yaml run.resume=auto "
    for rank, line in enumerate(started):
        assert line.startswith(command)
        ranks = f"RANK={rank} LOCAL_RANK={rank % 2} WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 "
        assert f"{ranks}MASTER_ADDR=10.0.0.7 MASTER_PORT=10042 " in line
        assert line.endswith("ZERO_STAGE=")
    assert not any("requeue" in line for line in lines)


def test_deepspeed_and_an_address_of_one_s_own(place: Path) -> None:
    _, lines = submit(place, ZERO="3", MASTER_ADDR="10.9.9.9")
    assert lines[-1].endswith("ACCELERATE_DEEPSPEED_ZERO_STAGE=3")
    assert "MASTER_ADDR=10.9.9.9 " in lines[-1]


@pytest.mark.parametrize(("status", "again"), [(0, 0), (1, 0), (75, 1), (76, 0), (137, 0)])
def test_only_a_saved_run_is_requeued(place: Path, status: int, again: int) -> None:
    ended, lines = submit(place, STATUS=str(status))
    assert ended == status
    assert lines.count("scontrol requeue 20042") == again


def test_a_cancelled_run_is_not_requeued(place: Path) -> None:
    ended, lines = submit(place, STATUS="75", STATE="COMPLETING")
    assert ended == 75
    assert not any("requeue" in line for line in lines)


def by_hand(place: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BY_HAND), "--config", "a b.yaml"],
        env=runs.environment(GLOO_SOCKET_IFNAME="lo")
        | {"PYTHON": str(place / "python"), "HOSTS": "alpha beta", "PROCESSES": "2"}
        | more,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_two_hosts_by_hand(place: Path) -> None:
    for host in ("0", "1"):
        assert by_hand(place, HOST=host).returncode == 0
    started = (place / "called").read_text().splitlines()
    ranks = sorted(int(line.split(" RANK=")[1].split()[0]) for line in started)
    assert ranks == [0, 1, 2, 3]
    for line in started:
        assert line.startswith("python -m heron.api.job --config a b.yaml run.resume=auto ")
        assert "WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=alpha MASTER_PORT=29517" in line


def test_by_hand_the_highest_status_is_that_of_the_script(place: Path) -> None:
    fake(place, "python", "exit $((75 + RANK))")
    assert by_hand(place, HOST="0").returncode == 76


def test_by_hand_a_signal_reaches_the_processes(place: Path) -> None:
    waits = "import os, signal, sys, time\n"
    waits += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
    waits += "open(os.environ['READY'] + os.environ['RANK'], 'w').close()\ntime.sleep(20)\n"
    (place / "waits.py").write_text(waits)
    fake(place, "python", f"exec {sys.executable} {place}/waits.py")
    environment = runs.environment(GLOO_SOCKET_IFNAME="lo", READY=f"{place}/ready")
    asked = {"PYTHON": str(place / "python"), "HOSTS": "alpha", "HOST": "0", "PROCESSES": "2"}
    script = subprocess.Popen([str(BY_HAND)], env=environment | asked)
    runs.await_that("started", lambda: len(list(place.glob("ready*"))) == 2, 20, str)
    script.terminate()
    assert script.wait(15) == 75


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"HOST": "2"}, "error: HOST is 2; expected 0 to 1, its place in HOSTS: alpha beta"),
        ({"HOSTS": "", "HOST": "0"}, "names of all hosts"),
        ({}, "this host's place in HOSTS"),
    ],
)
def test_by_hand_what_is_missing_is_named(
    place: Path, changes: dict[str, str], message: str
) -> None:
    ended = by_hand(place, **changes)
    assert ended.returncode != 0
    assert message in ended.stderr


def test_the_script_asks_slurm_for_what_it_needs() -> None:
    asked = re.findall(r"^#SBATCH (\S+)$", SBATCH.read_text(), re.MULTILINE)
    assert {"--requeue", "--signal=USR1@120", "--open-mode=append"} <= set(asked)


def test_every_way_is_in_the_guide() -> None:
    guide = (runs.ROOT / "docs" / "cluster.md").read_text()
    for path in (*CONFIGURATIONS, SBATCH, BY_HAND):
        assert path.name in guide
    for path in CONFIGURATIONS:
        assert isinstance(yaml.safe_load(path.read_text()), dict)
