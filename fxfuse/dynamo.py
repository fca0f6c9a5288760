"""The entry point's module, which Dynamo loads when it is asked for the backend "fxfuse".

Nothing else imports this module, so Dynamo is loaded by then. Here Dynamo learns which functions are the user's own
operations (`fxfuse.register_pointwise`). `import fxfuse` alone must not load Dynamo, which takes a second.
"""

from fxfuse import ops
from fxfuse.backend import compile_graph

__all__ = ["compile_graph"]

ops.keep_in_dynamos_graphs()
