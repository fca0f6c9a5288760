"""Finds what may be fused: anchors (anchors.py), regions that grow from them (region.py), and chains without an anchor
(chain.py). Overwritten values may forbid fusing (mutation.py)."""

from fxfuse.patterns.anchors import Anchor, Attribute, find_anchor
from fxfuse.patterns.find import find_regions
from fxfuse.patterns.mutation import keep_numbers
from fxfuse.patterns.questions import ask_earlier
from fxfuse.patterns.region import Region, Skipped, is_region_alone
from fxfuse.patterns.values import MODE_DEPENDENT

__all__ = [
    "MODE_DEPENDENT",
    "Anchor",
    "Attribute",
    "Region",
    "Skipped",
    "ask_earlier",
    "find_anchor",
    "find_regions",
    "is_region_alone",
    "keep_numbers",
]
