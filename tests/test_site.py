"""The documentation builds without a warning, and its pages hold what the code has."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from heron.experiment.describe import describe_keys

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDES = [
    p
    for p in sorted(DOCS.glob("*.md"))
    if p.name not in ("commands.md", "glossary.md", "install.md", "log.md")
]
PICTURE = re.compile(r"!\[([^\]]+)\]\(pictures/([\w-]+\.\w+)\)")
LARGEST = 150_000  # bytes of a picture


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the extra docs: pip install 'heron-pretrain[docs]'")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def test_the_reference_of_the_code_has_its_classes(site: Path) -> None:
    for page, name in (
        ("heron", "heron.api.model.Model.encode"),
        ("losses", "heron.losses.supervised.WeightedSupervised.forward"),
        ("metrics", "heron.evaluation.metrics.label_auc"),
        ("terms", "heron.losses.run.Memory.update"),
        ("sources", "heron.sources.base.FileSource.load"),
        ("encoders", "heron.models.options.OwnEncoder.build"),
    ):
        assert f'id="{name}"' in (site / "reference" / page / "index.html").read_text()


def test_the_reference_of_the_configuration_has_every_key_and_its_meaning(site: Path) -> None:
    page = (site / "reference" / "configuration" / "index.html").read_text()
    keys = [key for key in describe_keys() if key.type != "section"]
    assert len(keys) > 150
    assert [key.name for key in keys if f"<code>{key.name}</code>" not in page] == []
    assert "residual layers of each stage." in page


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_every_guide_has_a_picture_that_is_described_and_small(guide: Path) -> None:
    found = PICTURE.findall(guide.read_text())
    assert found
    for description, name in found:
        assert len(description) > 10
        assert (DOCS / "pictures" / name).stat().st_size < LARGEST


def test_every_picture_is_on_a_page() -> None:
    pages = [*DOCS.rglob("*.md"), ROOT / "README.md"]
    text = "".join(p.read_text() for p in pages)
    assert [p.name for p in DOCS.glob("pictures/*") if f"pictures/{p.name})" not in text] == []


def test_the_chart_of_scores_is_of_numbers_in_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    import make_published

    assert make_published.unstated() == []
    made_up = [*make_published.SCORES, ("made up", ".0001", ".9999")]
    monkeypatch.setattr(make_published, "SCORES", made_up)
    assert make_published.unstated() == ["made up"]


def test_the_glossary_has_each_word_once_and_one_sentence_for_it() -> None:
    entries = re.findall(
        r"^(\S.*)\n:   (.+(?:\n    .+)*)", (DOCS / "glossary.md").read_text(), re.M
    )
    words = [
        re.sub(r"\(.*?\)", "", word).strip() for names, _ in entries for word in names.split(", ")
    ]
    assert len(words) > 60
    assert len(words) == len(set(words))
    assert [names for names, text in entries if not text.endswith((".", ".)"))] == []


def test_the_commands_of_the_first_page_are_those_of_the_readme() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    commands = [line.removeprefix(".venv/bin/") for text in blocks for line in text.splitlines()]
    readme = (ROOT / "README.md").read_text().splitlines()
    assert len(commands) == 2
    assert [line for line in commands if line not in readme] == []
