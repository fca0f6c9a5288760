// float32 GEMM on fp16 tensor cores: out[m, n] = epilogue(sum over k of x[m, k] * weight[n, k]). At every launch, a
// kernel (split_halves.cuh) first splits both operands into scaled halves.
//
// Ootomo & Yokota 2022, with a scale for every row. The sum of products is multiplied by the inverse scales, which is
// exact. The error is that of float32 if the numbers of a row are within 2^18 of each other, and grows with their range
// beyond that.
//
// The workspace holds, in this order: the halves of x, the halves of the weight, the exponents of x, the exponents of
// the weight. Each has all rows of the tiles, also those beyond M or N.
#pragma once

#include <cstdint>

#include "device_pass.cuh"
#include "gemm.cuh"
#include "launch.cuh"
#include "split_halves.cuh"

namespace fxfuse {

// kChain: steps of K that tensor cores add up before the sum continues in fp32 (see Sums). kTree: whether these sums
// are first added up to blocks, and blocks to the total.
template <int kTileM, int kTileN, int kWarpsM, int kWarpsN, int kStages, int kChain_, bool kTree_>
struct Fp16x3Config : GemmConfig<Fp16x3, kTileM, kTileN, kWarpsM, kWarpsN, kStages, Sums::kPromoted, Major::kK,
                                 kChunkBytes, kChunkBytes> {
    static constexpr int kChain = kChain_;
    static constexpr bool kTree = kTree_;
};

// A thread block's loop over K. Tiles lie in the workspace as images of the tiles in shared memory, and fragments need
// no conversion. So, unlike Mainloop, this loop has hardly any instructions but reads and products, and orders them by
// hand.
template <class Shape, class ReadX, class ReadW, uint32_t kBytesX, uint32_t kBytesW>
struct HalvesLoop {
    using Mma = typename Shape::Mma;
    static constexpr int kReads = 2;  // per step: hi and lo
    static constexpr int kSteps = kTileBytesOfK / (kReads * kMmaBytesOfK), kStages = Shape::kStages;
    static constexpr int kMmasM = Shape::kMmasM, kMmasN = Shape::kMmasN, kPairs = kMmasN / 2;
    static constexpr int kChain = Shape::kChain, kThreads = Shape::kThreads;
    static constexpr int kBlock = kChain > kSteps ? kChain / kSteps : 1;  // tiles per iteration
    static constexpr int kTreeTiles = 8;                                  // tiles per block of a tree
    static constexpr uint32_t kStageBytes = kBytesX + kBytesW;
    static_assert(kSteps % 2 == 0, "registers of fragments alternate");
    static_assert(kBytesX % (kThreads * kChunkBytes) == 0 && kBytesW % (kThreads * kChunkBytes) == 0);

    using Sum = Accumulators<kMmasM, kMmasN>;

    ReadX read_x;
    ReadW read_w;
    const uint4 *x, *w;  // this thread's first 16 bytes of the next images
    uint32_t raw_x[2][kMmasM][kReads][4], raw_w[2][kReads][4];

    // total = x * w over `tiles` tiles of K, a multiple of kBlock.
    __device__ __forceinline__ void run(Sum& total, uint32_t shared, uint32_t thread, int tiles) {
        const uint32_t own = thread * kChunkBytes;
        uint32_t fill = shared, use = shared;
#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) {
            if (i < tiles) start_copy(fill + own);
            ptx::cp_async_commit();
            fill = next_stage(fill, shared);
        }
        wait_for_copy();
        load_x(0, use, 0);
        load_w(0, use, 0, 0);

