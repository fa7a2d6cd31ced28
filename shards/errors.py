"""What goes wrong with data: shards of ours, and files of a publisher."""

import errno

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # the second: of one user
REBUILD = "build or index it again with --overwrite"
DOWNLOAD = "download it again"
RESTORE = f"restore it from a good copy or {REBUILD}"


class HeronError(Exception):
    """What a user can mend: its message names the thing, what was found, expected, the remedy."""


class ShardError(HeronError):
    """A folder of shards is missing, damaged, or not what its manifest says."""


class SourceError(HeronError):
    """A publisher's file, or an option of the source that reads it, is not what it should be."""
