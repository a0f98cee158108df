"""The client of no_op, in an app that imports torch."""

import torch

from bench_app.no_op import app

__all__ = ["app", "torch"]
