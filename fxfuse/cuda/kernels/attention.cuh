// out[b, h, l] = epilogue(sum over s of p[s] * v[s]), p the softmax over s of q[b, h, l] . k[s] * scale + mask[b, h, l, s]:
// attention of few queries to many keys, such as one token to a cache. Reading keys and values is all the work. So each
// is read once, for all queries that share it, and thread blocks share a head's keys if there are few heads.
//
// A warp takes one tile of keys at a time and does not wait for other warps: it keeps the greatest score so far, and
// the sums relative to it (online softmax: Milakov and Gimelshein 2018). It skips tiles that the mask hides from all
// queries, except its first. Warps take tiles in turns, so that a partly filled cache gives every warp work. At the end
// the warps' results are combined: across blocks through their shared memory if they form a cluster, else through the
// workspace.
//
// attention_dots.cuh and attention_mma.cuh have the work of a warp.
#pragma once

#include <cstdint>

#include "device_pass.cuh"
#include "epilogue.cuh"
#include "launch.cuh"
#include "ptx.cuh"
#include "ptx_sm90.cuh"
#include "split_k.cuh"

namespace fxfuse {

// Strides in elements. Channels are contiguous.
struct AttentionStrides {
    int64_t batch, head, row;
};

// Query head h reads key head h / group. A row is a query that reads a key head: row (h % group) * queries + query, of
// group * queries rows.
struct AttentionProblem {
    int64_t batch, key_heads, group, queries, keys, splits;
    AttentionStrides q, k, v, out, mask;
    int64_t mask_key;     // stride along keys
    int64_t mask_period;  // batches after which the mask repeats
    int64_t logs;         // numbers for each head of `logs`, see attention_tiles.cuh
    double scale;
};

// The batch, the head and the tile of rows that a block works on. Blocks begin in the order of their numbers.
// kTilesInTurn: first the first tiles of all heads, then the second ones, and so on. If first ones take longest, no long
// one is left at the end. Otherwise a head's tiles follow each other, so that they find its keys and values in L2.
template <bool kTilesInTurn>
struct AttentionBlock {
    int64_t batch, head;
    int tile;

    static __device__ __forceinline__ AttentionBlock own(int64_t heads) {
        if constexpr (kTilesInTurn) {
            const auto count = static_cast<unsigned>(heads);
            return {blockIdx.x / count, blockIdx.x % count, static_cast<int>(blockIdx.y)};
        }
        return {blockIdx.z, blockIdx.y, static_cast<int>(blockIdx.x)};
    }

#ifndef __CUDACC_RTC__
    static dim3 grid(int64_t tiles, int64_t heads, int64_t batch) {
        const auto x = static_cast<unsigned>(kTilesInTurn ? heads * batch : tiles);
        const auto y = static_cast<unsigned>(kTilesInTurn ? tiles : heads);
        return {x, y, kTilesInTurn ? 1 : static_cast<unsigned>(batch)};
    }
#endif  // __CUDACC_RTC__
};

// Where the keys, values and queries of a block's key head begin, and which query a row is.
template <class Element, class Mask>
struct AttentionHead {
    const AttentionProblem& problem;
    const Element *q, *k, *v;
    const Mask* mask;
    int64_t batch, key_head;

    __device__ __forceinline__ AttentionHead(const AttentionProblem& problem, const Element* q, const Element* k,
                                             const Element* v, const Mask* mask, int64_t batch, int64_t key_head)
        : problem(problem), q(q), k(k), v(v), mask(mask), batch(batch), key_head(key_head) {
        this->k += batch * problem.k.batch + key_head * problem.k.head;
        this->v += batch * problem.v.batch + key_head * problem.v.head;
    }

