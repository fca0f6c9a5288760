// The same attention for many queries. A block takes a tile of queries and reads all keys and values, tile after tile,
// through shared memory: the next tile is on its way while this one is computed. Scores are never in memory (online
// softmax, as in attention.cuh; Dao 2023 has the division into warps). attention_products.cuh has the products.
#pragma once

#include <cstdint>

#include "attention.cuh"
#include "attention_products.cuh"
#include "epilogue.cuh"
#include "mma.cuh"
#include "ptx.cuh"

namespace fxfuse {

// What is added to the scores of two neighbouring keys, as it lies in memory.
template <class Mask>
struct alignas(2 * sizeof(Mask)) TwoAdded {
    Mask value[2];
};

// kWidth: channels, a multiple of 8. Distances between rows of q, k and v, and their addresses, are multiples of 16
// bytes. kKeys: of a tile, a multiple of 16. kPairs: whether two keys of the mask can be read at once. kLogs: whether
// the logarithms of the sums that the softmax divides by are stored, for gradients; then each head of queries has its
// own keys. kBlocks: that a multiprocessor has registers for.
template <class Mma, class Mask_, int kWidth, int kKeys, int kWarps, bool kPairs, bool kLogs, int kBlocks_,
          class Output_, class Epilogue_>
struct TiledAttention {
    using Products = AttentionProducts<typename Mma::Unguarded, kWidth, kKeys>;
    using Guarded = AttentionProducts<Mma, kWidth, kKeys>;
    using Element = typename Mma::Element;
    using Mask = Mask_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = AttentionProblem;
    using Head = AttentionHead<Element, Mask>;
    using Added = TwoAdded<Mask>;

    static constexpr bool kMasked = kIsMask<Mask>, kCausal = kIsCausal<Mask>;
    using Block = AttentionBlock<kCausal>;
    using More = float*;  // the logarithms: problem.logs for each head, infinities behind those of its queries
    static constexpr int kTensors = 4 + kMasked + kLogs;  // q, k, v, the mask, out, the logarithms
    static constexpr int kWarp = Products::kWarp, kThreads = kWarps * kWarp;
    static constexpr int kBlocks = kBlocks_;
    static constexpr int kRows = kWarps * kMmaM;  // queries
    static constexpr int kColumns = Products::kColumns, kChannels = Products::kChannels;
    static constexpr int kStage = 2 * Products::kTileBytes;  // bytes of a tile's keys and values

    // Two stages, unless there is one tile of keys.
    static __device__ __host__ __forceinline__ int stages(const Problem& problem) {
        return problem.keys > kKeys ? 2 : 1;
    }

    static __device__ __forceinline__ void run(const Problem& problem, const Element* q, const Element* k,
                                               const Element* v, const Mask* mask, Output* out, float* logs,
                                               const Epilogue& epilogue) {
        extern __shared__ __align__(16) unsigned char attention_shared[];  // [stage][keys, values][key][kStride]
        const auto block = Block::own(problem.key_heads);
        const Head head(problem, q, k, v, mask, block.batch, block.head);
        const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, part = lane % 4;
        const int tile = kCausal ? static_cast<int>(gridDim.y) - 1 - block.tile : block.tile;  // last rows see most keys
        const int first_row = tile * kRows + thread / kWarp * kMmaM + lane / 4;                // and + 8
        const int keys = keys_of_block(problem, tile * kRows);
        const float scale = static_cast<float>(problem.scale) * kLog2E;
        const uint32_t shared = ptx::shared_address(attention_shared);
        const auto keys_at = [&](int stage) { return shared + static_cast<uint32_t>(stage * kStage); };

        Products::template clear_ends<kThreads>(shared, stages(problem) * 2 * kKeys, thread);
        const auto fetch = [&](int first, int stage) {
            Products::template fetch<kThreads>(keys_at(stage), head.k, problem.k.row, head.v, problem.v.row, first, keys,
                                               thread);
        };
        typename Products::Own query;
        const Mask* of_mask[2];
        int own_keys[2];  // how many keys a row sees, if kCausal
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + 8 * half;
            Products::read_own(query, half, head.query(row), part);
            of_mask[half] = kMasked ? head.mask_of(row) : nullptr;
            own_keys[half] = kCausal ? static_cast<int>(head.place(head.existing(row)).query) + 1 : 0;
        }

