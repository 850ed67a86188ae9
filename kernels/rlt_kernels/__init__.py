"""Triton kernels and nothing else: modules here import only torch and triton.

Each kernel has a file of its own, with a reference in plain torch beside it. Import the file you need; this
module imports nothing, so that `import rlt_kernels` works on a machine without triton or a GPU.
"""

from __future__ import annotations
