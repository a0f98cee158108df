"""The shell and the host with stub GPUs of the tests of commands."""

from cli.conftest import host as host
from cli.conftest import shell as shell
