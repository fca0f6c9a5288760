// out = epilogue(acc), one pass from channels_last to NCHW like pointwise_transposed.cuh, for small planes. A block
// transposes whole planes of kRows channels. These planes follow one another in out, so that the block writes 16 bytes
// at a time however long a plane is. The epilogue is applied on the way to shared memory, by threads that keep to their
// channels: no operand may vary along columns.
#pragma once

#include <cstdint>

#include "device_pass.cuh"
#include "epilogue.cuh"
#include "launch.cuh"
#include "pointwise_transposed.cuh"

namespace fxfuse {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    pointwise_planes_kernel(const __grid_constant__ TransposedProblem problem,
                            const typename Kernel::Element* __restrict__ acc,
                            typename Kernel::Output* __restrict__ out, const typename Kernel::Epilogue epilogue) {
    extern __shared__ __align__(16) unsigned char planes_shared[];
    // Backwards: what was computed last is still in L2.
    FXFUSE_DEVICE_PASS(Kernel::run(gridDim.x - 1 - blockIdx.x, problem, acc, out, epilogue, planes_shared));
}

// Columns of acc, contiguous along rows, start at multiples of 16 bytes and are multiples of 16 bytes long. The same
// holds for images of out, whose rows leave no gaps.
template <class Element_, class Output_, class Epilogue_>
struct PointwisePlanes {
    using Element = Element_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = TransposedProblem;

    static constexpr int kTensors = 2;  // acc, out
    static constexpr int kThreads = 128;
    static constexpr int kVector = 16 / static_cast<int>(sizeof(Element));  // rows that a thread reads at once
    static constexpr int kLanes = 8, kRows = kLanes * kVector;              // 128 bytes of every column
    static constexpr int kStep = kThreads / kLanes, kTogether = 4;          // it reads kTogether columns, kStep apart
    static_assert(!Epilogue::kVariesAlongCols);

    static __device__ __forceinline__ void run(unsigned block, const Problem& problem, const Element* acc, Output* out,
                                               const Epilogue& epilogue, unsigned char* shared) {
        const unsigned tiles = row_tiles(problem), batch = block / tiles;
        const int row = static_cast<int>(block - batch * tiles) * kRows, cols = static_cast<int>(problem.col);
        const int rows = min(kRows, static_cast<int>(problem.row) - row);
        Output* staged = reinterpret_cast<Output*>(shared);
        const int first = static_cast<int>(threadIdx.x) % kLanes * kVector;
        if (first < rows) {
            const Operands operands(epilogue, Position{batch, row + first, 0});
            const Element* from = acc + batch * problem.acc_batch + row + first;
#pragma unroll 1
            for (int col = static_cast<int>(threadIdx.x) / kLanes; col < cols; col += kStep * kTogether) {
                turn(from + col * problem.acc_col, problem.acc_col, cols - col, epilogue, operands,
                     staged + first * cols + col, cols);
            }
        }
        __syncthreads();
        const int pieces = rows * cols * static_cast<int>(sizeof(Output)) / 16;
        const uint4* staged_pieces = reinterpret_cast<const uint4*>(shared);
        uint4* to = reinterpret_cast<uint4*>(out + batch * problem.out_batch + static_cast<int64_t>(row) * cols);
#pragma unroll 4
        for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kThreads) to[i] = staged_pieces[i];
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        const int64_t blocks = problem.batch * row_tiles(problem);
        if (blocks == 0) return cudaSuccess;
        const int64_t bytes = kRows * problem.col * static_cast<int64_t>(sizeof(Output));
        if (blocks > INT32_MAX || bytes > 48 * 1024) return cudaErrorInvalidConfiguration;
        constexpr auto kKernel = pointwise_planes_kernel<PointwisePlanes>;
        return queue(kKernel, static_cast<unsigned>(blocks), kThreads, static_cast<size_t>(bytes), stream, problem,
                     reinterpret_cast<const Element*>(pointers[0]), reinterpret_cast<Output*>(pointers[1]), epilogue);
    }
#endif  // __CUDACC_RTC__

private:
    static __host__ __device__ __forceinline__ unsigned row_tiles(const Problem& problem) {
        return (static_cast<unsigned>(problem.row) + kRows - 1) / kRows;
    }

    // The epilogue's operands for each of a thread's rows.
    struct Operands {
        typename Epilogue::template Values<kTogether, Position> of_row[kVector];

        __device__ __forceinline__ Operands(const Epilogue& epilogue, Position at) {
#pragma unroll
            for (int k = 0; k < kVector; ++k, ++at.row) {
                of_row[k] = epilogue.template load<Runs::kWhole, kTogether>(at, kTogether);
            }
        }
    };

    // Reads a thread's next columns, computes them and stages them in `staged`, whose rows are `pitch` long. Only
    // `left` columns exist from the first on.
    static __device__ __forceinline__ void turn(const Element* from, int64_t acc_col, int left, const Epilogue& epilogue,
                                                const Operands& operands, Output* staged, int pitch) {
        Elements<Element, kVector> read[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            read[i].clear();
            if (i * kStep < left) read[i].template load_whole<16, true>(from + i * kStep * acc_col);
        }
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
            float value[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) value[i] = read[i][k];
            epilogue.apply(value, operands.of_row[k]);
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                if (i * kStep < left) staged[k * pitch + i * kStep] = from_float<Output>(value[i]);
            }
        }
    }
};

}  // namespace fxfuse
