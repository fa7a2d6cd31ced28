"""Published tables, by the name that `heron reproduce` takes; a group of them has one too."""

from heron.launch.tables.table import PublishedTable, read_tables
from heron.pipeline.config.shipped import CONFIGS

TABLES: dict[str, PublishedTable] = {
    name: table
    for paper in ("herocon", "mulco", "hscl", "graphs")
    for name, table in read_tables(CONFIGS / "tables" / f"{paper}.yaml").items()
}
GROUPS = {"graphs": ("mutag", "ptc", "enzymes", "imdb-b", "imdb-m")}
