"""Workers of builds begin as in the tests of shards."""

from tests.shards.conftest import forked_workers as forked_workers
