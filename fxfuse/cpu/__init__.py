"""Regions on CPU: the anchor by torch, then one generated pass over its result."""