        Sum partial, block;
        total.clear();
        partial.clear();
        if constexpr (Shape::kTree) block.clear();
        for (int first = 0; first < tiles; first += kBlock) {
#pragma unroll
            for (int step = 0; step < kBlock * kSteps; ++step) {
                const int in_tile = step % kSteps, next = (step + 1) % kSteps;
#pragma unroll
                for (int pair = 0; pair < kPairs; ++pair) {
                    const int now = (step * kPairs + pair) % 2;
                    const bool last = pair == kPairs - 1;
                    if (in_tile == kSteps - 1 && last) {
                        wait_for_copy();  // of the next tile
                        use = next_stage(use, shared);
                    }
                    load_w(1 - now, use, last ? 0 : pair + 1, last ? next : in_tile);
                    if (last) load_x((step + 1) % 2, use, next);
                    // Chains of different columns restart at different steps: the others keep the tensor cores busy.
                    if ((step - pair * kChain / kPairs) % kChain == 0) {
                        restart(Shape::kTree ? block : total, partial, pair * 2);
                    }
                    multiply_add(partial, pair * 2, step % 2, now);
                    if (in_tile == 0 && pair == 0) {
                        // The copy overwrites the previous tile.
                        if (first + step / kSteps + kStages - 1 < tiles) start_copy(fill + own);
                        ptx::cp_async_commit();
                        fill = next_stage(fill, shared);
                    }
                }
            }
            if constexpr (Shape::kTree) {
                if ((first / kBlock + 1) % (kTreeTiles / kBlock) == 0) {
                    total.add(block);
                    block.clear();
                }
            }
        }
        if constexpr (Shape::kTree) total.add(block);
        total.add(partial);
        ptx::cp_async_wait<0>();
    }

private:
    static __device__ __forceinline__ uint32_t next_stage(uint32_t stage, uint32_t shared) {
        return stage == shared + (kStages - 1) * kStageBytes ? shared : stage + kStageBytes;
    }

    __device__ __forceinline__ void start_copy(uint32_t destination) {
        constexpr int kPassesX = kBytesX / (kThreads * kChunkBytes), kPassesW = kBytesW / (kThreads * kChunkBytes);
#pragma unroll
        for (int i = 0; i < kPassesX; ++i) {
            ptx::cp_async_16(destination + i * kThreads * kChunkBytes, x + i * kThreads);
        }
#pragma unroll
        for (int i = 0; i < kPassesW; ++i) {
            ptx::cp_async_16(destination + kBytesX + i * kThreads * kChunkBytes, w + i * kThreads);
        }
        x += kPassesX * kThreads;
        w += kPassesW * kThreads;
    }

    static __device__ __forceinline__ void wait_for_copy() {
        ptx::cp_async_wait<kStages - 2>();
        __syncthreads();
    }

    __device__ __forceinline__ void load_x(int to, uint32_t stage, int step) {
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) {
#pragma unroll
            for (int i = 0; i < kReads; ++i) read_x.load(raw_x[to][m][i], stage, m, step * kReads + i);
        }
    }

    __device__ __forceinline__ void load_w(int to, uint32_t stage, int pair, int step) {
#pragma unroll
        for (int i = 0; i < kReads; ++i) read_w.load(raw_w[to][i], stage + kBytesX, pair, step * kReads + i);
    }

    static __device__ __forceinline__ void restart(Sum& sum, Sum& partial, int first) {
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) {
#pragma unroll
            for (int n = first; n < first + 2; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sum.value[m][n][i] += partial.value[m][n][i];
                    partial.value[m][n][i] = 0.0f;
                }
            }
        }
    }

    __device__ __forceinline__ void multiply_add(Sum& sum, int first, int of_x, int of_w) {
        typename Mma::A a[kMmasM];
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) {
            const auto& raw = raw_x[of_x][m];
            a[m] = {{raw[0][0], raw[0][1], raw[0][2], raw[0][3]}, {raw[1][0], raw[1][1], raw[1][2], raw[1][3]}};
        }
        const auto& raw = raw_w[of_w];
        const typename Mma::B b[2] = {{{raw[0][0], raw[0][1]}, {raw[1][0], raw[1][1]}},
                                      {{raw[0][2], raw[0][3]}, {raw[1][2], raw[1][3]}}};
        fxfuse::multiply_add<Mma, 0, Mma::kProducts>(sum.value, first, a, b);
    }
};

// What a kernel needs besides the halves: their exponents, and the tensors themselves for numbers that are not finite.
struct HalvesOrigin {
    const float *x, *weight;
    int64_t x_stride, weight_stride_n, weight_stride_k;
    int k;
    const int *x_exponents, *weight_exponents;  // one for each row of all tiles
};

// The 1 in the launch bounds (blocks per multiprocessor) makes ptxas use as many registers as when tiles were measured.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kThreads, 1)
    halves_kernel(const typename Kernel::Problem problem, const HalfPair* __restrict__ x,
                  const HalfPair* __restrict__ weight, typename Kernel::Output* __restrict__ out,
                  const HalvesOrigin origin, const typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(Kernel::run(problem, x, weight, out, origin, epilogue));
}

// Gemm on halves: x and the weight are images of tiles, K is padded.
template <class Config, class Output, class Epilogue>
struct HalvesGemm : Gemm<Config, Output, Epilogue> {
    using Base = Gemm<Config, Output, Epilogue>;
    using typename Base::Problem, typename Base::TileX, typename Base::TileW;
    using Loop = HalvesLoop<Config, typename Base::ReadX, typename Base::ReadW, TileX::kBytes, TileW::kBytes>;
    using Sum = typename Loop::Sum;

