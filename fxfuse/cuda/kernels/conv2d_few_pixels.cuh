// Convolution of few pixels, NCHW: a batch of one, on small maps. Such a layer takes about as long as its weight needs to
// arrive and one thing after another to happen, so that everything is asked for at once and no block waits for another:
//
//   - a block computes up to kPixels pixels of an image for kFilters filters, so few that all multiprocessors have one
//   - its warps share the channels, each takes kChunk of them at a time by itself, and they add up what they have last
//   - a lane's weights of a chunk, kGroup channels with all taps, follow one another in memory and go straight to
//     registers, and are used once; x goes to shared memory as it lies in memory
//
// Of a product's K, lane % 4 picks a group of channels: K's order within a chunk is free, as long as both operands have
// the same.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "device_pass.cuh"
#include "divisor.cuh"
#include "launch.cuh"
#include "mma.cuh"
#include "ptx.cuh"

namespace fxfuse {

// kRows, kCols: of a filter. kStages: chunks of a warp that are under way or in use.
template <class Mma_, int kRows_, int kCols_, int kFilters_, int kWarps_, int kStages_>
struct Conv2dFewPixelsConfig {
    using Mma = Mma_;
    using Element = typename Mma::Element;
    static constexpr int kRows = kRows_, kCols = kCols_, kTaps = kRows * kCols;
    static constexpr int kFilters = kFilters_, kPixels = 64;
    static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps;
    static constexpr int kStages = kStages_;
    static constexpr int kPieceBytes = 16, kPiece = kPieceBytes / static_cast<int>(sizeof(Element));
    // Channels of a lane's group, as many as its registers have room for with all taps; groups and channels of a chunk.
    static constexpr int kGroup = kTaps == 1 ? 8 : kPiece, kGroups = 4, kChunk = kGroup * kGroups;
    // Of a multiprocessor, for which it must have registers. Those of weights of many taps leave none to a second block.
    static constexpr int kBlocks = kTaps * kFilters >= 32 ? 256 / kThreads : 512 / kThreads;
    static_assert(kFilters % kMmaN == 0 && kFilters * kPixels % kThreads == 0);
};

// How an image is divided, and what a warp copies of it: channels' planes as far as they are needed, or whole ones, which
// may start anywhere, where kGroup of them follow one another and make a multiple of 16 bytes.
struct Conv2dFewPixelsTiling {
    FastDivisor tiles, images, out_width;
    int tile_pixels;
    bool whole_planes;
    int run;    // elements that a copy takes from where it starts: of a plane, or of a group's planes
    int group;  // from one group of channels to the next in shared memory, in elements

