"""The fixture that runs the examples with the launcher, as users run them."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import Launch, launcher


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return launcher(tmp_path)
