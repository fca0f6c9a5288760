// One warp's part of attention in 16 bits. Reading is all the work; tensor cores multiply beside it, up to 8 queries in
// the time of one.
//
//   scores [query][key] = q [query][channel] * k [channel][key]        8 rows of q are queries, 8 are empty
//   sums [channel][query] = v [channel][key] * weights [key][query]    v is transposed in registers
//
// Of the scores (D of mma.cuh) a thread has two neighbouring keys of one query: just what it needs of the weights (B).
// Fragments are 16 bytes as they lie in memory. It does not matter which channels are multiplied together, as long as q
// and k agree, nor which channel is which row of the result.
#pragma once

#include <cstdint>

#include "attention.cuh"
#include "epilogue.cuh"
#include "mma.cuh"
#include "ptx.cuh"

namespace fxfuse {

// kWidth: channels, a multiple of 8. So are the distances between rows of q, k and v; their addresses are multiples of
// 16 bytes. kRows: at least group * queries.
template <class Mma, class Mask_, int kWidth_, int kRows_>
struct MmaAttention {
    using Element = typename Mma::Element;
    using Mask = Mask_;

    static constexpr int kWidth = kWidth_, kRows = kRows_;
    static constexpr int kResident = kWidth <= 64 ? 16 : kWidth <= 128 ? 12 : 8;  // warps of a multiprocessor
    static constexpr int kWarp = 32, kVector = 8;
    static constexpr int kHalves = kWidth <= 128 ? 2 : 1, kTile = 8 * kHalves;  // keys
    static constexpr int kOfKeys = (kWidth + 31) / 32;    // reads of a key, which four threads share
    static constexpr int kOfValues = (kWidth + 63) / 64;  // of a value, which eight threads share
    using Head = AttentionHead<Element, Mask>;
    static_assert(kWidth % kVector == 0 && kRows <= kMmaN);

    using Added = AddedScores<2 * kHalves>;  // of keys 2 * part and the next, and of those 8 further on

    __device__ __forceinline__ explicit MmaAttention(const Head& head)
        : group(static_cast<int>(threadIdx.x) % kWarp / 4),
          part(static_cast<int>(threadIdx.x) % 4),
          scale(static_cast<float>(head.problem.scale) * kLog2E),
          of_mask(kIsMask<Mask> ? head.mask_of(group) : nullptr) {
        const Element* row = head.query(group);
#pragma unroll
        for (int i = 0; i < kOfKeys; ++i) query[i] = load(row, channel_of_key(i), true);
    }

    __device__ __forceinline__ Added read_mask_at(const AttentionProblem& problem, int first) const {
        Added added;
#pragma unroll
        for (int i = 0; i < 2 * kHalves; ++i) added.value[i] = read_mask(of_mask, problem, first + key_of(i));
        return added;
    }