    int stage_bytes;  // of a warp
    int zeros;        // elements that stand for what a filter sees outside the image

#ifndef __CUDACC_RTC__
    template <class Config>
    static Conv2dFewPixelsTiling of(const Conv2dProblem& problem) {
        constexpr int kSize = static_cast<int>(sizeof(typename Config::Element));
        const auto up = [](int64_t value, int64_t to) { return (value + to - 1) / to * to; };
        const int64_t pixels = problem.out_height * problem.out_width, plane = problem.height * problem.width;
        const int64_t tiles = (pixels + Config::kPixels - 1) / Config::kPixels;
        Conv2dFewPixelsTiling tiling{};
        tiling.tiles = FastDivisor(static_cast<unsigned>(tiles));
        tiling.images = FastDivisor(static_cast<unsigned>(problem.images));
        tiling.out_width = FastDivisor(static_cast<unsigned>(problem.out_width));
        tiling.tile_pixels = static_cast<int>((pixels + tiles - 1) / tiles);
        tiling.whole_planes = plane % Config::kPiece != 0 || problem.x_channel % Config::kPiece != 0;
        // Rows of the output that a tile may touch, and of x that they need; a start is rounded down to a whole piece.
        const int64_t rows = (tiling.tile_pixels + problem.out_width - 2) / problem.out_width + 1;
        const int64_t reach = ((rows - 1) * problem.stride_h + Config::kRows) * problem.width + Config::kPiece;
        const int64_t span = up(reach < plane ? reach : plane, Config::kPiece);
        tiling.run = static_cast<int>(tiling.whole_planes ? Config::kGroup * plane : span);
        // Groups are read by lanes next to each other: 8 banks apart.
        const int64_t words = (tiling.whole_planes ? 1 : Config::kGroup) * int64_t{tiling.run} * kSize / 4;
        tiling.group = static_cast<int>((words + (32 + 8 - words % 32) % 32) * 4 / kSize);
        tiling.zeros = Config::kTaps == 1 ? 0 : tiling.whole_planes ? tiling.run : Config::kGroup * tiling.run;
        tiling.stage_bytes = Config::kGroups * tiling.group * kSize;
        return tiling;
    }
#endif  // __CUDACC_RTC__
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kThreads, Kernel::Config::kBlocks)
    conv2d_few_pixels_kernel(const __grid_constant__ Conv2dProblem problem,
                             const __grid_constant__ Conv2dFewPixelsTiling tiling,
                             const typename Kernel::Element* __restrict__ x,
                             const typename Kernel::Element* __restrict__ w,
                             typename Kernel::Output* __restrict__ out, const typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(Kernel::run(problem, tiling, x, w, out, epilogue));
}

// One group of convolutions, x in NCHW with contiguous planes that start at multiples of 16 bytes, or that follow one
// another; filters contiguous in the order (channel, row, column), at multiples of 16 bytes. Channels: whole groups.
template <class Config_, class Output_, class Epilogue_>
struct Conv2dFewPixels {
    using Config = Config_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = Conv2dProblem;
    using Tiling = Conv2dFewPixelsTiling;
    using Mma = typename Config::Mma;
    using Element = typename Config::Element;

    static constexpr int kTensors = 3;  // x, w, out
    static constexpr int kFilters = Config::kFilters, kPixels = Config::kPixels, kTaps = Config::kTaps;
    static constexpr int kThreads = Config::kThreads, kWarps = Config::kWarps, kStages = Config::kStages;
    static constexpr int kGroup = Config::kGroup, kGroups = Config::kGroups, kPiece = Config::kPiece;
    static constexpr int kMmasM = kPixels / kMmaM, kMmasN = kFilters / kMmaN;
    static constexpr int kSlots = 2 * kMmasM;  // pixels of which a lane has elements: rows g and g + 8 of every D
    static constexpr int kSize = static_cast<int>(sizeof(Element));
    static constexpr int kPerWord = 4 / kSize;              // channels in a register of a fragment
    static constexpr int kSteps = kGroup / (2 * kPerWord);  // products of a chunk and tap
    // A warp's part of the sums in shared memory: [filter][pixel], padded so that fragments touch every bank once.
    static constexpr int kPitch = kPixels + 4, kPartBytes = kFilters * kPitch * static_cast<int>(sizeof(float));
    static constexpr int kOutputs = kFilters * kPixels / kThreads;  // of a thread
    static constexpr int kMostShared = 163 * 1024;
    // Whether x is rounded in shared memory: every tap would round it again.
    static constexpr bool kRoundsFirst = kTaps > 1 && kSize == 4;

    static __device__ __forceinline__ void run(const Problem& problem, const Tiling& tiling, const Element* x,
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

        Weights weights(w, problem, first_filter, filters, first_chunk * Config::kChunk, share * Config::kChunk, lane);
        weights.load();
        Input input(x + image * problem.x_image, problem, tiling, first_pixel, pixels, first_chunk * Config::kChunk,
                    shared + warp * own_bytes(tiling), lane);
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            if (stage < own_chunks) input.start(stage);
            ptx::cp_async_commit();
        }
        // A thread stores kOutputs results. What they take of operands is read before it waits for anything.
        typename Epilogue::template Values<1, Position> operands[kOutputs];
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) {
            const int index = thread + i * kThreads;
            operands[i] = epilogue.template load<Runs::kWhole, 1>(
                Position{image, first_filter + min(index / kPixels, filters - 1),
                         first_pixel + min(index % kPixels, pixels - 1)}, 1);
        }

