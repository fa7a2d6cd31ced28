"""What no configuration may hold: numbers, texts and trees beyond all bounds, each one line."""

from pathlib import Path

import pytest

from heron.base.errors import ConfigError
from heron.base.sections import parse_yaml, read_tree
from heron.cli.main import main
from heron.experiment.config import load_config, parse_config
from heron.experiment.overrides import override as set_key
from tests.experiment.test_experiment import SMALL

LAUGHS = "a: &a [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1e400", "some.yaml: lr must be a finite number, got inf"),
        ("optim: {lr: .nan}", "some.yaml: optim.lr must be a finite number, got nan"),
        ("a: [1, -.inf]", "some.yaml: a.1 must be a finite number, got -inf"),
        ("steps: " + "1" * 10**5, "some.yaml: line 1: '1111"),
        (
            "a: {steps: 0x" + "f" * 10**5 + "}",
            "a.steps must be 9223372036854775807 at most, got a number of 400000 bits",
        ),
        (
            "steps: 9223372036854775808",
            "steps must be 9223372036854775807 at most, got a number of 64 bits",
        ),
        ("when: 2001-13-45", "some.yaml: line 1: '2001-13-45' cannot be read (month"),
        (
            "when: 2001-12-15",
            "when must be text, a number, true or false, got datetime.date(2001, 12, 15);",
        ),
        ("a: !!int ''", "line 1: '' cannot be read (string index out of range);"),
        ("a: !!bool x", "line 1: 'x' cannot be read ("),
        ("1: 2", "some.yaml: the top level has the key 1, which is not text; put it in quotes"),
        ("a: {~: 2}", "some.yaml: a has the key None, which is not text; put it in quotes"),
        (
            "a: !!binary aGk=",
            "a must be text, a number, true or false, got b'hi'; put it in quotes",
        ),
        ("[" * 10**4, "some.yaml is nested too deeply; the limit is 40 levels"),
        ("[" * 50 + "]" * 50, "expands to more than 65536 values or 40 levels, counting aliases"),
        (LAUGHS, "expands to more than 65536 values or 40 levels, counting aliases"),
        ("a: &a {b: *a}", "expands to more than 65536 values or 40 levels, counting aliases"),
        (
            "a: {b: 1, b: 2}",
            "some.yaml: key 'b' is given twice, the second time from line 1 on; keep one of them",
        ),
        ("a: *b", "some.yaml is not valid YAML: found undefined alias 'b' in"),
        (
            "a: \0",
            "some.yaml is not valid YAML: unacceptable character #x0000: special characters are",
        ),
        (
            "a: !!python/object:os.system {}",
            "is not valid YAML: could not determine a constructor for",
        ),
    ],
    ids=lambda text: text[:20].strip().replace("\0", "NUL") if "." not in text else "",
)
def test_yaml_that_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as fault:
        parse_yaml(text, "some.yaml")
    said = str(fault.value)
    assert message in said
    assert len(said) < 500 and len(said.splitlines()) == 1


def test_an_alias_is_read() -> None:
    assert parse_yaml("a: &a [1, 2]\nb: *a", "some.yaml") == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.timeout(20)
def test_long_texts_are_read_in_no_time() -> None:
    """A number's pattern that looks at each digit once; a key that is there twice of thousands."""
    assert parse_yaml("a: " + "1" * 10**5 + "x", "x") == {"a": "1" * 10**5 + "x"}
    with pytest.raises(ConfigError, match="key 'k1' is given twice"):
        parse_yaml("{" + ", ".join(f"k{n}: 1" for n in range(20_000)) + ", k1: 2}", "x")


@pytest.mark.parametrize(
    "override",
    [
        f"{key}={2**63}"
        for key in (
            "seed",
            "train.epochs",
            "train.steps",
            "train.timeout_s",
            "model.projection_width",
            "data.batch.labelled",
            "data.workers",
            "data.window_rows",
            "data.views.0.size",
            "objective.bce.ramp_epochs",
            "objective.moco.queue_rows",
        )
    ]
    + [f"{key}={value}" for key in ("optim.lr", "optim.weight_decay") for value in (".inf", ".nan")]
    + ["objective.bce.weight=1e999", "data.build.noise=.nan", "data.build.rows=1e999"],
)
def test_numbers_that_are_too_large(small: Path, override: str) -> None:
    key, _, value = override.partition("=")
    with pytest.raises(
        ConfigError, match=f"^override '{override}': the top level must be .*, got "
    ):
        load_config(small, [override])
    with pytest.raises(ConfigError) as fault:
        small.write_text(SMALL.replace("{weight: 1}", f"{{weight: {value}}}"))
        load_config(small)
    assert "small.yaml: objective.bce.weight must be" in str(fault.value)


def test_a_tree_of_python_s_is_bounded_by_the_types() -> None:
    """What no YAML file was the source of."""
    tree = read_tree(Path(__file__).parents[2] / "configs" / "frames.yaml")
    for section, key, value, said in (
        (
            "train",
            "epochs",
            2**63,
            "train.epochs must be less than or equal to 9223372036854775807, got 92",
        ),
        (
            "train",
            "epochs",
            10**5000,
            "must be less than or equal to 9223372036854775807, got int too la",
        ),
        ("train", "steps", 2**63, "train.steps must be less than or equal to 9223372036854775807"),
        ("optim", "lr", float("inf"), "optim.lr must be a finite number, got inf"),
        ("optim", "momentum", float("nan"), "optim.momentum must be a finite number, got nan"),
        (
            "run",
            "dir",
            "a\0b",
            r"run.dir: the path has a character that cannot be printed; rename it",
        ),
    ):
        with pytest.raises(ConfigError) as fault:
            parse_config(tree | {section: tree.get(section, {}) | {key: value}})
        assert said in str(fault.value)


