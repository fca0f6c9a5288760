// A warp's part of attention in float32, without tensor cores: kLanes threads share a key.
#pragma once

#include <cstdint>

#include "attention.cuh"
#include "epilogue.cuh"
#include "ptx.cuh"

namespace fxfuse {

// kWidth: channels, a multiple of 16 bytes, as are the row strides and the addresses of q, k and v. kRows: at least
// group * queries. kMaskRows: kRows, or 1 if the mask is the same for all rows. kKeys: keys of a tile for each group of
// kLanes threads.
template <class Element_, class Mask_, int kWidth_, int kRows_, int kMaskRows, int kKeys>
struct DotAttention {
    using Element = Element_;
    using Mask = Mask_;

    static constexpr int kWidth = kWidth_, kRows = kRows_;
    static constexpr int kResident = kRows <= 2 ? 16 : kRows <= 4 ? 12 : 8;  // warps per multiprocessor
    static constexpr int kWarp = 32, kVector = 16 / static_cast<int>(sizeof(Element));
    static constexpr int lanes_for(int vectors) { return vectors <= 1 ? 1 : 2 * lanes_for((vectors + 1) / 2); }
    static constexpr int kLanes = lanes_for(kWidth / kVector);
    static constexpr int kGroups = kWarp / kLanes, kTile = kGroups * kKeys;
    using Vector = Elements<Element, kVector>;
    using Head = AttentionHead<Element, Mask>;
    static_assert(kWidth % kVector == 0 && kLanes <= kWarp && (kMaskRows == 1 || kMaskRows == kRows));

    using Added = AddedScores<kMaskRows * kKeys>;

    __device__ __forceinline__ explicit DotAttention(const Head& head)
        : group(static_cast<int>(threadIdx.x) % kWarp / kLanes),
          col(static_cast<int>(threadIdx.x) % kLanes * kVector),
          exists(kLanes * kVector == kWidth || col < kWidth) {
#pragma unroll
        for (int row = 0; row < kMaskRows; ++row) of_mask[row] = kIsMask<Mask> ? head.mask_of(row) : nullptr;
        const float scale = static_cast<float>(head.problem.scale) * kLog2E;
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            Vector of_query;
            load(of_query, head.query(row) + col, exists);
#pragma unroll
            for (int i = 0; i < kVector; ++i) query[row][i] = of_query[i] * scale;
            state[row] = make_float2(nothing(), 0.0f);
        }
    }

    __device__ __forceinline__ Added read_mask_at(const AttentionProblem& problem, int first) const {
        Added added;
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
#pragma unroll
            for (int row = 0; row < kMaskRows; ++row) {
                added.value[row * kKeys + i] = read_mask(of_mask[row], problem, first + i * kGroups + group);
            }
        }
        return added;
    }

    // Adds a tile's values to the sums, with weights relative to the greatest score so far.
    __device__ __forceinline__ void attend(const Head& head, int first, const Added& added) {
        const AttentionProblem& problem = head.problem;
        Vector of_key[kKeys], of_value[kKeys];
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            const int key = first + i * kGroups + group;
            load(of_key[i], head.k + key * problem.k.row + col, exists && key < problem.keys);
        }
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            const int key = first + i * kGroups + group;
            load(of_value[i], head.v + key * problem.v.row + col, exists && key < problem.keys);
        }
        float weight[kRows][kKeys] = {};
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
#pragma unroll
            for (int j = 0; j < kVector; ++j) {
#pragma unroll
                for (int row = 0; row < kRows; ++row) weight[row][i] = fmaf(query[row][j], of_key[i][j], weight[row][i]);
            }
        }
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
#pragma unroll
            for (int i = 0; i < kKeys; ++i) {
#pragma unroll
                for (int offset = kLanes / 2; offset > 0; offset /= 2) {
                    weight[row][i] += __shfl_xor_sync(~0u, weight[row][i], offset);
                }
            }
            float most = nothing();
#pragma unroll
            for (int i = 0; i < kKeys; ++i) {
                weight[row][i] += added.value[row % kMaskRows * kKeys + i];
                most = fmaxf(most, weight[row][i]);
            }
#pragma unroll
            for (int offset = kLanes; offset < kWarp; offset *= 2) {
                most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
            }
            most = fmaxf(most, state[row].x);
            const float shrinks = shrunk(state[row].x, most);
            state[row].x = most;
            state[row].y *= shrinks;
#pragma unroll
            for (int i = 0; i < kKeys; ++i) {
                weight[row][i] = shrunk(weight[row][i], most);
                state[row].y += weight[row][i];
            }
#pragma unroll
            for (int j = 0; j < kVector; ++j) sum[row][j] *= shrinks;
        }
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
#pragma unroll
            for (int j = 0; j < kVector; ++j) {
#pragma unroll
                for (int row = 0; row < kRows; ++row) sum[row][j] = fmaf(weight[row][i], of_value[i][j], sum[row][j]);
            }
        }
    }

    // Adds up the sums of the warp's groups, and writes the warp's result.
    __device__ __forceinline__ void finish(float2 (&states)[kRows], float2 (&sums)[kRows][kWidth / 2]) {
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
#pragma unroll
            for (int offset = kLanes; offset < kWarp; offset *= 2) {
                state[row].y += __shfl_xor_sync(~0u, state[row].y, offset);
#pragma unroll
                for (int i = 0; i < kVector; ++i) sum[row][i] += __shfl_xor_sync(~0u, sum[row][i], offset);
            }
            if (group > 0 || !exists) continue;
            states[row] = state[row];  // the same in all lanes
#pragma unroll
            for (int i = 0; i < kVector; i += 2) sums[row][(col + i) / 2] = make_float2(sum[row][i], sum[row][i + 1]);
        }
    }

private:
    const int group, col;
    const bool exists;  // else the thread has no channels
    const Mask* of_mask[kMaskRows];
    float query[kRows][kVector];
    float2 state[kRows];  // the greatest score, and the sum of the weights of the group's keys relative to it
    float sum[kRows][kVector] = {};

    // Loads a vector; zeros unless `is_there`.
    static __device__ __forceinline__ void load(Vector& to, const Element* from, bool is_there) {
        to.clear();
        if (is_there) to.template load_whole<16, true>(from);
    }
};

}  // namespace fxfuse