        Element* const zeros = reinterpret_cast<Element*>(shared + kWarps * own_bytes(tiling));
        if (kTaps > 1) {
            for (int i = thread; i < tiling.zeros; i += kThreads) zeros[i] = from_float<Element>(0.0f);
            __syncthreads();
        }

        float sum[kMmasM][kMmasN][4] = {};
#pragma unroll 1
        for (int chunk = 0; chunk < own_chunks; ++chunk) {
            ptx::cp_async_wait<kStages - 1>();
            if (kRoundsFirst) input.round(chunk % kStages);
            __syncwarp();
            const Weights now = weights;
            weights.load();
            multiply(sum, input, input.stage(chunk % kStages), zeros, now);
            __syncwarp();
            if (chunk + kStages < own_chunks) input.start(chunk % kStages);
            ptx::cp_async_commit();
        }
        ptx::cp_async_wait<0>();

        write_part(reinterpret_cast<float*>(shared + warp * own_bytes(tiling)), sum, lane);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) {
            const int index = thread + i * kThreads, filter = index / kPixels, pixel = index % kPixels;
            float value[1] = {0.0f};
#pragma unroll
            for (int part = 0; part < kWarps; ++part) {
                value[0] += reinterpret_cast<const float*>(shared + part * own_bytes(tiling))[filter * kPitch + pixel];
            }
            epilogue.apply(value, operands[i]);
            if (filter < filters && pixel < pixels) {
                out[(image * problem.out_channels + first_filter + filter) * image_pixels + first_pixel + pixel] =
                    from_float<Output>(value[0]);
            }
        }
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        constexpr auto kKernel = &conv2d_few_pixels_kernel<Conv2dFewPixels>;
        const Tiling tiling = Tiling::template of<Config>(problem);
        const int64_t blocks = int64_t{tiling.tiles.divisor} * tiling.images.divisor *
                               ((problem.out_channels + kFilters - 1) / kFilters);
        const int bytes = kWarps * own_bytes(tiling) + tiling.zeros * kSize;
        if (blocks == 0) return cudaSuccess;
        if (blocks > INT32_MAX || bytes > kMostShared) return cudaErrorInvalidConfiguration;
        if (const cudaError_t error = allow_shared_memory<kKernel>(bytes); error != cudaSuccess) return error;
        kKernel<<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(
            problem, tiling, reinterpret_cast<const Element*>(pointers[0]),
            reinterpret_cast<const Element*>(pointers[1]), reinterpret_cast<Output*>(pointers[2]), epilogue);
        return cudaGetLastError();
    }
#endif  // __CUDACC_RTC__

