"""Max-pooling after a convolution: a pass over the unpooled result, which can apply the epilogue, too."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

import torch

from fxfuse.cuda import pointwise, tune
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.launch import by_address_on_device, empty_strided, on_device, queue_by_address
from fxfuse.cuda.region import Region
from fxfuse.expression import Acc, Expr
from fxfuse.layout import CHANNELS_LAST, NCHW, Strides, channels_last_strides, contiguous_strides, group
from fxfuse.operands import OperandPlan, plan_operands
from fxfuse.pooling import MaxPool, Separate, pooled
from fxfuse.problem import ByAddress, Run, TensorMeta

NAME = "max_pool2d"


@dataclass(frozen=True)
class Pooling:
    """The pooling of a region's result, which is in NCHW or in channels_last and not in both.

    `shape` and `strides` are those of the pooled result.
    """

    region: Region
    channels_last: bool
    shape: tuple[int, ...]
    strides: Strides

    @classmethod
    def of(cls, region: Region) -> Pooling:
        """The pooling of `region`. Raises Separate where torch must pool."""
        shape, strides = region.prepared.result_shape, region.prepared.result_strides
        if len(shape) != 4:
            raise Separate("one image has no layout")
        result = tuple(pooled(torch.empty(shape, device="meta"), region.problem.pool).shape)
        channels_last = strides == channels_last_strides(shape)
        if channels_last == (strides == contiguous_strides(shape)) or 1 in (*shape[1:], *result[1:]):
            raise Separate("torch's operators do not agree on the layout")
        return cls(
            region, channels_last, result, (channels_last_strides if channels_last else contiguous_strides)(result)
        )

    @property
    def unpooled_bytes(self) -> int:
        """Bytes of the unpooled result."""
        return math.prod(self.region.prepared.result_shape) * self.region.output.itemsize

    def kernel(self, expression: Expr, metas: tuple[TensorMeta, ...], acc: torch.dtype) -> tuple[OperandPlan, Kernel]:
        """The pass that applies `expression` to a result of dtype `acc` and pools the outcome."""
        prepared, pool = self.region.prepared, MaxPool(*self.region.problem.pool)
        shape = prepared.result_shape
        grouping = functools.partial(group, groups=CHANNELS_LAST if self.channels_last else NCHW)
        channel = self.region.channel if metas else frozenset()
        operands = plan_operands(shape, prepared.result_strides, metas, channel, grouping)
        assert operands is not None, "results are contiguous in one of the two layouts"
        size = (self.shape[2], self.shape[3])
        return operands, pointwise.max_pool_kernel(shape, self.channels_last, pool, size, acc, self.region.output)

    def after(self, candidate: tune.Candidate) -> tune.Candidate:
        """`candidate` followed by the pass that only pools."""
        region, shape, strides, output = self.region, self.shape, self.strides, self.region.output
        operands, kernel = self.kernel(Acc(), (), output)

        def compiled() -> Run:
            run = candidate.build()
            queue = queue_by_address(region.problem, operands, kernel, region.load(kernel, Acc(), operands, True))

            def pool(result: torch.Tensor) -> torch.Tensor:
                out = empty_strided(shape, strides, output)
                queue((), result.data_ptr(), out.data_ptr())
                return out

            index = region.problem.x.device.index
            if not isinstance(run, ByAddress):
                return on_device(index, lambda *tensors: pool(run(*tensors)))
            launch = run.launch
            return by_address_on_device(index, lambda tensors, addresses: pool(launch(tensors, addresses)))

        return dataclasses.replace(
            candidate,
            name=f"{candidate.name} + {NAME}",
            identity=f"{candidate.identity} + {NAME}",
            build=compiled,
            workspace=candidate.workspace + self.unpooled_bytes,
        )
