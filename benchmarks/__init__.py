"""Measurements of the project beside a yardstick: each prints JSON lines; see README.md."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # as `progress.loading_tensorflow` does
