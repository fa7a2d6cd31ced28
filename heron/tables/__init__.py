"""Published tables, by the name that `heron reproduce` takes; a group of them has one too."""

from heron.config.shipped import CONFIGS
from heron.tables.table import PublishedTable, read_tables

TABLES: dict[str, PublishedTable] = {
    name: table
    for paper in ("herocon", "mulco", "hscl", "graphs")
    for name, table in read_tables(CONFIGS / "tables" / f"{paper}.yaml").items()
}
GROUPS = {"graphs": ("mutag", "ptc", "enzymes", "imdb-b", "imdb-m")}
