"""A study's YAML, its trials and their commands; the studies that ship."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from heron.base.errors import ConfigError, TrainingError
from heron.base.shipped import find_config
from heron.cli.main import main
from heron.distributed.cluster import connected
from heron.experiment.config import Config, load_config, parse_config
from heron.studies.study import Study, dump_study, load_study
from heron.studies.trials import Trial, plan, trials_at_once
from heron.studies.worker import environment, refuse_incomparable, scores_of

ROOT = Path(__file__).parent.parent.parent
GUIDE = (ROOT / "docs" / "studies.md").read_text()
SHIPPED = sorted((ROOT / "configs" / "studies").glob("*.yaml"))
GRID: dict[str, Any] = {
    "title": "A study",
    "base": "configs/frames.yaml",
    "set": {"train.steps": 5},
    "vary": {"workers": [1, 2], "optim.lr": [0.1, 0.2]},
    "measure": {"x": "workers", "y": ["step_s"]},
}
DRAWN = {"vary": {"optim.lr": {"low": 1e-3, "high": 1, "log": True}, "seed": [4, 5, 6]}}
SCHEDULED: dict[str, Any] = {"scheduler": "pbt", "steps": 20, "every_steps": 5}
PBT = {"sampler": "random", "trials": 4, **SCHEDULED}


def write(folder: Path, **changes: Any) -> Path:
    tree = GRID | changes
    path = folder / "study.yaml"
    path.write_text(
        yaml.safe_dump({k: v for k, v in tree.items() if v is not None}, sort_keys=False)
    )
    return path


def configs(trials: Sequence[Trial]) -> list[Config]:
    return [trial.config() for trial in trials]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("small", [False, True], ids=["full", "small"])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_shipped_study_can_be_run(path: Path, small: bool) -> None:
    """Each trial's configuration loads, and its command's is the same."""
    study = load_study(path.relative_to(ROOT), small)
    trials = plan(study, Path("studies") / path.stem)
    assert len(trials) > 3
    assert f"heron study {path.stem} --small" in path.read_text()
    names = {key for key, _ in [*trials[0].values.items()]}
    assert study.measure.x in names and (study.measure.group or study.measure.x) in names
    for trial, config in zip(trials, configs(trials), strict=True):
        words = shlex.split(trial.command())
        parsed = launch_command_parser().parse_args(words[2:])
        assert Path(parsed.config_file).is_file()
        given = parsed.training_script_args
        own = {"run": {"dir": str(trial.run), "resume": "auto"}}
        typed = load_config(find_config(given[1]), given[2:]).model_dump() | own
        assert parse_config(typed) == config
    if small:
        assert all(config.data.build for config in configs(trials))
        assert not study.gpus and max(trial.workers for trial in trials) <= 2


def test_a_grid_has_every_combination_and_the_last_varies_fastest(tmp_path: Path) -> None:
    cases = [{"data.batch.labelled": 10, "seed": 1}, {"data.batch.labelled": 20, "seed": 2}]
    trials = plan(load_study(write(tmp_path, cases=cases)))
    shown = [
        (t.name, t.values["seed"], t.workers, t.values["optim.lr"]) for t in (trials[0], trials[5])
    ]
    assert len(trials) == 8
    assert shown == [("000", 1, 1, 0.1), ("005", 2, 1, 0.2)]


def test_drawn_trials_are_the_same_however_many_there_are(tmp_path: Path) -> None:
    few = plan(load_study(write(tmp_path, **DRAWN, search={"sampler": "random", "trials": 3})))
    many = plan(load_study(write(tmp_path, **DRAWN, search={"sampler": "random", "trials": 40})))
    assert [(t.name, t.values) for t in few] == [(t.name, t.values) for t in many[:3]]
    rates = sorted(trial.values["optim.lr"] for trial in many)
    assert 1e-3 <= rates[0] < 0.01 and 0.1 < rates[-1] <= 1
    assert {trial.values["seed"] for trial in many} == {4, 5, 6}
    other = {"sampler": "random", "trials": 3, "seed": 1}
    others = plan(load_study(write(tmp_path, **DRAWN, search=other)))
    assert [trial.values for trial in others] != [trial.values for trial in few]


@pytest.mark.parametrize(
    ("search", "rungs"),
    [
        (
            {
                "sampler": "random",
                "scheduler": "asha",
                "trials": 9,
                "steps": 50,
                "grace_steps": 5,
                "factor": 3,
            },
            [5, 15, 45, 50],
        ),
        (
            {"sampler": "random", "scheduler": "asha", "trials": 9, "steps": 8, "grace_steps": 8},
            [8],
        ),
        (PBT | {"steps": 12}, [5, 10, 12]),
        ({"sampler": "random", "trials": 2}, [None]),
    ],
)
def test_rungs(tmp_path: Path, search: dict[str, Any], rungs: list[int]) -> None:
    measure = {"x": "optim.lr", "y": ["f1_weighted"], "score": "f1_weighted"}
    path = write(tmp_path, **DRAWN, search=search, measure=measure, set=None)
    study = load_study(path)
    assert study.search.rungs == rungs
    config = plan(study)[0].config()
    assert config.train.steps == rungs[-1]


def test_the_small_version_takes_the_place_of_keys(tmp_path: Path) -> None:
    small = {"set": {"train.steps": 2}, "vary": {"seed": [0, 1]}}
    path = write(tmp_path, small=small)
    assert plan(load_study(path))[0].values.keys() == {"workers", "optim.lr"}
    study = load_study(path, small=True)
    assert (study.set, list(study.vary)) == ({"train.steps": 2}, ["seed"])
    assert Study.model_validate(yaml.safe_load(dump_study(study))) == study


def test_overrides_are_every_trials_and_take_the_place_of_what_varies(tmp_path: Path) -> None:
    path = write(tmp_path, small={"cases": [{"data.batch.labelled": 10}], "vary": {}})
    given = ["optim.lr=0.5", "workers=[2, 3]", "strategy=zero2", "train.steps=3"]
    study = load_study(path, overrides=given)
    trials = plan(study)
    assert [trial.values for trial in trials] == [
        {"workers": 2, "optim.lr": 0.5},
        {"workers": 3, "optim.lr": 0.5},
    ]
    assert {trial.strategy for trial in trials} == {"zero2"}
    assert trials[0].config().train.steps == 3
    assert not load_study(path, small=True, overrides=["seed=4"]).vary
    for key in ("data.batch.labelled", "data.batch"):
        with pytest.raises(
            ConfigError, match=f"cannot override {key}, because data.batch.labelled differs be"
        ):
            load_study(path, small=True, overrides=[f"{key}=20"])
    with pytest.raises(
        ConfigError, match="override optim.lr.more, because optim.lr differs .*vary of the"
    ):
        load_study(path, overrides=["optim.lr.more=1"])
    with pytest.raises(ConfigError, match="override 'workers' has no '='"):
        load_study(path, overrides=["workers"])
    own = load_study(path, overrides=["cpus_per_worker=3", "concurrent=1", "retries=0"])
    assert (own.cpus_per_worker, own.concurrent, own.retries) == (3, 1, 0)


def test_a_dry_run_tells_of_data_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = str(tmp_path / "gone")
    path = write(tmp_path, set={"data.path": gone, "data.build": None}, data="ask for it")
    assert main(["study", str(path), "--dry-run"]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == f"data is missing: {gone} has no shards; ask for it"


LAUNCHED = [
    ("ddp", 1, False, None),
    ("ddp", 2, False, None),
    ("fsdp", 1, False, None),
    ("fsdp", 2, False, None),
    *[(f"zero{n}", w, False, str(n)) for n in range(4) for w in (1, 2)],
    ("ddp", 8, True, None),
    ("fsdp", 8, True, None),
    *[(f"zero{n}", 8, True, str(n)) for n in range(4)],
]


@pytest.mark.parametrize(("strategy", "workers", "gpus", "stage"), LAUNCHED)
def test_a_command_launches_what_a_worker_is(
    tmp_path: Path,
    strategy: str,
    workers: int,
    gpus: bool,
    stage: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`accelerate launch` reads the command as the environment that a Ray worker sets."""
    for name in environment("zero2", gpus) | environment("fsdp", gpus):
        monkeypatch.delenv(name, raising=False)
    path = write(tmp_path, strategy=strategy, workers=workers, gpus=gpus, vary={"seed": [0]})
    study = load_study(path)
    trial = plan(study, tmp_path)[0]
    words = shlex.split(trial.command())
    begun = words.index("accelerate")
    parsed, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[begun + 2 :]))
    set_ = environment(trial.launch_strategy, gpus)
    before = dict(word.split("=") for word in words[1:begun])  # after `env`
    asked = {"ACCELERATE_USE_FSDP": str(parsed.use_fsdp).lower()} | before
    assert asked["ACCELERATE_USE_FSDP"] == set_.get("ACCELERATE_USE_FSDP", "false")
    if parsed.use_fsdp:
        assert str(parsed.fsdp_version) == set_["FSDP_VERSION"]
    assert parsed.num_processes == workers
    assert parsed.use_deepspeed == ("ACCELERATE_USE_DEEPSPEED" in set_)
    if stage is not None:
        assert str(parsed.zero_stage) == stage == set_["ACCELERATE_DEEPSPEED_ZERO_STAGE"]
    if stage is None and not parsed.use_fsdp:
        assert parsed.multi_gpu == (workers > 1)
        assert (parsed.cpu or parsed.use_cpu) == ("ACCELERATE_USE_CPU" in set_)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"workres": 2}, "workres: unknown key; did you mean 'workers'?"),
    ({"measure": {"x": "workers", "z": []}}, "measure.y is missing"),
    ({"vary": {}}, "nothing varies; add values to vary or cases"),
    ({"strategy": "zero4"}, "strategy must be 'ddp', 'fsdp'.*, got 'zero4'"),
    (
        {"search": {"kind": "hyperband"}},
        r"search.kind: unknown key",
    ),
    (DRAWN, "vary.optim.lr is a range, and a grid needs a list; list the values, or write"),
    ({"vary": {"seed": {"low": 2, "high": 1}}}, "low must be below high, got 2.0 and 1.0"),
    ({"vary": {"run.dir": ["a"]}}, "run.dir is set by the study for each trial; remove it"),
    ({"set": {"optim.lr": 1}}, "optim.lr is set in both vary and set; remove one of them"),
    ({"set": {"workers": 1}}, "set has 'workers', which is not a key of an experiment; write wor"),
    (
        {"cases": [{"seed": 1}, {"sed": 1}]},
        r"all cases must have the same keys, got \['seed'\] and \['sed'\]",
    ),
    ({"search": PBT, "vary": {"seed": [1]}}, "search pbt compares trials; add measure.score"),
    (
        {"vary": {f"a.{n}": [*range(100)] for n in range(3)}},
        "a grid must have at most 100000 trials, got 1000000; vary less",
    ),
    (
        {"search": {"sampler": "random", "trials": 10**6}},
        "search.trials must be less than or equal to .*, got 1000000",
    ),
    (
        {"search": PBT | {"steps": 10**9, "every_steps": 1}, "vary": {"seed": [1]}},
        "search compares trials more than 100000 times; raise every_steps",
    ),
    ({"base": "a\0b"}, "base: the path has a character that cannot be printed"),
    ({"small": {"vary": {"seed": []}}}, "small: .1. vary.seed"),
    ({"small": 3}, "small must have keys of the study, got 3"),
    ({"vary": ["optim.lr"]}, r"vary must be a valid dictionary, got \['optim.lr'\]"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[m[:25] for _, m in REFUSED])
