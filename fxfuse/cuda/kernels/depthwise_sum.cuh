// Computes one output of a depthwise convolution, tap by tap.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"

namespace fxfuse {

// One output before the epilogue, for filters of any size and any stride, dilation and padding. `x` points to the
// output's image.
template <class Element>
__device__ __forceinline__ float depthwise_sum(const Conv2dProblem& problem, const Element* x, const Element* w,
                                               int64_t channel, int row, int col) {
    const int height = static_cast<int>(problem.height), width = static_cast<int>(problem.width);
    const int top = row * static_cast<int>(problem.stride_h) - static_cast<int>(problem.pad_h);
    const int left = col * static_cast<int>(problem.stride_w) - static_cast<int>(problem.pad_w);
    const uint32_t multiplier = static_cast<uint32_t>(problem.out_channels) / static_cast<uint32_t>(problem.groups);
    x += static_cast<uint32_t>(channel) / multiplier * problem.x_channel;
    w += channel * problem.w_filter;
    float sum = 0.0f;
    for (int r = 0; r < static_cast<int>(problem.kernel_height); ++r) {
        const int y = top + r * static_cast<int>(problem.dilation_h);
        if (y < 0 || y >= height) continue;
        for (int s = 0; s < static_cast<int>(problem.kernel_width); ++s) {
            const int at = left + s * static_cast<int>(problem.dilation_w);
            if (at < 0 || at >= width) continue;
            const float value = to_float(__ldg(x + y * problem.x_row + at * problem.x_col));
            sum = fmaf(to_float(__ldg(w + r * problem.w_row + s * problem.w_col)), value, sum);
        }
    }
    return sum;
}

}  // namespace fxfuse