        float sum[kChannels][4], most[2], total[2];
        const auto attend = [&](auto products) {
            using Chosen = decltype(products);
            fetch(0, 0);
            most[0] = most[1] = nothing();
            total[0] = total[1] = 0.0f;
            Chosen::clear(sum);
            for (int first = 0, stage = 0; first < keys; first += kKeys, stage ^= 1) {
                const int left = keys - first;
                if (left > kKeys) {
                    fetch(first + kKeys, stage ^ 1);
                    ptx::cp_async_wait<1>();
                } else {
                    ptx::cp_async_wait<0>();
                }
                __syncthreads();
                float score[kColumns][4];
                Chosen::multiply_rows(score, query, keys_at(stage), lane);
                Added added[2][kColumns];
                read_mask(added, of_mask, problem, first + 2 * part);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int seen = kCausal ? min(left, own_keys[half] - first) : left;
                    weigh(score, half, most[half], total[half], sum, added[half], seen - 2 * part, scale);
                }
                typename Chosen::A weights[Chosen::kOfRows];
                Chosen::pack(weights, score);
                Chosen::multiply_tile(sum, weights, keys_at(stage) + Chosen::kTileBytes, lane);
                __syncthreads();  // the next tile but one takes this one's memory
            }
        };
        attend(Products());
        if constexpr (Mma::kGuarded) {
            if (__syncthreads_or(!Products::all_finite(sum))) attend(Guarded());
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float all = total[half];
            all += __shfl_xor_sync(~0u, all, 1);
            all += __shfl_xor_sync(~0u, all, 2);
            const int row = first_row + 8 * half;
            const bool exists = row < problem.group * problem.queries;
            if (kLogs && part == 0 && row < problem.logs) {
                // infinite for a query that sees no keys: its weights are zeros for gradients, too
                const float log = exists && all > 0.0f ? most[half] / kLog2E + logf(all) : -nothing();
                logs[(head.batch * problem.key_heads + head.key_head) * problem.logs + row] = log;
            }
            if (!exists) continue;
            const float share = all == 0.0f ? 0.0f : 1.0f / all;  // zeros for a query that sees no keys
            const auto at = head.place(row);
            Output* to = out + head.batch * problem.out.batch + at.head * problem.out.head + at.query * problem.out.row;
#pragma unroll
            for (int j = 0; j < kChannels; ++j) {
                const int channel = j * kMmaN + 2 * part;
                float value[2] = {sum[j][2 * half] * share, sum[j][2 * half + 1] * share};
                epilogue.apply(value, Position{head.batch, at.head * problem.queries + at.query, channel}, 2);
                Elements<Output, 2> result;
                result.set(value);
                result.store_whole(to + channel);
            }
        }
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        const int64_t tiles = (problem.group * problem.queries + kRows - 1) / kRows;
        constexpr auto kKernel = attention_kernel<TiledAttention>;
        const int bytes = stages(problem) * kStage;
        if (const cudaError_t error = allow_shared_memory<kKernel>(bytes); error != cudaSuccess) return error;
        return queue(kKernel, Block::grid(tiles, problem.key_heads, problem.batch), kThreads,
                     static_cast<size_t>(bytes), stream, problem,
                     reinterpret_cast<const Element*>(pointers[0]), reinterpret_cast<const Element*>(pointers[1]),
                     reinterpret_cast<const Element*>(pointers[2]), reinterpret_cast<const Mask*>(pointers[3]),
                     reinterpret_cast<Output*>(pointers[3 + kMasked]),
                     kLogs ? reinterpret_cast<float*>(pointers[kTensors - 1]) : nullptr, epilogue);
    }
#endif  // __CUDACC_RTC__

private:
    // How many keys the rows of a block see. They may be of several heads.
    static __device__ __forceinline__ int keys_of_block(const Problem& problem, int first_row) {
        const int keys = static_cast<int>(problem.keys), queries = static_cast<int>(problem.queries);
        return kCausal ? min(keys, min(first_row % queries + kRows, queries)) : keys;
    }

    // What is added for keys `first` and the next, and for those 8 further on. Nothing is read beyond the last key.
    static __device__ __forceinline__ void read_mask(Added (&added)[2][kColumns], const Mask* const (&of_mask)[2],
                                                     const Problem& problem, int first) {
        if constexpr (kMasked) {
            const int keys = static_cast<int>(problem.keys);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int j = 0; j < kColumns; ++j) {
                    const int key = first + j * kMmaN;
                    Added& two = added[half][j];
                    two = {};
                    if constexpr (kPairs) {
                        if (key + 1 < keys) two = *reinterpret_cast<const Added*>(of_mask[half] + key);
                        if (key + 1 == keys) two.value[0] = of_mask[half][key];
                    } else {
                        if (key < keys) two.value[0] = of_mask[half][key * problem.mask_key];
                        if (key + 1 < keys) two.value[1] = of_mask[half][(key + 1) * problem.mask_key];
                    }
                }
            }
        }
    }

    // Turns 8 queries' scores into weights relative to the greatest score so far, and shrinks the sums accordingly.
    // `left`: the number of keys that the queries see, from the thread's first one on.
    static __device__ __forceinline__ void weigh(float (&score)[kColumns][4], int half, float& most, float& total,
                                                 float (&sum)[kChannels][4], const Added (&added)[kColumns], int left,
                                                 float scale) {
        float top = most;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float plus = 0.0f;
                if constexpr (kMasked) plus = added_for(added[j].value[i]);
                float& one = score[j][2 * half + i];
                one = j * kMmaN + i < left ? fmaf(one, scale, plus) : nothing();
                top = fmaxf(top, one);
            }
        }
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float shrinks = shrunk(most, top);
        most = top;
        total *= shrinks;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& one = score[j][2 * half + i];
                one = shrunk(one, top);
                total += one;
            }
        }
#pragma unroll
        for (int j = 0; j < kChannels; ++j) {
            sum[j][2 * half] *= shrinks;
            sum[j][2 * half + 1] *= shrinks;
        }
    }
};

}  // namespace fxfuse