    // Adds a tile's values to the sums, weighted relative to the greatest score so far.
    __device__ __forceinline__ void attend(const Head& head, int first, const Added& added) {
        const AttentionProblem& problem = head.problem;
        uint4 of_key[kHalves][kOfKeys], of_value[2 * kHalves][kOfValues];
#pragma unroll
        for (int i = 0; i < kHalves; ++i) {
            const int key = first + group + 8 * i;
            const Element* row = head.k + key * problem.k.row;
#pragma unroll
            for (int j = 0; j < kOfKeys; ++j) of_key[i][j] = load(row, channel_of_key(j), key < problem.keys);
        }
#pragma unroll
        for (int i = 0; i < 2 * kHalves; ++i) {
            const int key = first + key_of(i);
            const Element* row = head.v + key * problem.v.row;
#pragma unroll
            for (int j = 0; j < kOfValues; ++j) of_value[i][j] = load(row, channel_of_value(j), key < problem.keys);
        }
        // [0], [1]: of the group's query; [2], [3]: of an empty row. In two chains, since products wait for each other.
        float score[kHalves][4] = {}, other[kHalves][4] = {};
#pragma unroll
        for (int j = 0; j < kOfKeys; ++j) {
            const auto low = Mma::make_a({query[j].x, 0u, query[j].y, 0u});
            const auto high = Mma::make_a({query[j].z, 0u, query[j].w, 0u});
#pragma unroll
            for (int i = 0; i < kHalves; ++i) {
                const uint4& key = of_key[i][j];
                Mma::template product<0>(score[i], low, Mma::make_b({key.x, key.y}));
                Mma::template product<0>(other[i], high, Mma::make_b({key.z, key.w}));
            }
        }
        float weight[2 * kHalves], top = most;
#pragma unroll
        for (int i = 0; i < 2 * kHalves; ++i) {
            weight[i] = fmaf(score[i / 2][i % 2] + other[i / 2][i % 2], scale, added.value[i]);
            top = fmaxf(top, weight[i]);
        }
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float shrinks = shrunk(most, top);
        most = top;
        total *= shrinks;
#pragma unroll
        for (int i = 0; i < 2 * kHalves; ++i) {
            weight[i] = shrunk(weight[i], most);
            total += weight[i];
        }
        if (__any_sync(~0u, shrinks != 1.0f)) {
            const float first_shrinks = __shfl_sync(~0u, shrinks, part * 8);  // of the queries whose sums a thread has
            const float second_shrinks = __shfl_sync(~0u, shrinks, part * 8 + 4);
#pragma unroll
            for (int j = 0; j < kOfValues; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sum[j][i][0] *= first_shrinks;
                    sum[j][i][1] *= second_shrinks;
                    sum[j][i][2] *= first_shrinks;
                    sum[j][i][3] *= second_shrinks;
                }
            }
        }
        uint32_t weights[kHalves];
#pragma unroll
        for (int i = 0; i < kHalves; ++i) weights[i] = pack_two<Element>(weight[2 * i], weight[2 * i + 1]);
#pragma unroll
        for (int j = 0; j < kOfValues; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t turned[2 * kHalves];  // two keys of a channel, and of the next; the same 8 keys further on
#pragma unroll
                for (int half = 0; half < kHalves; ++half) {
                    const uint32_t first = word_of(of_value[2 * half][j], i);
                    const uint32_t second = word_of(of_value[2 * half + 1][j], i);
                    turned[2 * half] = __byte_perm(first, second, 0x5410);
                    turned[2 * half + 1] = __byte_perm(first, second, 0x7632);
                }
                if constexpr (kHalves == 2) {
                    Mma::template product<0>(sum[j][i], Mma::make_a(turned), Mma::make_b(weights));
                } else {
                    Mma::half_product(sum[j][i], turned, weights[0]);
                }
            }
        }
    }

    // Writes what the whole warp has found.
    __device__ __forceinline__ void finish(float2 (&states)[kRows], float2 (&sums)[kRows][kWidth / 2]) {
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (part == 0 && group < kRows) states[group] = make_float2(most, total);
#pragma unroll
        for (int j = 0; j < kOfValues; ++j) {
            const int channel = channel_of_value(j);
            if (channel >= kWidth) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    if (2 * part + row >= kRows) continue;
                    sums[2 * part + row][channel / 2 + i] = make_float2(sum[j][i][row], sum[j][i][row + 2]);
                }
            }
        }
    }

private:
    const int group, part;
    const float scale;
    const Mask* of_mask;  // of the group's query
    uint4 query[kOfKeys];
    float most = nothing(), total = 0.0f;  // the greatest score of the group's query; the sum of the thread's weights
    float sum[kOfValues][4][4] = {};  // channels 2 * i and the next of the group's, of queries 2 * part and the next

    __device__ __forceinline__ int key_of(int i) const { return 2 * part + i % 2 + i / 2 * 8; }
    __device__ __forceinline__ int channel_of_key(int i) const { return 32 * i + kVector * part; }
    __device__ __forceinline__ int channel_of_value(int i) const { return 64 * i + kVector * group; }

    static __device__ __forceinline__ uint32_t word_of(const uint4& words, int i) {
        return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
    }

    // Zeros beyond the end.
    static __device__ __forceinline__ uint4 load(const Element* row, int channel, bool is_there) {
        return is_there && channel < kWidth ? __ldg(reinterpret_cast<const uint4*>(row + channel)) : uint4{0, 0, 0, 0};
    }
};

}  // namespace fxfuse
