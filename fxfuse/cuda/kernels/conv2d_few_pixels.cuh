// Convolution of few pixels, NCHW: a batch of one, on small maps. Such a layer takes about as long as its weight takes
// to arrive, plus the latencies of dependent steps. So a block asks for everything at once, and none waits for another:
//
//   - a block computes up to kPixels pixels of an image for kFilters filters, so few that all multiprocessors have one
//   - its warps share the channels: each takes kChunk of them at a time by itself; their sums are added up at the end
//   - a lane's weights of a chunk, kGroup channels with all taps, are in registers a chunk ahead; x goes to shared memory
//
// Along a product's K, lane % 4 picks a group of channels. The order of K within a chunk is free, as long as both
// operands have the same order. conv2d_few_pixels_input.cuh copies x and reads it.
#pragma once

#include <cstdint>

#include "conv2d_few_pixels_input.cuh"
#include "conv2d_problem.cuh"
#include "device_pass.cuh"
#include "launch.cuh"
#include "mma.cuh"
#include "ptx.cuh"

namespace fxfuse {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kThreads)
    conv2d_few_pixels_kernel(const __grid_constant__ Conv2dProblem problem,
                             const __grid_constant__ Conv2dFewPixelsTiling tiling,
                             const typename Kernel::Element* __restrict__ x,
                             const typename Kernel::Element* __restrict__ w,
                             typename Kernel::Output* __restrict__ out, const typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(Kernel::run(problem, tiling, x, w, out, epilogue));
}

// Requires groups == 1, a multiple of kGroup channels, and filters contiguous in the order (channel, row, column), at
// multiples of 16 bytes. Input says what it requires of x.
template <class Config_, class Output_, class Epilogue_>
struct Conv2dFewPixels {
    using Config = Config_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = Conv2dFewPixelsProblem;
    using Tiling = Conv2dFewPixelsTiling;
    using Mma = typename Config::Mma;
    using Element = typename Config::Element;
    using Input = FewPixelsInput<Config>;

    static constexpr int kTensors = 3;  // x, w, out
    static constexpr int kFilters = Config::kFilters, kPixels = Config::kPixels, kTaps = Config::kTaps;
    static constexpr int kThreads = Config::kThreads, kWarps = Config::kWarps;
    static constexpr int kStages = Config::kStages, kDepth = Config::kDepth;
    static constexpr int kGroup = Config::kGroup, kPiece = Config::kPiece;
    static constexpr int kMmasM = kPixels / kMmaM, kMmasN = kFilters / kMmaN;
    static constexpr int kSize = static_cast<int>(sizeof(Element));
    static constexpr int kSteps = kGroup * kSize / 8;  // products per chunk and tap: each takes two 4-byte registers
    // A warp's part of the sums in shared memory: [filter][pixel], padded so that fragments touch every bank once.
    static constexpr int kPitch = kPixels + 4, kPartBytes = kFilters * kPitch * static_cast<int>(sizeof(float));
    static constexpr int kResults = kFilters * kPixels, kOwnResults = (kResults + kThreads - 1) / kThreads;
    static constexpr bool kExchanges = kTaps > 1;
    static constexpr int kExchangeBytes = kExchanges ? kMmaN * Config::kChunk * kTaps * kSize : 0;
    static constexpr int kMostShared = 163 * 1024;

    static __device__ __forceinline__ void run(const Conv2dProblem& problem, const Tiling& tiling, const Element* x,
                                               const Element* w, Output* out, const Epilogue& epilogue) {
        extern __shared__ __align__(1024) unsigned char shared[];
        const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
        unsigned block = blockIdx.x;  // filters run slowest, so that blocks which share them run together
        const int image_pixels = static_cast<int>(problem.out_height * problem.out_width);
        const int first_pixel = static_cast<int>(tiling.tiles.take(block)) * tiling.tile_pixels;
        const int64_t image = tiling.images.take(block);
        const int pixels = min(tiling.tile_pixels, image_pixels - first_pixel);
        const int first_filter = static_cast<int>(block) * kFilters;
        const int filters = min(kFilters, static_cast<int>(problem.out_channels) - first_filter);

        const int chunks = (static_cast<int>(problem.channels) + Config::kChunk - 1) / Config::kChunk;
        const int share = (chunks + kWarps - 1) / kWarps;
        const int first_chunk = warp * share, own_chunks = min(share, chunks - first_chunk);
        unsigned char* const own = shared + warp * own_bytes(tiling);
        uint4* const exchange = reinterpret_cast<uint4*>(own + kStages * tiling.stage_bytes);

        Filters of_filters(w, problem, first_filter, filters, first_chunk * Config::kChunk, share * Config::kChunk, lane);
        Weights weights[kDepth];
#pragma unroll
        for (int i = 0; i < kDepth; ++i) of_filters.load(weights[i]);
        Input input(x + image * problem.x_image, problem, tiling, first_pixel, pixels, first_chunk * Config::kChunk, own,
                    lane);
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            if (stage < own_chunks) input.start(stage);
            ptx::cp_async_commit();
        }
        // The thread reads the operands of its results before it waits for anything.
        typename Epilogue::template Values<1, Position> operands[kOwnResults];
#pragma unroll
        for (int i = 0; i < kOwnResults; ++i) {
            const int index = thread + i * kThreads;
            operands[i] = epilogue.template load<Runs::kWhole, 1>(
                Position{image, first_filter + min(index / kPixels, filters - 1),
                         first_pixel + min(index % kPixels, pixels - 1)}, 1);
        }