private:
    // Shared memory of a warp: its stages, and then its part of the sums.
    static __host__ __device__ __forceinline__ int own_bytes(const Tiling& tiling) {
        const int stages = kStages * tiling.stage_bytes;
        return stages > kPartBytes ? stages : kPartBytes;
    }

    // What a lane multiplies with in a chunk: of filter lane / 4 of every eight, its group of channels with all taps.
    class Weights {
    public:
        // Of `channels` channels from `first_channel` on.
        __device__ __forceinline__ Weights(const Element* w, const Problem& problem, int first_filter, int filters,
                                           int first_channel, int channels, int lane) {
            const int filter = min(lane / 4, filters - 1), channel = first_channel + lane % 4 * kGroup;
            next_ = w + (first_filter + filter) * problem.w_filter + channel * kTaps;
            channels_left_ = min(static_cast<int>(problem.channels), first_channel + channels) - channel;
#pragma unroll
            for (int n = 0; n < kMmasN; ++n) {
                later_[n] = static_cast<uint32_t>((min(filter + n * kMmaN, filters - 1) - filter) * problem.w_filter);
            }
        }

        // Those of the next chunk; zeros where it does not exist.
        __device__ __forceinline__ void load() {
#pragma unroll
            for (int n = 0; n < kMmasN; ++n) {
                const uint4* source = reinterpret_cast<const uint4*>(next_ + later_[n]);
#pragma unroll
                for (int i = 0; i < kVectors; ++i) {
                    held_[n][i] = channels_left_ > 0 ? __ldg(source + i) : make_uint4(0, 0, 0, 0);
                }
            }
            next_ += Config::kChunk * kTaps;
            channels_left_ -= Config::kChunk;
        }

        // Register `word` of the group's: of channel `word`, or of two.
        __device__ __forceinline__ uint32_t word(int n, int tap, int word) const {
            if constexpr (kSize == 4) return unit(n, word * kTaps + tap);
            const int first = 2 * word * kTaps + tap, second = first + kTaps;
            return __byte_perm(unit(n, first / 2), unit(n, second / 2),
                               (first % 2 != 0 ? 0x0032 : 0x0010) | (second % 2 != 0 ? 0x7600 : 0x5400));
        }

    private:
        static constexpr int kVectors = kGroup * kTaps / kPiece;
        uint4 held_[kMmasN][kVectors];
        const Element* next_;
        uint32_t later_[kMmasN];  // filters, in elements
        int channels_left_;

        __device__ __forceinline__ uint32_t unit(int n, int index) const {
            const uint4& vector = held_[n][index / 4];
            return index % 4 == 0 ? vector.x : index % 4 == 1 ? vector.y : index % 4 == 2 ? vector.z : vector.w;
        }
    };

    // A warp's view of x: what it copies, and where its lanes' pixels are in that.
    class Input {
        const Element* next_;  // of the chunk's first channel, where copies start
        int64_t channel_stride_;
        int channels_left_, plane_left_;  // from there
        const Tiling& tiling_;
        unsigned char* stages_;
        int lane_;
        int at_[kSlots];         // of a pixel's window in the stage, in elements, for this lane's group
        uint32_t seen_[kSlots];  // the taps of it that are inside the image
        int width_, pitch_;      // of a row, of a channel in a stage

    public:
        __device__ __forceinline__ Input(const Element* x, const Problem& problem, const Tiling& tiling, int first_pixel,
                                         int pixels, int channel, unsigned char* stages, int lane)
            : channel_stride_(problem.x_channel),
              channels_left_(static_cast<int>(problem.channels) - channel),
              tiling_(tiling),
              stages_(stages),
              lane_(lane),
              width_(static_cast<int>(problem.width)) {
            const int height = static_cast<int>(problem.height), plane = height * width_;
            const int stride_h = static_cast<int>(problem.stride_h), stride_w = static_cast<int>(problem.stride_w);
            const int pad_h = static_cast<int>(problem.pad_h), pad_w = static_cast<int>(problem.pad_w);
            const int first_row = static_cast<int>(tiling.out_width.divide(first_pixel)) * stride_h - pad_h;
            const int start = tiling.whole_planes ? 0 : min(max(first_row, 0) * width_, plane - 1) / kPiece * kPiece;
            plane_left_ = plane - start;
            pitch_ = tiling.whole_planes ? plane : tiling.run;
            next_ = x + channel * problem.x_channel + start;
#pragma unroll
            for (int slot = 0; slot < kSlots; ++slot) {
                // Slots without a pixel have the last one: nobody stores what comes of it.
                unsigned row = static_cast<unsigned>(first_pixel + min(lane / 4 + slot * 8, pixels - 1));
                const int col = static_cast<int>(tiling.out_width.take(row)) * stride_w - pad_w;
                const int top = static_cast<int>(row) * stride_h - pad_h;
                at_[slot] = lane % 4 * tiling.group + top * width_ + col - start;
                seen_[slot] = 0;
#pragma unroll
                for (int tap = 0; tap < kTaps; ++tap) {
                    const bool inside =
                        static_cast<unsigned>(top + tap / Config::kCols) < static_cast<unsigned>(height) &&
                        static_cast<unsigned>(col + tap % Config::kCols) < static_cast<unsigned>(width_);
                    seen_[slot] |= static_cast<uint32_t>(inside) << tap;
                }
            }
        }

        __device__ __forceinline__ const Element* stage(int index) const {
            return reinterpret_cast<const Element*>(stages_ + index * tiling_.stage_bytes);
        }

        // Starts to copy the next chunk to a stage: zeros for channels that do not exist.
        __device__ __forceinline__ void start(int index) {
            const uint32_t shared = ptx::shared_address(stages_ + index * tiling_.stage_bytes);
            for_each_piece([&](int channel, int from, int to) {
                const int valid = channel < channels_left_ ? Config::kPieceBytes : 0;
                ptx::cp_async_16(shared + to * kSize, next_ + channel * channel_stride_ + from, valid);
            });
            next_ += Config::kChunk * channel_stride_;
            channels_left_ -= Config::kChunk;
        }

        // Rounds what this lane has copied to a stage to TF32.
        __device__ __forceinline__ void round(int index) const {
            unsigned char* shared = stages_ + index * tiling_.stage_bytes;
            for_each_piece([&](int, int, int to) {
                uint4& piece = *reinterpret_cast<uint4*>(shared + to * kSize);
                piece = {Tf32::round_to_tf32(piece.x), Tf32::round_to_tf32(piece.y), Tf32::round_to_tf32(piece.z),
                         Tf32::round_to_tf32(piece.w)};
            });
        }

        // Where a slot's pixel has what a tap sees of the group's first channel.
        __device__ __forceinline__ const Element* seen_by(int tap, int slot, const Element* stage,
                                                          const Element* zeros) const {
            const Element* source = stage + at_[slot] + tap / Config::kCols * width_ + tap % Config::kCols;
            return kTaps == 1 || (seen_[slot] >> tap & 1) != 0 ? source : zeros;
        }

        // A register of a fragment: of channel `word` of the group, or of two.
        __device__ __forceinline__ uint32_t word(const Element* source, int word) const {
            using Bits = Word<kSize>;
            const Bits* bits = reinterpret_cast<const Bits*>(source + word * kPerWord * pitch_);
            if constexpr (kSize == 4) {
                return *bits;
            } else {
                return bits[0] | static_cast<uint32_t>(bits[pitch_]) << 16;
            }
        }

    private:
        // f(channel of the chunk, elements from next_ in its plane, elements in the stage) for this lane's copies.
        template <class Function>
        __device__ __forceinline__ void for_each_piece(Function f) const {
            const int channels = tiling_.whole_planes ? kGroup : 1;  // of a run
            const int length = tiling_.whole_planes ? tiling_.run : min(tiling_.run, plane_left_);
#pragma unroll 1
            for (int channel = 0; channel < Config::kChunk; channel += channels) {
                const int to = channel / kGroup * tiling_.group + channel % kGroup * tiling_.run;
                for (int at = lane_ * kPiece; at < length; at += 32 * kPiece) f(channel, at, to + at);
            }
        }
    };

    // sum += the products of a chunk.
    static __device__ __forceinline__ void multiply(float (&sum)[kMmasM][kMmasN][4], const Input& input,
                                                    const Element* stage, const Element* zeros, const Weights& weights) {
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
            const Element* source[kSlots];
#pragma unroll
            for (int slot = 0; slot < kSlots; ++slot) source[slot] = input.seen_by(tap, slot, stage, zeros);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                typename Mma::A a[kMmasM];
                typename Mma::B b[kMmasN];
#pragma unroll
                for (int m = 0; m < kMmasM; ++m) {
                    uint32_t raw[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) raw[i] = input.word(source[2 * m + i % 2], 2 * step + i / 2);
                    if constexpr (kRoundsFirst) {
                        a[m] = {{raw[0], raw[1], raw[2], raw[3]}};
                    } else {
                        a[m] = Mma::make_a(raw);
                    }
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
