"""Regions on CUDA devices: one generated kernel each."""