        float sum[kMmasM][kMmasN][4] = {};
#pragma unroll 1
        for (int first = 0; first < own_chunks; first += kDepth) {
#pragma unroll
            for (int i = 0; i < kDepth; ++i) {
                const int stage = kDepth == 1 ? first % kStages : i;
                if (first + i >= own_chunks) break;
                ptx::cp_async_wait<kStages - 1>();
                __syncwarp();
                const Weights now = Filters::exchanged(weights[i], exchange, lane);
                of_filters.load(weights[i]);
                multiply(sum, input, stage, now);
                __syncwarp();
                if (first + i + kStages < own_chunks) input.start(stage);
                ptx::cp_async_commit();
            }
        }
        ptx::cp_async_wait<0>();

        write_part(reinterpret_cast<float*>(own), sum, lane);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kOwnResults; ++i) {
            const int index = thread + i * kThreads, filter = index / kPixels, pixel = index % kPixels;
            if (filter >= filters || pixel >= pixels) continue;
            float value[1] = {0.0f};
#pragma unroll
            for (int part = 0; part < kWarps; ++part) {
                value[0] += reinterpret_cast<const float*>(shared + part * own_bytes(tiling))[filter * kPitch + pixel];
            }
            epilogue.apply(value, operands[i]);
            out[(image * problem.out_channels + first_filter + filter) * image_pixels + first_pixel + pixel] =
                from_float<Output>(value[0]);
        }
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        constexpr auto kKernel = &conv2d_few_pixels_kernel<Conv2dFewPixels>;
        const Tiling tiling = Tiling::template of<Config>(problem);
        const int64_t blocks = int64_t{tiling.tiles.divisor} * tiling.images.divisor *
                               ((problem.conv.out_channels + kFilters - 1) / kFilters);
        const int bytes = kWarps * own_bytes(tiling);
        if (blocks == 0) return cudaSuccess;
        if (blocks > INT32_MAX || bytes > kMostShared) return cudaErrorInvalidConfiguration;
        if (const cudaError_t error = allow_shared_memory<kKernel>(bytes); error != cudaSuccess) return error;
        return queue(kKernel, static_cast<unsigned>(blocks), kThreads, bytes, stream, problem.conv, tiling,
                     reinterpret_cast<const Element*>(pointers[0]), reinterpret_cast<const Element*>(pointers[1]),
                     reinterpret_cast<Output*>(pointers[2]), epilogue);
    }
#endif  // __CUDACC_RTC__