def test_what_is_wrong_with_a_study_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_study(write(tmp_path, **changes))


def test_a_search_that_perturbs_leaves_workers_alone(tmp_path: Path) -> None:
    measure = GRID["measure"] | {"score": "accuracy"}
    with pytest.raises(ConfigError, match="varies only keys of the experiment; set work"):
        load_study(write(tmp_path, search=PBT, measure=measure, set=None))
    with pytest.raises(ConfigError, match="search.steps is the length of a trial of pbt; remove"):
        load_study(write(tmp_path, search=PBT, measure=measure, vary={"optim.lr": [1, 2]}))


def test_no_study_and_no_small_version(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="study .*/none.yaml does not exist; found .*study.yaml"):
        load_study(write(tmp_path).parent / "none.yaml")
    with pytest.raises(
        ConfigError, match="has no small version; remove --small, or add a section 'small:'"
    ):
        load_study(write(tmp_path), small=True)


def test_every_trial_is_checked_before_the_first(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, vary={"optim.lr": [0.1, "fast"]}))
    with pytest.raises(ConfigError, match=r"trial 001 \(optim.lr=fast\) of configs/frames.yaml: "):
        configs(plan(study))
    study = load_study(write(tmp_path, vary={"workers": [1, 0]}))
    with pytest.raises(ConfigError, match="workers must be an integer of 1 or more, got 0"):
        plan(study)


