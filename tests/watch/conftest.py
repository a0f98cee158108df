"""The fixtures ``shell`` and ``host``, a host with stub GPUs, from the tests of commands."""

from cli.conftest import host as host
from cli.conftest import shell as shell
