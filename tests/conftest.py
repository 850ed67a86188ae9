"""Settings for every test: one intra-op thread, so that results and timings do not depend on the machine."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