def test_a_folder_whose_name_yaml_reads_otherwise(tmp_path: Path) -> None:
    """What follows ` #` would be a comment, and all trials would be in one folder."""
    out = tmp_path / "try #2: more"
    for trial in plan(load_study(write(tmp_path)), out):
        assert trial.config().run.dir == str(out / "trials" / trial.name)
        again = load_config(find_config("frames"), shlex.split(trial.command())[-1:])
        assert again.run.dir == str(out / "again" / trial.name)


def test_what_can_never_be_met_is_refused_with_both_numbers(tmp_path: Path) -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 3.0}]
    study = load_study(write(tmp_path, vary={"workers": [1, 8]}))
    with pytest.raises(TrainingError) as error:
        trials_at_once(study, plan(study), nodes)
    assert str(error.value) == (
        "trial 001 asks for 8 workers, 8 CPUs; the cluster has 7 CPUs on 2 nodes, room for 7; "
        "use fewer workers, run the small version with --small, or join a larger cluster with "
        "--address"
    )
    assert trials_at_once(study, plan(study)[:1], nodes) == 7
    assert trials_at_once(study, plan(study), [*nodes, {"CPU": 4.0}]) == 1  # a larger cluster
    small = write(tmp_path, vary={"workers": [1, 8]}, small={"vary": {"workers": [1, 2]}})
    small_study = load_study(small, small=True)
    assert trials_at_once(small_study, plan(small_study), nodes) == 3
    wide = load_study(write(tmp_path, vary={"workers": [3]}, cpus_per_worker=2))
    assert trials_at_once(wide, plan(wide), nodes) == 1  # a worker's two CPUs lie on one node
    wider = load_study(write(tmp_path, vary={"workers": [4]}, cpus_per_worker=2))
    with pytest.raises(TrainingError, match="asks for 4 workers, .* room for 3"):
        trials_at_once(wider, plan(wider), nodes)
    gpus = load_study(write(tmp_path, vary={"workers": [1]}, gpus=True))
    with pytest.raises(TrainingError, match="1 CPU and 1 GPU; the cluster has 7 CPUs and 0 GPUs"):
        trials_at_once(gpus, plan(gpus), nodes)


