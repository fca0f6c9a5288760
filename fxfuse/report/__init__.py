"""explain(): a report on what was fused into what, which nodes were not fused and why, and which kernels run.

`collect` makes the report of a model, `data` has its classes, `text`, `notebook` and `page` show it.
"""

from fxfuse.report.collect import explain
from fxfuse.report.data import CHAIN, Operations, RegionReport, Report, SkippedReport

__all__ = ["CHAIN", "Operations", "RegionReport", "Report", "SkippedReport", "explain"]
