"""Packages: an optimised model in one file, which runs without a compiler and without the model's own source.

    fxfuse.save(fast, "model.fxfuse", inputs)
    fast = fxfuse.load("model.fxfuse")          # elsewhere: the same versions of torch and Python, a CPU or GPU alike

A package is a zip (archive.py) of the model's graph (entries.py: by torch.export, for the calls of the examples), its
tensors, the kernels that those calls used, and the measurements that chose them. Loading rebuilds the graph and fuses
it again. This asks for the same kernels as before, which come from the package (packaged.py).
"""

from fxfuse.deploy.loaded import LoadedModule
from fxfuse.deploy.loading import load
from fxfuse.deploy.merging import merge
from fxfuse.deploy.saving import Saved, save

__all__ = ["LoadedModule", "Saved", "load", "merge", "save"]