    struct Place {
        int64_t head, query;
    };
    __device__ __forceinline__ Place place(int row) const {
        const int queries = static_cast<int>(problem.queries);
        return {key_head * problem.group + row / queries, row % queries};
    }
    // Rows beyond the last one read what the last one reads.
    __device__ __forceinline__ int existing(int row) const {
        return min(row, static_cast<int>(problem.group * problem.queries) - 1);
    }
    __device__ __forceinline__ const Element* query(int row) const {
        const Place at = place(existing(row));
        return q + batch * problem.q.batch + at.head * problem.q.head + at.query * problem.q.row;
    }
    __device__ __forceinline__ const Mask* mask_of(int row) const {
        const Place at = place(existing(row));
        const auto own = static_cast<unsigned>(batch) % static_cast<unsigned>(problem.mask_period);
        return mask + own * problem.mask.batch + at.head * problem.mask.head + at.query * problem.mask.row;
    }
};

// The types of the mask where no tensor is one: a query sees all keys, or query l sees the keys up to l.
struct NoMask {};
struct CausalMask {};
template <class Mask>
constexpr bool kIsMask = true;
template <>
constexpr bool kIsMask<NoMask> = false;
template <>
constexpr bool kIsMask<CausalMask> = false;
template <class Mask>
constexpr bool kIsCausal = false;
template <>
constexpr bool kIsCausal<CausalMask> = true;

constexpr float kLog2E = 1.4426950408889634f;  // scores are exponents of two: weights are exp2 of them

// Minus infinity: what the mask adds for a hidden key, and the greatest score of no keys.
__device__ __forceinline__ float nothing() { return __int_as_float(static_cast<int>(0xff800000u)); }

__device__ __forceinline__ float added_for(float number) { return number * kLog2E; }
__device__ __forceinline__ float added_for(Float16 number) { return to_float(number) * kLog2E; }
__device__ __forceinline__ float added_for(BFloat16 number) { return to_float(number) * kLog2E; }
__device__ __forceinline__ float added_for(bool seen) { return seen ? 0.0f : nothing(); }

// What the mask adds to the scores of a tile's keys.
template <int kCount>
struct AddedScores {
    float value[kCount];
};
template <int kCount>
__device__ __forceinline__ bool sees_any(const AddedScores<kCount>& added) {
    bool any = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) any |= added.value[i] != nothing();
    return any;
}

// What a row of the mask adds to the score of `key`. Keys beyond the last one are hidden.
template <class Mask>
__device__ __forceinline__ float read_mask(const Mask* row, const AttentionProblem& problem, int key) {
    if (key >= problem.keys) return nothing();
    if constexpr (kIsMask<Mask>) {
        return added_for(row[key * problem.mask_key]);
    } else {
        return 0.0f;
    }
}

