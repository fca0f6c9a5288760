"""What may be fused: anchors (anchors.py), how a region grows from one (region.py), chains without one (chain.py), and
when overwritten values forbid it (mutation.py)."""

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
