// The gradients of out[l] = sum over s of p[l][s] * v[s], p the softmax over s of q[l] . k[s] * scale + mask[l][s], for
// each head: dq, dk, dv and, if it is asked for, dmask = ds, from dout, from out, and from the logarithms of the sums
// that the softmax divides by.
//
//   dp[l][s] = dout[l] . v[s]                      ds[l][s] = p[l][s] * (dp[l][s] - delta[l])
//   delta[l] = dout[l] . out[l]                    dq[l] = sum over s of ds[l][s] * k[s] * scale
//   dv[s] = sum over l of p[l][s] * dout[l]        dk[s] = sum over l of ds[l][s] * q[l] * scale
//
// The weights p are computed again. One kernel has a tile of queries in each block, reads all keys and values, and writes
// dq, dmask and delta. The next one has a tile of keys, reads all queries and rows of dout, and writes dk and dv. So a sum is
// always computed in the same order: two products more than with atomic additions, and deterministic.
#pragma once

#include <cstdint>

#include "attention.cuh"
#include "attention_products.cuh"
#include "epilogue.cuh"
#include "mma.cuh"
#include "ptx.cuh"

namespace fxfuse {

struct AttentionGradientProblem {
    int64_t batch, heads, queries, keys;
    int64_t logs_batch, logs_head;  // strides of the logarithms, one for each query
    AttentionStrides q, k, v, out, dout, dq, dk, dv, mask, dmask;
    int64_t mask_key;  // stride along keys; that of dmask is 1
    double scale;
};

template <class Element, class Mask, class Output>
struct AttentionGradientTensors {
    const Element *q, *k, *v, *out, *dout;
    const float* logs;  // natural logarithms
    const Mask* mask;
    Output *dq, *dk, *dv, *dmask;
    float* deltas;  // [batch][head][query]
};

// kOfKeys: whether the block has keys of its own, and reads queries tile after tile. kOfMask: whether dmask is asked for.
// Epilogue: names the kernel, no more.
template <class Mma, class Mask, int kWidth, int kTile, int kWarps, bool kOfMask, int kBlocks_, class Output,
          class Epilogue, bool kOfKeys>
struct AttentionGradientPass {
    using Products = AttentionProducts<typename Mma::Unguarded, kWidth, kTile>;
    using Guarded = AttentionProducts<Mma, kWidth, kTile>;
    using Element = typename Mma::Element;
    using Problem = AttentionGradientProblem;
    using Tensors = AttentionGradientTensors<Element, Mask, Output>;

    static constexpr bool kMasked = kIsMask<Mask>, kCausal = kIsCausal<Mask>;
    using Block = AttentionBlock<kCausal>;
    static constexpr int kBlocks = kBlocks_;
    static constexpr int kWarp = Products::kWarp, kThreads = kWarps * kWarp;
    static constexpr int kRows = kWarps * kMmaM;
    static constexpr int kColumns = Products::kColumns, kChannels = Products::kChannels;
    static constexpr int kStage = 2 * Products::kTileBytes;
    static constexpr int kOwnBytes = kRows * Products::kStride;  // of one tensor's own rows
    static constexpr int kBytes = 2 * kOwnBytes + 2 * kStage;

    // A tensor's rows for the block's batch and head.
    template <class T>
    struct Rows {
        T* first;
        int64_t stride;
        __device__ __forceinline__ T* row(int number) const { return first + number * stride; }
    };
    template <class T>
    static __device__ __forceinline__ Rows<T> rows_of(const Block& block, T* tensor, const AttentionStrides& strides) {
        return {tensor + block.batch * strides.batch + block.head * strides.head, strides.row};
    }