    static __device__ __forceinline__ void run(const Problem& problem, const HalfPair* x, const HalfPair* weight,
                                               Output* out, const HalvesOrigin& origin, const Epilogue& epilogue) {
        extern __shared__ __align__(1024) unsigned char shared[];
        if (Base::tile_origin(problem).row >= problem.m) return;
        Sum sum;
        multiply(sum, problem, x, weight, shared);
        const bool finite = unscale(sum, problem, origin);
        float* staging = reinterpret_cast<float*>(shared);
        // Also a barrier: all threads have read the last tile.
        if (__syncthreads_or(!finite)) multiply_not_finite(sum, staging, problem, origin);
        Base::store(problem, Base::tile_origin(problem), sum, staging, out, epilogue);
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const HalfPair* x, const HalfPair* weight, Output* out,
                              const HalvesOrigin& origin, const Epilogue& epilogue, cudaStream_t stream) {
        constexpr auto kKernel = &halves_kernel<HalvesGemm>;
        if (const auto error = allow_shared_memory<kKernel>(Base::kSharedBytes); error != cudaSuccess) return error;
        return queue(kKernel, Base::grid(problem), Base::kThreads, Base::kSharedBytes, stream, problem, x, weight, out,
                     origin, epilogue);
    }
#endif  // __CUDACC_RTC__

private:
    static __device__ __forceinline__ void multiply(Sum& sum, const Problem& problem, const HalfPair* x,
                                                    const HalfPair* weight, unsigned char* shared) {
        const uint32_t thread = ptx::read_thread_index(), lane = thread % 32;
        const auto tile = Base::tile_origin(problem);
        Loop loop{{Config::warp_m(thread), lane},
                  {Config::warp_n(thread), lane},
                  reinterpret_cast<const uint4*>(x + tile.row * problem.k) + thread,
                  reinterpret_cast<const uint4*>(weight + tile.col * problem.k) + thread};
        loop.run(sum, ptx::shared_address(shared), thread, static_cast<int>(problem.k) / kNumbersPerTile);
    }

    // `exponent`: of a row of x plus one of the weight. If both rows are finite, the sum is far below kNotFinite.
    static __device__ __forceinline__ bool is_finite(int exponent) { return exponent < kNotFinite / 2; }

