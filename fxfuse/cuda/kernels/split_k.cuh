// A sum over K that several thread blocks share. Each writes its part of the tile to the workspace in fp32. The block
// that arrives last, whichever it is, adds the parts up in the order of K: results do not depend on timing.
//
// cuda/gemm.py sizes the workspace: one word per tile that counts arrivals (all of them rounded up to 256 bytes), then
// each tile's parts.
#pragma once

#include <cstdint>

#ifndef __CUDACC_RTC__
#include <atomic>
#endif

#include "mainloop.cuh"
#include "mma.cuh"
#include "ptx.cuh"

namespace fxfuse {

// Where a launch's thread blocks meet. Memory comes with undefined contents, and nothing clears it. So a count of
// arrivals is valid only beside this launch's identity. The last block clears both: a captured launch can be replayed.
struct SplitWorkspace {
    static constexpr int kCountBits = 16;  // of a word, the lowest: how many have arrived. The others: the identity.
    static constexpr int64_t kAlignment = 256;

    unsigned long long* arrivals;  // [tiles]
    float2* parts;                 // [tiles][splits][half of a tile's elements]
    unsigned long long launch;

    // Counts the arrival of the calling thread's block at a tile. True for the last of `splits` blocks.
    __device__ __forceinline__ bool is_last(int64_t tile, unsigned splits) const {
        constexpr unsigned long long kCount = (1ull << kCountBits) - 1;
        unsigned long long* word = arrivals + tile;
        unsigned long long seen = *static_cast<volatile unsigned long long*>(word);
        while (true) {
            const unsigned before = (seen & ~kCount) == launch ? static_cast<unsigned>(seen & kCount) : 0;
            const bool last = before + 1 == splits;
            const unsigned long long found = atomicCAS(word, seen, last ? 0 : launch | (before + 1));
            if (found == seen) return last;
            seen = found;
        }
    }

#ifndef __CUDACC_RTC__
    static SplitWorkspace make(uint64_t address, int64_t tiles) {
        const int64_t bytes = tiles * static_cast<int64_t>(sizeof(unsigned long long));
        const int64_t offset = (bytes + kAlignment - 1) / kAlignment * kAlignment;
        return {reinterpret_cast<unsigned long long*>(address), reinterpret_cast<float2*>(address + offset),
                next_identity()};
    }

    // 48 bits that memory will not hold by chance: a count of launches, mixed as in splitmix64 (Steele et al. 2014).
    static unsigned long long next_identity() {
        static std::atomic<uint64_t> launches{0};
        uint64_t bits = (launches.fetch_add(1, std::memory_order_relaxed) + 1) * 0x9e3779b97f4a7c15ull;
        bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ull;
        bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebull;
        return (bits ^ (bits >> 31)) << kCountBits;
    }
#endif  // __CUDACC_RTC__
};

// A block's part of a tile, as the block's threads hold it. Shape is a MainloopShape, `sum` its Accumulators. In the
// workspace, pairs of neighbouring columns lie in the order of threads. Rows beyond the matrix cause no memory traffic;
// in a skinny problem they would be most of it.
template <class Shape>
struct SplitPart {
    using Sum = Accumulators<Shape::kMmasM, Shape::kMmasN>;
    static constexpr int64_t kPairs = Shape::kTileM * Shape::kTileN / 2;

    // `rows` of the tile exist.
    static __device__ __forceinline__ void write(const Sum& sum, float2* part, int rows) {
        for_each_pair([&](int m, int n, int half, int row, int index) {
            const float(&d)[4] = sum.value[m][n];
            if (row < rows) __stcg(part + index, make_float2(d[half * 2], d[half * 2 + 1]));
        });
    }

    static __device__ __forceinline__ void add_all(Sum& sum, const float2* parts, int splits, int rows) {
        sum.clear();
#pragma unroll kTogether
        for (int split = 0; split < splits; ++split) {
            // No branch separates the loads, so that they are under way together.
            Sum part;
            for_each_pair([&](int m, int n, int half, int row, int index) {
                const float2 pair = ptx::load_l2_8(parts + split * kPairs + index, row < rows);
                part.value[m][n][half * 2] = pair.x;
                part.value[m][n][half * 2 + 1] = pair.y;
            });
            sum.add(part);
        }
    }

    // Hands in the block's part of a tile's sums. True for one of the blocks that share the tile: its `sum` is then
    // complete. Called by all threads.
    static __device__ __forceinline__ bool collect(Sum& sum, const SplitWorkspace& workspace, int64_t tile, int split,
                                                   int splits, int rows) {
        float2* parts = workspace.parts + tile * splits * kPairs;
        write(sum, parts + split * kPairs, rows);
        __threadfence();  // before the block's arrival is counted
        __syncthreads();
        const bool last = ptx::read_thread_index() == 0 && workspace.is_last(tile, static_cast<unsigned>(splits));
        if (!__syncthreads_or(last)) return false;
        __threadfence();
        add_all(sum, parts, splits, rows);
        return true;
    }

private:
    // Parts that are read at a time: up to 32 loads of a thread.
    static constexpr int kLoads = static_cast<int>(kPairs / Shape::kThreads);
    static constexpr int kTogether = kLoads >= 32 ? 1 : 32 / kLoads;

    template <class Function>
    static __device__ __forceinline__ void for_each_pair(Function function) {
        const int thread = static_cast<int>(ptx::read_thread_index());
        const int first = static_cast<int>(Shape::warp_m(thread)) + thread % 32 / 4;
#pragma unroll
        for (int m = 0; m < Shape::kMmasM; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int n = 0; n < Shape::kMmasN; ++n) {
                    function(m, n, half, first + m * kMmaM + half * 8,
                             ((m * 2 + half) * Shape::kMmasN + n) * Shape::kThreads + thread);
                }
            }
        }
    }
};

}  // namespace fxfuse