@pytest.mark.parametrize("key", ["run.dir", "data.path", "data.cache.dir"])
@pytest.mark.parametrize("character", ["\\0", "\\n", "\\e", "\\x7f", "\\u2028"])
def test_a_path_with_a_control_character(small: Path, key: str, character: str) -> None:
    with pytest.raises(ConfigError) as fault:
        load_config(small, [f'{key}="a{character}b"'])
    said = str(fault.value)
    assert f"{key}: the path has a character that cannot be printed; rename it (got 'a\\" in said
    assert said.isprintable()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_bytes(b"title: \xff")
    with pytest.raises(ConfigError, match=r"some.yaml is not UTF-8 \(.*\); save it as UTF-8"):
        load_config(path)
    path.write_bytes(b"a: " + b"x" * 2**18)
    with pytest.raises(ConfigError, match="has more than 262144 bytes, the limit"):
        load_config(path)
    for name, said in (("a\0b", r"a\x00b (embedded null"), ("x" * 300, "too long")):
        with pytest.raises(ConfigError) as fault:
            load_config(tmp_path / name)
        assert said in str(fault.value) and str(fault.value).isprintable()
    with pytest.raises(
        ConfigError, match=r"cannot read configuration .*Is a directory.*; is it a file"
    ):
        load_config(tmp_path)


def test_what_a_message_quotes_stays_on_its_line(small: Path) -> None:
    """A key with line breaks and an escape sequence, a place in a list that is no number."""
    with pytest.raises(ConfigError) as fault:
        load_config(small, ['optim={"a\\n\\u2028\\e[31m": 1}'])
    assert "optim.a\\n\\u2028\\x1b[31m: unknown key; " in str(fault.value)
    with pytest.raises(ConfigError, match="'²' is not an index of a list of 1"):
        load_config(small, ["data.views.²=1"])
    with pytest.raises(ConfigError, match="'9+… is not an index of a list of 1"):
        load_config(small, [f"data.views.{'9' * 5000}=1"])


def test_many_faults_are_counted(small: Path) -> None:
    with pytest.raises(ConfigError, match=r"\(8\) .*; and 92 more$"):
        load_config(small, [f"model.encoder={{kind: mlp, widths: {[0] * 100}}}"])


@pytest.mark.parametrize("option", ["--out", "study"])
def test_a_path_of_the_command_line(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["study", "a\nb.yaml"] if option == "study" else ["study", "x.yaml", "--out", "a\0b"]
    with pytest.raises(SystemExit) as status:
        main(words)
    said = capsys.readouterr().err
    assert status.value.code == 2 and "has a character that cannot be printed; rename it" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}", {"x": 3, "y": 2}),
        ("a: &a {x: 1}\nc: &c {x: 2, y: 3}\nb: {<<: [*a, *c], z: 4}", {"x": 1, "y": 3, "z": 4}),
        # `d` is merged into `b` before it is read itself.
        ("a: &a {x: 1}\nc: {e: {d: &d {<<: *a, x: 2}}}\nb: {<<: *d}", {"x": 2}),
    ],
)
def test_a_merge_key_takes_the_values_of_another_mapping(text: str, tree: dict[str, int]) -> None:
    assert parse_yaml(text, "some.yaml")["b"] == tree


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: &a {x: 1}\nb: {<<: *a, y: 1, y: 2}",
            "key 'y' is given twice, the second time from line 2 on;",
        ),
        (
            "a: &a {x: 1, x: 2}\nb: {<<: *a}",
            "key 'x' is given twice, the second time from line 1 on;",
        ),
        (
            "a: &a {x: 1}\nb: {<<: *a, <<: *a}",
            "key '<<' is given twice, the second time from line 2 on;",
        ),
        ("a: &a {<<: *a}", "some.yaml is nested too deeply"),
        ("b: {<<: 3}", "expected a mapping or list of mappings for merging, but found scalar"),
        (
            "a0: &a0 {x: 1, y: 2}\n"
            + "".join(f"a{n}: &a{n} {{<<: [{f'*a{n - 1}, ' * 9}]}}\n" for n in range(1, 12)),
            "some.yaml: line 6 merges more than 65536 values; write some of them out",
        ),
    ],
    ids=["twice", "twice in the other", "merged twice", "itself", "no mapping", "without end"],
)
def test_a_merge_key_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as fault:
        parse_yaml(text, "some.yaml")
    assert message in str(fault.value) and "constructor for" not in str(fault.value)


@pytest.mark.parametrize("again", ["*first", "{<<: *first}"])
def test_an_override_changes_no_other_place_of_an_alias(again: str) -> None:
    tree = parse_yaml(f"a: &first {{b: {{c: 1}}}}\nd: {again}", "some.yaml")
    set_key(tree, "d.b.c=2")
    assert (tree["a"]["b"]["c"], tree["d"]["b"]["c"]) == (1, 2)