    static __device__ __forceinline__ void run(const Problem& problem, const Tensors& tensors) {
        // [two tensors][own row][kStride], then [stage][two tensors][row][kStride]
        extern __shared__ __align__(16) unsigned char attention_shared[];
        const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp, part = lane % 4;
        const int queries = static_cast<int>(problem.queries), keys = static_cast<int>(problem.keys);
        const auto at = Block::own(problem.heads);
        const auto q = rows_of(at, tensors.q, problem.q), k = rows_of(at, tensors.k, problem.k);
        const auto v = rows_of(at, tensors.v, problem.v), dout = rows_of(at, tensors.dout, problem.dout);
        const float* logs = tensors.logs + at.batch * problem.logs_batch + at.head * problem.logs_head;
        float* deltas = tensors.deltas + (at.batch * problem.heads + at.head) * problem.queries;
        const auto mask = rows_of(at, tensors.mask, problem.mask);
        const auto one = kOfKeys ? q : k, other = kOfKeys ? dout : v;  // read tile after tile
        const int count = kOfKeys ? keys : queries;                    // of own rows

        // The last queries see the most keys, and the first keys are seen by the most queries.
        const int block = (kCausal && !kOfKeys ? static_cast<int>(gridDim.y) - 1 - at.tile : at.tile) * kRows;
        const int own = block + warp * kMmaM + lane / 4;  // and + 8
        const int begin = kCausal && kOfKeys ? block / kTile * kTile : 0;
        const int end = kOfKeys ? queries : kCausal ? min(keys, block + kRows) : keys;
        const float scale = static_cast<float>(problem.scale) * kLog2E;
        const uint32_t shared = ptx::shared_address(attention_shared);
        const auto tile_at = [&](int stage) { return shared + static_cast<uint32_t>(2 * kOwnBytes + stage * kStage); };
        const auto fetch = [&](int first, int stage) {
            Products::template fetch<kThreads>(tile_at(stage), one.first, one.stride, other.first, other.stride, first,
                                               end, thread);
        };
        Products::template clear_ends<kThreads>(shared, 2 * kRows + 4 * kTile, thread);
        const auto with_one = kOfKeys ? k : q, with_other = kOfKeys ? v : dout;
        Products::template fetch<kThreads, kRows>(shared, with_one.first, with_one.stride, with_other.first,
                                                  with_other.stride, block, count, thread);
        const uint32_t own_one = Products::own_at(shared + static_cast<uint32_t>(warp * kMmaM * Products::kStride), lane);
        const uint32_t own_other = own_one + kOwnBytes;

        float own_log[2] = {}, own_delta[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if constexpr (!kOfKeys) {
                const int row = min(own + 8 * half, count - 1);
                typename Products::Own result, gradient;
                Products::read_own(result, half, rows_of(at, tensors.out, problem.out).row(row), part);
                Products::read_own(gradient, half, dout.row(row), part);
                own_delta[half] = dot(gradient, result, half);
                own_log[half] = logs[row] * kLog2E;
                if (part == 0 && own + 8 * half < count) deltas[row] = own_delta[half];
            }
        }

        float of_one[kChannels][4], of_other[kChannels][4];
        const auto add_up = [&](auto products) {
            using Chosen = decltype(products);
            if (begin < end) fetch(begin, 0);
            Chosen::clear(of_one);
            Chosen::clear(of_other);
            for (int first = begin, stage = 0; first < end; first += kTile, stage ^= 1) {
                if (end - first > kTile) {
                    fetch(first + kTile, stage ^ 1);
                    ptx::cp_async_wait<1>();
                } else {
                    ptx::cp_async_wait<0>();
                }
                __syncthreads();
                float weight[kColumns][4];
                Chosen::multiply_rows(weight, own_one, tile_at(stage), lane);
                for_each([&](int j, int half, int i, int of_tile) {
                    float& one_weight = weight[j][2 * half + i];
                    const int row = first + of_tile, own_row = own + 8 * half;
                    bool seen = row < end;
                    if (kCausal) seen = seen && (kOfKeys ? own_row <= row : row <= own_row);
                    float added = 0.0f;
                    if constexpr (kMasked) {
                        seen = seen && own_row < count;
                        const int query = kOfKeys ? row : own_row, key = kOfKeys ? own_row : row;
                        added = seen ? added_for(mask.row(query)[key * problem.mask_key]) : 0.0f;
                        seen = seen && added != nothing();
                    }
                    const float log = kOfKeys ? (row < end ? __ldg(logs + row) * kLog2E : 0.0f) : own_log[half];
                    one_weight = seen ? ptx::exp2(fmaf(one_weight, scale, added - log)) : 0.0f;
                }, part);
                typename Chosen::A packed[Chosen::kOfRows];
                if constexpr (kOfKeys) {
                    Chosen::pack(packed, weight);
                    Chosen::multiply_tile(of_other, packed, tile_at(stage) + Chosen::kTileBytes, lane);
                }
                float gradient[kColumns][4];
                Chosen::multiply_rows(gradient, own_other, tile_at(stage) + Chosen::kTileBytes, lane);
                for_each([&](int j, int half, int i, int of_tile) {
                    const int row = first + of_tile;
                    const float delta = kOfKeys ? (row < end ? deltas[row] : 0.0f) : own_delta[half];
                    float& one_gradient = gradient[j][2 * half + i];
                    one_gradient = weight[j][2 * half + i] * (one_gradient - delta);
                    if constexpr (kOfMask && !kOfKeys) {
                        const int own_row = own + 8 * half;
                        if (row < end && own_row < count) {
                            rows_of(at, tensors.dmask, problem.dmask).row(own_row)[row] = from_float<Output>(one_gradient);
                        }
                    }
                }, part);
                Chosen::pack(packed, gradient);
                Chosen::multiply_tile(of_one, packed, tile_at(stage), lane);
                __syncthreads();  // the next tile but one takes this one's memory
            }
        };
        add_up(Products());
        if constexpr (Mma::kGuarded) {
            const bool finite = Products::all_finite(of_one) && (!kOfKeys || Products::all_finite(of_other));
            if (__syncthreads_or(!finite)) add_up(Guarded());
        }
        const auto to = kOfKeys ? rows_of(at, tensors.dk, problem.dk) : rows_of(at, tensors.dq, problem.dq);
        store(to, of_one, static_cast<float>(problem.scale), own, count, part);
        if constexpr (kOfKeys) store(rows_of(at, tensors.dv, problem.dv), of_other, 1.0f, own, count, part);
    }

private:
    // Calls function(j, half, i, row of the tile) for each score that a thread has, score[j][2 * half + i].
    template <class Function>
    static __device__ __forceinline__ void for_each(Function function, int part) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int i = 0; i < 2; ++i) function(j, half, i, j * kMmaN + 2 * part + i);
            }
        }
    }

    // The product of two rows that four threads share.
    static __device__ __forceinline__ float dot(const typename Products::Own& a, const typename Products::Own& b,
                                                int half) {
        constexpr int kOfWord = 4 / static_cast<int>(sizeof(Element));
        float sum = 0.0f;
#pragma unroll
        for (int step = 0; step < Products::kSteps; ++step) {
#pragma unroll
            for (int end = 0; end < 2; ++end) {
                Elements<Element, kOfWord> x, y;
                x.unit[0] = a[step][2 * end + half];
                y.unit[0] = b[step][2 * end + half];
#pragma unroll
                for (int i = 0; i < kOfWord; ++i) sum = fmaf(x[i], y[i], sum);
            }
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        return sum;
    }
    static __device__ __forceinline__ void store(const Rows<Output>& to, const float (&sum)[kChannels][4], float factor,
                                                 int own, int count, int part) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = own + 8 * half;
            if (row >= count) continue;
#pragma unroll
            for (int j = 0; j < kChannels; ++j) {
                Elements<Output, 2> result;
                const float value[2] = {sum[j][2 * half] * factor, sum[j][2 * half + 1] * factor};
                result.set(value);
                result.store_whole(to.row(row) + j * kMmaN + 2 * part);
            }
        }
    }
};

