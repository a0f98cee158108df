"""The examples are run by the launcher, as users run them."""

from e2e.conftest import launch as launch
