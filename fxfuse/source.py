"""source(): the C++ or CUDA of a region, with the torch code that it came from as comments."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fxfuse.backend import compiled_graphs
from fxfuse.build import Source
from fxfuse.errors import FxfuseError
from fxfuse.listing import Listing, program_text, region_text
from fxfuse.module import FusedModule, listing_of, state_of


def source(fast: nn.Module, region: int | None = None) -> str:
    """The source of the kernels that run a region, or all regions, with the torch code that each computes as comments.

        print(fxfuse.source(fast, 3))

    Args:
        fast: what fxfuse.optimize returned, what torch.compile(model, backend="fxfuse") returned and was called, or one
            of fxfuse.compiled_graphs().
        region: the number of a region, which the graph's code shows (`print(fast.code)`: "region = 3"). The kernels of
            programs that contain the region follow its own kernels. None for all regions and programs.

    A region has a kernel for each kind of call so far; before the first call there is none, and the text says so.
    Comments are C++'s. Each source appears once.

    Raises FxfuseError for other modules, and for a number that no region has.
    """
    if not isinstance(fast, nn.Module):
        raise FxfuseError(f"source takes an optimised model, not a {type(fast).__name__}")
    models = [fast] if isinstance(fast, FusedModule) else compiled_graphs(fast) if hasattr(fast, "_orig_mod") else ()
    if not models:
        raise FxfuseError(
            f"this {type(fast).__name__} has no kernels: source takes what fxfuse.optimize(model) returns, or "
            'torch.compile(model, backend="fxfuse") after a call'
        )
    seen: set[int] = set()
    graphs = [listing for model in models for listing in _graphs(model, "", seen)]
    known = sorted(found.number for listing in graphs for found in listing.regions)
    if region is not None and region not in known:
        numbers = ", ".join(map(str, known)) or "none"
        raise FxfuseError(f"there is no region {region!r} in this model; its regions are: {numbers}")
    shown: set[Source] = set()
    parts = [
        region_text(listing, found, shown)
        for listing in graphs
        for found in listing.regions
        if region in (None, found.number)
    ]
    for listing in graphs:
        asked = next((found for found in listing.regions if found.number == region), None)
        if region is None or asked is not None:
            parts += [program_text(listing, program, shown, asked) for program in listing.programs]
    return "\n\n\n".join(part for part in parts if part) + "\n"


def _graphs(module: nn.Module, path: str, seen: set[int]) -> Iterator[Listing]:
    """All graphs of a model: those of its parts, those for other arguments, Dynamo's, and those of training."""
    for name, part in module.named_modules():
        if not isinstance(part, FusedModule) or id(part) in seen:
            continue
        seen.add(id(part))
        inner = ".".join(filter(None, (path, name)))
        yield listing_of(part, f"'{inner}'" if inner else "the model")
        state = state_of(part)
        others: list[nn.Module] = list(state.variants.values())
        if state.recapture is not None:
            others += state.recapture.graphs
        for running in state.running:
            if running.training is not None:
                others += [graph for step in running.training.steps for _, graph in step.graphs]
        for other in others:
            yield from _graphs(other, inner, seen)
