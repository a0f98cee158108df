"""Puts this folder on sys.path, as a user's app folder would be. Workers inherit the caller's sys.path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
