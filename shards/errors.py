"""What goes wrong with data: shards of ours, and files of a publisher."""

import errno

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # the second: of one user
REBUILD = "build or index it again with --overwrite"
DOWNLOAD = "download it again"
RESTORE = f"restore it from a good copy or {REBUILD}"


class ShardError(Exception):
    """A folder of shards is missing, damaged, or not what its manifest says."""


class SourceError(Exception):
    """A publisher's file, or an option of the source that reads it, is not what it should be."""
