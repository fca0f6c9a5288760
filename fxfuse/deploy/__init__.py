"""Packages: an optimised model in one file that runs where there is no compiler, and not the model's own source.

    fxfuse.save(fast, "model.fxfuse", inputs)
    fast = fxfuse.load("model.fxfuse")          # elsewhere: the same versions of torch and Python, a CPU or GPU alike

A package has the model's graph (entries.py: by torch.export, for the calls of the examples), its tensors, the kernels
that those calls used and what was measured to choose them (archive.py: as a zip). Loading rebuilds the graph and has it
fused again, which asks for the same kernels as before; they come from the package (packaged.py).
"""

from fxfuse.deploy.loaded import LoadedModule
from fxfuse.deploy.loading import load
from fxfuse.deploy.merging import merge
from fxfuse.deploy.saving import Saved, save

__all__ = ["LoadedModule", "Saved", "load", "merge", "save"]
