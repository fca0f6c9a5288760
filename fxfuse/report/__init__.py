"""explain(): what was fused into what, what was not and why, and which kernels run.

`collect` asks a model, `data` is what it says, `text`, `notebook` and `page` show it.
"""

from fxfuse.report.collect import explain
from fxfuse.report.data import CHAIN, Operations, RegionReport, Report, SkippedReport

__all__ = ["CHAIN", "Operations", "RegionReport", "Report", "SkippedReport", "explain"]