    // Multiplies the sums by the inverse scales. False if an infinity or NaN takes part in one of the thread's sums, or
    // if an undefined exponent beyond M or N looks like one.
    static __device__ __forceinline__ bool unscale(Sum& sum, const Problem& problem, const HalvesOrigin& origin) {
        const uint32_t thread = ptx::read_thread_index(), lane = thread % 32;
        const auto tile = Base::tile_origin(problem);
        const int* of_x = origin.x_exponents + tile.row + Config::warp_m(thread) + lane / 4;
        const int* of_weight = origin.weight_exponents + tile.col + Config::warp_n(thread) + lane % 4 * 2;
        bool finite = true;
#pragma unroll
        for (int m = 0; m < Config::kMmasM; ++m) {
            const int upper = __ldg(of_x + m * kMmaM), lower = __ldg(of_x + m * kMmaM + 8);
#pragma unroll
            for (int n = 0; n < Config::kMmasN; ++n) {
                const int2 both = __ldg(reinterpret_cast<const int2*>(of_weight + n * kMmaN));
                const int exponent[4] = {upper + both.x, upper + both.y, lower + both.x, lower + both.y};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sum.value[m][n][i] = ldexpf(sum.value[m][n][i], exponent[i]);
                    finite = finite && is_finite(exponent[i]);
                }
            }
        }
        return finite;
    }

    // Recomputes in float32, from the tensors themselves, the sums in which an infinity or NaN takes part. This is
    // slow, but only rows and columns that have one need it. Each thread takes sums of its own, in shared memory.
    static __device__ __forceinline__ void multiply_not_finite(Sum& sum, float* staging, const Problem& problem,
                                                               const HalvesOrigin& origin) {
        const auto tile = Base::tile_origin(problem);
        const int rows = static_cast<int>(min(static_cast<int64_t>(Base::kTileM), problem.m - tile.row));
        const int cols = static_cast<int>(min(static_cast<int64_t>(Base::kTileN), problem.n - tile.col));
        Base::stage(sum, staging);
        __syncthreads();
#pragma unroll 1
        for (int i = static_cast<int>(ptx::read_thread_index()); i < rows * Base::kTileN; i += Base::kThreads) {
            const int row = i / Base::kTileN, col = i % Base::kTileN;
            if (col >= cols) continue;
            if (is_finite(origin.x_exponents[tile.row + row] + origin.weight_exponents[tile.col + col])) continue;
            staging[row * Base::kStagingStride + Base::staged_col(col)] = multiply_in_float(tile.row + row, tile.col + col, origin);
        }
        __syncthreads();
        unstage(sum, staging);
        __syncthreads();
    }

    static __device__ __forceinline__ float multiply_in_float(int64_t row, int64_t col, const HalvesOrigin& origin) {
        constexpr int kPiece = 64;
        const float* x = origin.x + row * origin.x_stride;
        const float* weight = origin.weight + col * origin.weight_stride_n;
        float sum = 0.0f;
#pragma unroll 1
        for (int first = 0; first < origin.k && !isnan(sum); first += kPiece) {  // nothing changes NaN
            const int end = min(first + kPiece, origin.k);
#pragma unroll 8
            for (int k = first; k < end; ++k) sum = fmaf(x[k], weight[k * origin.weight_stride_k], sum);
        }
        return sum;
    }

    // The inverse of stage.
    static __device__ __forceinline__ void unstage(Sum& sum, const float* staging) {
        const uint32_t thread = ptx::read_thread_index(), lane = thread % 32;
        const int col = static_cast<int>(Config::warp_n(thread) + lane % 4 * 2);
        const float* rows = staging + (Config::warp_m(thread) + lane / 4) * Base::kStagingStride;
#pragma unroll
        for (int m = 0; m < Config::kMmasM; ++m) {
#pragma unroll
            for (int n = 0; n < Config::kMmasN; ++n) {
                const float* at = rows + m * kMmaM * Base::kStagingStride + Base::staged_col(col + n * kMmaN);
                const float2 upper = *reinterpret_cast<const float2*>(at);
                const float2 lower = *reinterpret_cast<const float2*>(at + 8 * Base::kStagingStride);
                sum.value[m][n][0] = upper.x;
                sum.value[m][n][1] = upper.y;
                sum.value[m][n][2] = lower.x;
                sum.value[m][n][3] = lower.y;
            }
        }
    }
};

// The whole product: the split, then HalvesGemm. kWeightMajor: of the float32 weight. Problem describes the float32 x
// and weight.
template <class Config, Major kWeightMajor, class Output, class Epilogue_>
struct Fp16x3Gemm {
    using Epilogue = Epilogue_;
    using Product = HalvesGemm<Config, Output, Epilogue>;
    using Problem = typename Product::Problem;

    static constexpr int kTensors = 4;  // x, weight, out, workspace

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN;
        const int64_t padded_k = padded(problem.k, kNumbersPerTile * Product::Loop::kBlock);
        const int64_t x_rows = padded(problem.m, kTileM), weight_rows = padded(problem.n, kTileN);
        auto* halves = reinterpret_cast<HalfPair*>(pointers[3]);
        int* exponents = reinterpret_cast<int*>(halves + (x_rows + weight_rows) * padded_k);
        const SplitOperand x{reinterpret_cast<const float*>(pointers[0]), problem.rows.stride,
                             static_cast<int>(problem.m), kTileM, halves, exponents};
        const SplitOperand weight{reinterpret_cast<const float*>(pointers[1]), problem.weight_stride,
                                  static_cast<int>(problem.n), kTileN, halves + x_rows * padded_k,
                                  exponents + x_rows};
        const cudaError_t error =
            launch_split<kWeightMajor>(x, weight, static_cast<int>(problem.k), static_cast<int>(padded_k), stream);
        if (error != cudaSuccess) return error;

        constexpr bool kContiguousK = kWeightMajor == Major::kK;
        const HalvesOrigin origin{x.source,
                                  weight.source,
                                  problem.rows.stride,
                                  kContiguousK ? problem.weight_stride : 1,
                                  kContiguousK ? 1 : problem.weight_stride,
                                  static_cast<int>(problem.k),
                                  x.exponents,
                                  weight.exponents};
        Problem product = problem;
        product.k = padded_k;
        return Product::launch(product, x.halves, weight.halves, reinterpret_cast<Output*>(pointers[2]), origin,
                               epilogue, stream);
    }

private:
    static int64_t padded(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }
#endif  // __CUDACC_RTC__
};

}  // namespace fxfuse
