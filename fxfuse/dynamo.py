"""What Dynamo loads when it is asked for the backend "fxfuse": the entry point's module.

Nothing else imports it. So this is where Dynamo, which is loaded by then, learns which functions are operations of the
user's (`fxfuse.register_pointwise`): `import fxfuse` alone must not load Dynamo, which takes a second.
"""

from fxfuse import ops
from fxfuse.backend import compile_graph

__all__ = ["compile_graph"]

ops.keep_in_dynamos_graphs()