template <class Pass>
__global__ void __launch_bounds__(Pass::kThreads, Pass::kBlocks)
    attention_gradient_kernel(const __grid_constant__ AttentionGradientProblem problem,
                              const __grid_constant__ typename Pass::Tensors tensors) {
    FXFUSE_DEVICE_PASS(Pass::run(problem, tensors));
}

template <class Mma, class Mask, int kWidth, int kTile, int kWarps, bool kOfMask, int kBlocks, class Output,
          class Epilogue>
struct AttentionGradient {
    using Element = typename Mma::Element;
    using Problem = AttentionGradientProblem;
    template <bool kOfKeys>
    using Pass = AttentionGradientPass<Mma, Mask, kWidth, kTile, kWarps, kOfMask, kBlocks, Output, Epilogue, kOfKeys>;
    static constexpr bool kMasked = kIsMask<Mask>;
    // q, k, v, out, logs, dout, the mask, dq, dk, dv, dmask, the workspace
    static constexpr int kTensors = 10 + kMasked + kOfMask;

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue&, cudaStream_t stream) {
        const auto read = [&](int i) { return reinterpret_cast<const Element*>(pointers[i]); };
        const auto written = [&](int i) { return reinterpret_cast<Output*>(pointers[i]); };
        constexpr int kMade = 6 + kMasked;
        const typename Pass<false>::Tensors tensors{
            read(0),
            read(1),
            read(2),
            read(3),
            read(5),
            reinterpret_cast<const float*>(pointers[4]),
            kMasked ? reinterpret_cast<const Mask*>(pointers[6]) : nullptr,
            written(kMade),
            written(kMade + 1),
            written(kMade + 2),
            kOfMask ? written(kMade + 3) : nullptr,
            reinterpret_cast<float*>(pointers[kTensors - 1])};
        if (const cudaError_t error = launch_pass<Pass<false>>(problem, tensors, problem.queries, stream);
            error != cudaSuccess) {
            return error;
        }
        return launch_pass<Pass<true>>(problem, tensors, problem.keys, stream);
    }

private:
    template <class Pass>
    static cudaError_t launch_pass(const Problem& problem, const typename Pass::Tensors& tensors, int64_t rows,
                                   cudaStream_t stream) {
        constexpr auto kKernel = attention_gradient_kernel<Pass>;
        const dim3 grid = Pass::Block::grid((rows + Pass::kRows - 1) / Pass::kRows, problem.heads, problem.batch);
        if (const cudaError_t error = allow_shared_memory<kKernel>(Pass::kBytes); error != cudaSuccess) return error;
        return queue(kKernel, grid, Pass::kThreads, static_cast<size_t>(Pass::kBytes), stream, problem, tensors);
    }
#endif  // __CUDACC_RTC__
};

}  // namespace fxfuse