def test_as_many_trials_at_once_as_there_is_room_for(tmp_path: Path) -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 3.0}]
    study = load_study(write(tmp_path))
    assert trials_at_once(study, plan(study), nodes) == 3
    one = load_study(write(tmp_path, concurrent=1))
    assert trials_at_once(one, plan(one), nodes) == 1


def test_a_score_that_is_no_number_is_told_as_none(tmp_path: Path) -> None:
    result = {"steps": 7, "accuracy": None, "f1_weighted": 0.5, "device": "cpu"}
    (tmp_path / "result.json").write_text(json.dumps(result))
    found = scores_of(tmp_path)
    assert found.keys() == {"steps", "step", "accuracy", "f1_weighted"} and found["step"] == 7
    assert math.isnan(found["accuracy"])


def test_a_run_that_cannot_be_compared(tmp_path: Path) -> None:
    measure = {"x": "optim.lr", "y": ["accuracy"], "score": "accuracy"}
    study = load_study(write(tmp_path, **DRAWN, search=PBT, measure=measure, set=None))
    refuse_incomparable(study, 10, {"accuracy": 0.5, "step": 10})
    with pytest.raises(
        TrainingError, match="measure.score is accuracy, but result.json has no such"
    ):
        refuse_incomparable(study, 10, {"f1_weighted": 0.5, "step": 10})
    with pytest.raises(TrainingError) as error:
        refuse_incomparable(study, 10, {"accuracy": 0.5, "step": 7})
    assert str(error.value) == (
        "the run ended at step 7, but trials are compared after 10; lower search.steps, or raise "
        "the length of the run, train.epochs or train.total_steps"
    )


def test_a_ray_that_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a bare Exception where its node is too slow."""

    def slow(*_: Any, **__: Any) -> None:
        raise Exception("The current node timed out during startup.\nMore.")

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=slow))
    found = r"Ray did not start here within 30 s \(The current node timed out during startup\.\)"
    with pytest.raises(TrainingError, match=found), connected(None):
        pass
    with (
        pytest.raises(TrainingError, match="no Ray cluster answers at h:1 .*HOST:PORT"),
        connected("h:1"),
    ):
        pass


def test_the_command_line_does_without_ray() -> None:
    code = "import sys, heron.cli.main; print('ray' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert said.stdout == "False\n", said.stderr


def test_the_guides_name_every_study() -> None:
    guides = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert [path.name for path in SHIPPED if path.name not in guides] == []
    named = re.findall(r"^\| `([\w-]+\.yaml)` \|", GUIDE, re.MULTILINE)
    assert {*named} - {path.name for path in SHIPPED} == {"study.yaml"}


def test_the_guide_s_examples_are_studies(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    path = tmp_path / "example.yaml"
    path.write_text(text)
    study = load_study(path)
    assert len(configs(plan(study))) == 12
    assert len(plan(load_study(path, small=True))) == 2
    searches = re.findall(r"^\| `(\{s[ac].*?\})` \|", GUIDE, re.MULTILINE)
    for search in searches:
        asked = {"search": yaml.safe_load(search), "vary": DRAWN["vary"], "set": None}
        measure = {"x": "optim.lr", "y": ["step_s"], "score": "f1_weighted"}
        vary = GRID["vary"] if "sampler: grid" in search else DRAWN["vary"]
        load_study(write(tmp_path, **asked | {"vary": vary}, measure=measure))
    assert len(searches) == 8