// 2^(before - most): the weight of score `before` relative to the greatest score `most`. 0 if `before` is of no keys.
__device__ __forceinline__ float shrunk(float before, float most) {
    return ptx::exp2(before - (most == nothing() ? 0.0f : most));
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    attention_kernel(const __grid_constant__ AttentionProblem problem, const typename Kernel::Element* __restrict__ q,
                     const typename Kernel::Element* __restrict__ k, const typename Kernel::Element* __restrict__ v,
                     const typename Kernel::Mask* __restrict__ mask, typename Kernel::Output* __restrict__ out,
                     const typename Kernel::More more, const typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(Kernel::run(problem, q, k, v, mask, out, more, epilogue));
}

// How the blocks that share a head's keys combine their results.
enum class Meeting {
    kNone,       // there is one block
    kCluster,    // through each other's shared memory, from sm_90 on
    kWorkspace,  // the last block to arrive reads what all have written
};

// Warp: what a warp does with its tiles.
template <class Warp, class Output_, class Epilogue_, int kWarps, Meeting kMeeting>
struct Attention {
    using Element = typename Warp::Element;
    using Mask = typename Warp::Mask;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = AttentionProblem;
    using More = SplitWorkspace;

    static constexpr bool kMasked = kIsMask<Mask>;
    static constexpr bool kShared = kMeeting == Meeting::kWorkspace;
    static constexpr int kTensors = 4 + kMasked + kShared;  // q, k, v, the mask, out, the workspace
    static constexpr int kWarp = 32, kThreads = kWarps * kWarp;
    static constexpr int kBlocks = kWarps >= Warp::kResident ? 1 : Warp::kResident / kWarps;  // that registers allow
    static constexpr int kRows = Warp::kRows, kPairs = Warp::kWidth / 2;
    static constexpr int kMost = kMeeting == Meeting::kNone ? 1 : kMeeting == Meeting::kCluster ? 16 : 64;  // blocks
    static constexpr int64_t kPart = kRows * (kPairs + 1);  // float2 of the workspace that a block writes

    static __device__ __forceinline__ void run(const Problem& problem, const Element* q, const Element* k,
                                               const Element* v, const Mask* mask, Output* out,
                                               const SplitWorkspace& workspace, const Epilogue& epilogue) {
        __shared__ float2 states[kWarps][kRows];
        __shared__ float2 sums[kWarps][kRows][kPairs];
        const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
        const AttentionHead<Element, Mask> head(problem, q, k, v, mask, blockIdx.z, blockIdx.y);
        const int keys = static_cast<int>(problem.keys), step = static_cast<int>(gridDim.x) * kWarps * Warp::kTile;
        const int begin = (static_cast<int>(blockIdx.x) * kWarps + warp) * Warp::kTile;
        Warp rows(head);
        auto added = rows.read_mask_at(problem, begin);
        for (int first = begin; first < keys; first += step) {
            const auto after = rows.read_mask_at(problem, first + step);
            // The loads of the first tile's keys do not wait for its mask.
            if (first == begin || __any_sync(~0u, sees_any(added))) rows.attend(head, first, added);
            added = after;
        }
        rows.finish(states[warp], sums[warp]);
        __syncthreads();
        const auto of_warp = [&](int other, int row) { return states[other][row]; };
        const auto sum_of_warp = [&](int other, int row, int pair) { return sums[other][row][pair]; };
        if constexpr (kMeeting == Meeting::kCluster) {
            __shared__ float2 own[kRows][kPairs], own_states[kRows];
            for (int index = thread; index < kRows * kPairs; index += kThreads) {
                const int row = index / kPairs, pair = index % kPairs;
                float2 state;
                own[row][pair] = put_together(kWarps, row, pair, of_warp, sum_of_warp, state);
                if (pair == 0) own_states[row] = state;
            }
            ptx::cluster_barrier();
            store(head, out, epilogue, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), static_cast<int>(gridDim.x),
                  [&](int other, int row) { return ptx::load_of_block(&own_states[row], other); },
                  [&](int other, int row, int pair) { return ptx::load_of_block(&own[row][pair], other); });
            ptx::cluster_barrier();  // other blocks may still read this block's memory
        } else if constexpr (kShared) {
            const int splits = static_cast<int>(gridDim.x);
            const int64_t tile = head.batch * problem.key_heads + head.key_head;
            float2* parts = workspace.parts + tile * splits * kPart;
            float2* part = parts + blockIdx.x * kPart;
            for (int index = thread; index < kRows * kPairs; index += kThreads) {
                const int row = index / kPairs, pair = index % kPairs;
                float2 state;
                __stcg(part + index, put_together(kWarps, row, pair, of_warp, sum_of_warp, state));
                if (pair == 0) __stcg(part + kRows * kPairs + row, state);
            }
            __threadfence();  // before the block is counted in
            __syncthreads();
            const bool last = thread == 0 && workspace.is_last(tile, static_cast<unsigned>(splits));
            if (!__syncthreads_or(last)) return;
            __threadfence();
            __shared__ float2 of_splits[kMost][kRows];
            for (int index = thread; index < splits * kRows; index += kThreads) {
                of_splits[index / kRows][index % kRows] =
                    ptx::load_l2_8(parts + index / kRows * kPart + kRows * kPairs + index % kRows, true);
            }
            __syncthreads();
            store(head, out, epilogue, 0, 1, splits, [&](int other, int row) { return of_splits[other][row]; },
                  [&](int other, int row, int pair) {
                      return ptx::load_l2_8(parts + other * kPart + row * kPairs + pair, true);
                  });
        } else {
            store(head, out, epilogue, 0, 1, kWarps, of_warp, sum_of_warp);
        }
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        if (problem.group * problem.queries > kRows || problem.splits > kMost) {
            return cudaErrorInvalidConfiguration;
        }
        const unsigned cluster = kMeeting == Meeting::kCluster ? static_cast<unsigned>(problem.splits) : 1;
        const dim3 grid(static_cast<unsigned>(problem.splits), static_cast<unsigned>(problem.key_heads),
                        static_cast<unsigned>(problem.batch));
        constexpr auto kKernel = attention_kernel<Attention>;
        if (const cudaError_t error = allow_clusters<kKernel>(cluster); error != cudaSuccess) return error;
        const auto workspace = kShared ? SplitWorkspace::make(pointers[kTensors - 1], problem.batch * problem.key_heads)
                                       : SplitWorkspace{};
        return queue_in_clusters(cluster, kKernel, grid, kThreads, 0, stream, problem, reinterpret_cast<const Element*>(pointers[0]),
                     reinterpret_cast<const Element*>(pointers[1]), reinterpret_cast<const Element*>(pointers[2]),
                     reinterpret_cast<const Mask*>(pointers[3]), reinterpret_cast<Output*>(pointers[3 + kMasked]),
                     workspace, epilogue);
    }
#endif  // __CUDACC_RTC__

private:
    // Combines the results of `count` warps or blocks. Returns two channels of a row's sum, and sets the row's state: x
    // is the greatest score, y the sum of all weights relative to it.
    template <class States, class Sums>
    static __device__ __forceinline__ float2 put_together(int count, int row, int pair, States states, Sums sums,
                                                          float2& state) {
        constexpr int kTogether = 16;  // reads in flight
        state = make_float2(nothing(), 0.0f);
        for (int other = 0; other < count; ++other) state.x = fmaxf(state.x, states(other, row).x);
        float2 found = make_float2(0.0f, 0.0f);
#pragma unroll kTogether
        for (int other = 0; other < count; ++other) {
            const float2 sum = sums(other, row, pair), others = states(other, row);
            const float shrinks = shrunk(others.x, state.x);
            state.y = fmaf(others.y, shrinks, state.y);
            found.x = fmaf(sum.x, shrinks, found.x);
            found.y = fmaf(sum.y, shrinks, found.y);
        }
        return found;
    }

    // Stores the results of all rows. `block` is one of the `blocks` blocks that share this work.
    template <class States, class Sums>
    static __device__ __forceinline__ void store(const AttentionHead<Element, Mask>& head, Output* out,
                                                 const Epilogue& epilogue, int block, int blocks, int count,
                                                 States states, Sums sums) {
        const Problem& problem = head.problem;
        const int rows = static_cast<int>(problem.group * problem.queries);
        for (int index = block * kThreads + static_cast<int>(threadIdx.x); index < rows * kPairs;
             index += blocks * kThreads) {
            const int row = index / kPairs, pair = index % kPairs;
            const auto at = head.place(row);
            float2 state;
            const float2 found = put_together(count, row, pair, states, sums, state);
            const float scale = state.y == 0.0f ? 0.0f : 1.0f / state.y;  // zeros for a query that sees no keys
            float value[2] = {found.x * scale, found.y * scale};
            epilogue.apply(value, Position{head.batch, at.head * problem.queries + at.query, 2 * pair}, 2);
            Output* to = out + head.batch * problem.out.batch + at.head * problem.out.head + at.query * problem.out.row;
            Elements<Output, 2> result;
            result.set(value);
            result.store_whole(to + 2 * pair);
        }
    }
};

}  // namespace fxfuse
