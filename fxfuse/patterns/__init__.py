"""What may be fused: anchors (anchors.py), how a region grows from one (region.py), and when overwritten values
forbid it (mutation.py)."""

from fxfuse.patterns.anchors import Anchor, Attribute, find_anchor
from fxfuse.patterns.mutation import keep_numbers
from fxfuse.patterns.region import MODE_DEPENDENT, Region, Skipped, find_regions, is_region_alone

__all__ = [
    "MODE_DEPENDENT",
    "Anchor",
    "Attribute",
    "Region",
    "Skipped",
    "find_anchor",
    "find_regions",
    "is_region_alone",
    "keep_numbers",
]
