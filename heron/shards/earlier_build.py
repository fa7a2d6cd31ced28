"""What a folder holds of an earlier build: a finished one, an unfinished one, or another's."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from heron.base.artefact import MANIFEST, parse_json
from heron.base.atomic import aside_name
from heron.base.errors import ShardError, SourceError
from heron.shards.manifest import JOURNAL, BuiltFrom, Manifest, load_manifest
from heron.shards.source import Source
from heron.shards.store import LocalStore, Store


def describe_earlier(out: Path) -> str:
    """Says what `out` holds that --overwrite moves aside: a build, unfinished ones too, or "".

    Raises SourceError for indexed tars of others, which are no build.
    """
    if not any((out / name).exists() for name in (MANIFEST, JOURNAL)):
        return ""
    with suppress(OSError, ShardError):
        if load_manifest(out).foreign:
            raise SourceError(
                f"{out} has tars that were indexed in place; choose another --out, a new folder "
                "or one of Heron's own builds"
            )
    return "the earlier build"


def describe_unfinished(out: Path, built_from: BuiltFrom, source: Source) -> str:
    """Says what `out` holds of an unfinished build that this one cannot go on with, or ""."""
    if (out / MANIFEST).exists() or not (out / JOURNAL).exists():
        return ""
    if _built_from(LocalStore(out), None, source, built_from) == built_from.model_dump(mode="json"):
        return ""
    if not any(out.glob("*.tar")):  # nothing was finished
        return ""
    return "the unfinished build, with other options or files,"


def _built_from(
    out: Store, manifest: Manifest | None, source: Source, built_from: BuiltFrom
) -> dict[str, Any]:
    """Returns what `out` was built from, by its manifest or, without one, by its journal.

    An option that it lacks was added later, and counts as its default.
    """
    if manifest is not None:
        found: dict[str, Any] = manifest.built_from.model_dump(mode="json")
    else:
        try:
            found = parse_json(out.read_bytes(JOURNAL))
        except ValueError as fault:
            raise ShardError(f"{out.where(JOURNAL)}: {fault}; {_remedy(out)}") from None
    options = found.get("options")
    if found.get("source") == source.name and isinstance(options, dict):
        defaults = {k: field.default for k, field in type(source).model_fields.items()}
        requested = built_from.model_dump(mode="json")["options"]
        found["options"] = {k: defaults[k] for k in requested if k in defaults} | options
    return found


def load_finished(out: Store, built_from: BuiltFrom, source: Source) -> Manifest | None:
    """Returns the manifest if this build is complete; ShardError if `out` holds another build."""
    requested = built_from.model_dump(mode="json")
    names = out.names() or set()
    tars = sorted(name for name in names if name.endswith(".tar"))
    manifest = load_manifest(out) if MANIFEST in names else None
    if manifest is not None or JOURNAL in names:
        found = _built_from(out, manifest, source, built_from)
    elif tars:
        raise ShardError(
            f"{out} has {tars[0]} but neither {MANIFEST} nor {JOURNAL}, so it is not a build of "
            "Heron; choose another --out, or empty it"
        )
    else:
        return None
    if manifest is None and not tars:  # nothing was finished
        return None
    if found != requested:
        what = _difference(found, requested)
        raise ShardError(f"{out} has another build: {what}; {_remedy(out)}")
    return manifest


def _remedy(out: Store) -> str:
    if not isinstance(out, LocalStore):
        return "choose another --out, or remove what is there"
    return f"choose another --out, or add --overwrite, which moves it to {aside_name(out.folder)}"


def _difference(found: dict[str, Any], requested: dict[str, Any]) -> str:
    items = ((k, found.get(k, "unset"), requested.get(k, "unset")) for k in requested | found)
    name, old, new = next((k, old, new) for k, old, new in items if old != new)
    if name == "files":
        return "its input files had other bytes"
    if name == "version":
        source = requested["source"]
        return f"version {old} of the source {source!r} made its rows, not version {new}"
    if name == "options" and isinstance(old, dict):
        return _difference(old, new)
    return f"its {name} is {old!r}, not {new!r}"