private:
    // Bytes of shared memory per warp: its stages and the lanes' exchange of weights; later, in their place, its part
    // of the sums.
    static __host__ __device__ __forceinline__ int own_bytes(const Tiling& tiling) {
        const int stages = kStages * tiling.stage_bytes + kExchangeBytes;
        return stages > kPartBytes ? stages : kPartBytes;
    }

    // A lane's weights of a chunk: its group of channels with all taps, of filter lane / 4 of every eight.
    struct Weights {
        static constexpr int kVectors = kGroup * kTaps / kPiece;
        uint4 vector[kMmasN][kVectors];

        // Register `index` of the group: channel `index` or, in 16 bits, channels 2 * index and 2 * index + 1.
        __device__ __forceinline__ uint32_t word(int n, int tap, int index) const {
            if constexpr (kSize == 4) return unit(n, index * kTaps + tap);
            const int first = 2 * index * kTaps + tap, second = first + kTaps;
            return __byte_perm(unit(n, first / 2), unit(n, second / 2),
                               (first % 2 != 0 ? 0x0032 : 0x0010) | (second % 2 != 0 ? 0x7600 : 0x5400));
        }

    private:
        __device__ __forceinline__ uint32_t unit(int n, int index) const {
            const uint4& of = vector[n][index / 4];
            return index % 4 == 0 ? of.x : index % 4 == 1 ? of.y : index % 4 == 2 ? of.z : of.w;
        }
    };

    // Loads weights. With several taps, neighbouring lanes read neighbouring pieces of 16 bytes, whichever lane needs
    // them, and exchange them in shared memory. A lane's own pieces lie side by side: by reading these, lanes would
    // read five times the lines of L1. For 3x3 filters in float32, of the pieces of a filter's chunk:
    //
    //   piece      0 1 2 3 4 5 6 7 8   9 10 11 12 ...  35
    //   read by    0 1 2 3 0 1 2 3 0   1  2  3  0 ...   3     lane % 4
    //   used by    0 0 0 0 0 0 0 0 0   1  1  1  1 ...   3     lane % 4
    class Filters {
        const Element* next_;
        uint32_t later_[kMmasN];  // to the lane's n-th filter, in elements
        int left_;                // elements of a filter from next_ to the last of the warp's channels

    public:
        // For `channels` channels from `first_channel` on.
        __device__ __forceinline__ Filters(const Element* w, const Conv2dProblem& problem, int first_filter, int filters,
                                           int first_channel, int channels, int lane) {
            const int filter = min(lane / 4, filters - 1), begin = first_channel * kTaps + piece(lane, 0) * kPiece;
            next_ = w + (first_filter + filter) * problem.w_filter + begin;
            left_ = min(static_cast<int>(problem.channels), first_channel + channels) * kTaps - begin;
#pragma unroll
            for (int n = 0; n < kMmasN; ++n) {
                later_[n] = static_cast<uint32_t>((min(filter + n * kMmaN, filters - 1) - filter) * problem.w_filter);
            }
        }

        // Loads this lane's pieces of the next chunk; zeros for channels that do not exist.
        __device__ __forceinline__ void load(Weights& weights) {
#pragma unroll
            for (int n = 0; n < kMmasN; ++n) {
#pragma unroll
                for (int i = 0; i < Weights::kVectors; ++i) {
                    const int later = (piece(0, i) - piece(0, 0)) * kPiece;
                    weights.vector[n][i] =
                        later < left_ ? __ldg(reinterpret_cast<const uint4*>(next_ + later_[n] + later))
                                      : make_uint4(0, 0, 0, 0);
                }
            }
            next_ += Config::kChunk * kTaps;
            left_ -= Config::kChunk * kTaps;
        }

        // Exchanges the pieces that lanes have read for those that they multiply with.
        static __device__ __forceinline__ Weights exchanged(const Weights& read, uint4* shared, int lane) {
            if (!kExchanges) return read;
            constexpr int kRow = 4 * Weights::kVectors;  // pieces; rows start at bank 0 and 16 in turns
            Weights own;
#pragma unroll
            for (int n = 0; n < kMmasN; ++n) {
                if (n > 0) __syncwarp();
#pragma unroll
                for (int i = 0; i < Weights::kVectors; ++i) shared[lane / 4 * kRow + piece(lane, i)] = read.vector[n][i];
                __syncwarp();
#pragma unroll
                for (int i = 0; i < Weights::kVectors; ++i) {
                    own.vector[n][i] = shared[lane / 4 * kRow + lane % 4 * Weights::kVectors + i];
                }
            }
            return own;
        }

    private:
        static __device__ __forceinline__ constexpr int piece(int lane, int i) {
            return kExchanges ? lane % 4 + 4 * i : lane % 4 * Weights::kVectors + i;
        }
    };

    // sum += the products of a chunk.
    static __device__ __forceinline__ void multiply(float (&sum)[kMmasM][kMmasN][4], const Input& input, int stage,
                                                    const Weights& weights) {
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                typename Mma::A a[kMmasM];
                typename Mma::B b[kMmasN];
#pragma unroll
                for (int m = 0; m < kMmasM; ++m) {
                    uint32_t raw[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) raw[i] = input.word(stage, 2 * m + i % 2, tap, 2 * step + i / 2);
                    a[m] = Mma::make_a(raw);
                }
#pragma unroll
                for (int n = 0; n < kMmasN; ++n) {
                    const uint32_t raw[2] = {weights.word(n, tap, 2 * step), weights.word(n, tap, 2 * step + 1)};
                    b[n] = Mma::make_b(raw);
                }
                multiply_add<Mma, 0, Mma::kProducts>(sum, 0, a, b);
            }
        }
    }

    static __device__ __forceinline__ void write_part(float* part, const float (&sum)[kMmasM][kMmasN][4], int lane) {
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) {
#pragma unroll
            for (int n = 0; n < kMmasN; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int filter = n * kMmaN + lane % 4 * 2 + i % 2, pixel = m * kMmaM + lane / 4 + i / 2 * 8;
                    part[filter * kPitch + pixel] = sum[m][n][i];
                }
            }
        }
    }
};

}  // namespace fxfuse
