// Convolution on NCHW by Hopper's warpgroup products (wgmma), built for sm_90a: any stride, dilation, padding and
// groups, and any filter that fits; float32 operands rounded to the nearest TF32 or split in two (3xTF32), or 16-bit
// operands.
//
// A block computes kFilterTile filters of a tile of output pixels. The patch of x under the tile comes to shared memory
// once, a few channels at a time, and serves all taps of the filter. It lies there as [16 bytes of channels][position].
// So a tap's products read 128 consecutive positions, and the tap's shift is an offset of the matrix descriptor.
// Filters are the M operand, pixels the N operand. Split numbers have planes for each part (hi, lo), so that 3xTF32 is
// three products of every tap instead of one.
//
// Positions run along the rows of the patch, which are longer than output rows by the filter's overhang. Results for
// the overhang are computed, but not stored. With a stride, the pixels that a tap reads are not adjacent in x. So
// pixels go to planes by their row and column modulo the stride, and are adjacent there: with stride 2, even columns in
// one plane and odd columns in another.
//
// Producer warpgroups fetch pixels into registers, round or split those of float32, and write them to shared memory
// with a pixel's channels side by side; the copy engine brings filters that were packed beforehand. Consumer warpgroups
// start products, which run asynchronously, and store the results (conv2d_wgmma_store.cuh).
#pragma once

#include <cstdint>

#include "conv2d_wgmma_config.cuh"
#include "conv2d_wgmma_filters.cuh"
#include "conv2d_wgmma_store.cuh"
#include "device_pass.cuh"
#include "launch.cuh"
#include "ptx.cuh"
#include "ptx_sm90.cuh"
#include "wgmma.cuh"

namespace fxfuse {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kThreads, Kernel::Config::kBlocksPerSm)
    conv2d_wgmma_kernel(const __grid_constant__ WgmmaCut cut, const typename Kernel::Element* __restrict__ x,
                        const unsigned char* __restrict__ filters, typename Kernel::Output* __restrict__ out,
                        const __grid_constant__ typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(Kernel::run(cut, x, filters, out, epilogue));
}

template <class Config_, class Output_, class Epilogue_>
struct Conv2dWgmma {
    using Config = Config_;
    using Mma = typename Config::Mma;
    using Element = typename Config::Element;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = Conv2dWgmmaProblem;
    using Filters = WgmmaFilters<Config>;
    using Tile = WgmmaTile<Config>;
    using Ring = WgmmaRing<Config>;
    using Store = WgmmaStore<Config, Output, Epilogue>;
    using Sum = typename Store::Sum;

    static constexpr int kTensors = 4;  // x, w, out, workspace

    static __device__ __forceinline__ void run(const WgmmaCut& cut, const Element* x, const unsigned char* filters,
                                               Output* out, const Epilogue& epilogue) {
        extern __shared__ __align__(128) unsigned char memory[];
        const uint32_t shared = ptx::shared_address(memory);
        prepare(cut, shared);
        if (threadIdx.x >= Config::kConsumers * kWarpgroup) {
            ptx::give_registers<Config::kProducerRegisters>();
            produce(cut, x, filters, shared);
        } else {
            ptx::take_registers<Config::kConsumerRegisters>();
            consume(cut, memory, shared, out, epilogue);
        }
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        constexpr auto kKernel = &conv2d_wgmma_kernel<Conv2dWgmma>;
        const WgmmaCut cut = cut_up<Config>(problem);
        if (cut.tiles == 0) return cudaSuccess;
        if (cut.shared_bytes > Config::kLargestShared) return cudaErrorInvalidConfiguration;
        cudaError_t error = allow_shared_memory<kKernel>(Config::kLargestShared);
        if (error != cudaSuccess) return error;
        unsigned blocks = 0;
        error = resident_blocks<kKernel>(Config::kThreads, Config::kLargestShared, &blocks);
        if (error != cudaSuccess) return error;
        uint4* packed = reinterpret_cast<uint4*>(pointers[3]);
        error = Filters::launch(problem.conv, static_cast<int64_t>(cut.chunks) * cut.steps,
                                reinterpret_cast<const Element*>(pointers[1]), packed, stream);
        if (error != cudaSuccess) return error;
        return queue(kKernel, blocks < cut.tiles ? blocks : cut.tiles, Config::kThreads,
                     static_cast<size_t>(cut.shared_bytes), stream, cut, reinterpret_cast<const Element*>(pointers[0]),
                     reinterpret_cast<const unsigned char*>(packed), reinterpret_cast<Output*>(pointers[2]), epilogue);
    }
#endif  // __CUDACC_RTC__

private:
    static __device__ __forceinline__ void prepare(const WgmmaCut& cut, uint32_t shared) {
        const Ring ring(shared);
        if (threadIdx.x == 0) {
#pragma unroll 1
            for (int stage = 0; stage < cut.stages; ++stage) {
                ptx::barrier_init(ring.full(stage), 4 + 1);  // 4 warps of a producer, 1 for the copy engine
                ptx::barrier_init(ring.empty(stage), 4 * Config::kConsumers);
            }
            ptx::barrier_init_fence();
        }
        for (int tap = static_cast<int>(threadIdx.x); tap < cut.taps; tap += Config::kThreads) {
            const int row = tap / cut.kernel_width * cut.dilation_h, col = tap % cut.kernel_width * cut.dilation_w;
            const int plane = row % cut.stride_h * cut.stride_w + col % cut.stride_w;
            const int patch_row = plane * cut.patch_rows + row / cut.stride_h;
            ptx::store_shared_4(shared + Config::kTapOffset + tap * 4, patch_row * cut.pitch + col / cut.stride_w);
        }
        __syncthreads();
    }

    // ------------------------------------------------------------------------------------------ producers

    // Fills stages; producers take turns.
    static __device__ __forceinline__ void produce(const WgmmaCut& cut, const Element* x, const unsigned char* filters,
                                                   uint32_t shared) {
        const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
        const int producer = static_cast<int>(threadIdx.x) / kWarpgroup - Config::kConsumers;
        const uint32_t sources = shared + cut.sources_at + producer * cut.positions * 4;
        Ring ring(shared);
        int turn = 0;
#pragma unroll 1
        for (unsigned index = blockIdx.x; index < cut.tiles; index += gridDim.x) {
            const Tile tile(cut, index);
            locate(cut, tile, sources, thread);
            const Element* source =
                x + (tile.image * cut.x_image + tile.first_channel * static_cast<int64_t>(cut.x_channel));
            const unsigned char* unit = filters + static_cast<int64_t>(tile.packed) * (cut.chunks * cut.filter_bytes);
#pragma unroll 1
            for (int channel = 0; channel < cut.channels; channel += cut.steps * Config::kStepChannels) {
                if (turn == producer) {
                    const uint32_t stage = shared + Config::kHeaderBytes + ring.stage * cut.stage_bytes;
                    fetch(cut, source, channel, sources, stage, thread, [&] {
                        ptx::barrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
                        if (thread == 0) {
                            ptx::barrier_arrive_expect(ring.full(ring.stage), cut.filter_bytes);
                            ptx::bulk_copy(stage + cut.patch_bytes, unit, cut.filter_bytes, ring.full(ring.stage));
                        }
                    });
                    ptx::async_proxy_fence();
                    __syncwarp();
                    if (thread % 32 == 0) ptx::barrier_arrive(ring.full(ring.stage));
                } else if (cut.stages < Config::kProducers) {
                    // With fewer stages than producers, each must see every phase: a wait knows only its parity.
                    ptx::barrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
                }
                source += static_cast<int64_t>(cut.steps * Config::kStepChannels) * cut.x_channel;
                unit += cut.filter_bytes;
                turn = (turn + 1) % Config::kProducers;
                ring.advance(cut.stages);
            }
        }
    }

    static constexpr uint32_t kOutside = ~0u;

    // Writes to `sources`, for each of this thread's positions, where its pixel is in an image of x, in elements, or
    // kOutside. No other thread reads these.
    static __device__ __forceinline__ void locate(const WgmmaCut& cut, const Tile& tile, uint32_t sources, int thread) {
        const int top = tile.row * cut.stride_h - cut.pad_h, left = tile.col * cut.stride_w - cut.pad_w;
#pragma unroll 1
        for (int position = thread; position < cut.positions; position += kWarpgroup) {
            unsigned rest = static_cast<unsigned>(position);
            const int patch_col = static_cast<int>(cut.by_pitch.take(rest));
            const int patch_row = static_cast<int>(cut.by_patch_rows.take(rest));
            const int plane_col = static_cast<int>(cut.by_stride_w.take(rest));
            const int row = top + patch_row * cut.stride_h + static_cast<int>(rest);
            const int col = left + patch_col * cut.stride_w + plane_col;
            const bool inside = static_cast<unsigned>(row) < static_cast<unsigned>(cut.height) &&
                                static_cast<unsigned>(col) < static_cast<unsigned>(cut.width);
            ptx::store_shared_4(sources + position * 4, inside ? row * cut.x_row + col * cut.x_col : kOutside);
        }
    }

    // Copies a stage's channels, the first of which is `channel`, to `patch`; calls `wait` before the first write. Few
    // warps hide latencies, so an element takes only one address, one load and one rounding.
    template <class Wait>
    static __device__ __forceinline__ void fetch(const WgmmaCut& cut, const Element* source, int channel,
                                                 uint32_t sources, uint32_t patch, int thread, Wait wait) {
        constexpr int kTogether = Config::kTogether, kPieces = Config::kStepPieces;
        bool waits = true;
#pragma unroll 1
        for (int step = 0; step < cut.steps; ++step) {
            const int exist = cut.channels - channel;  // channels from here on
            const bool all = exist >= Config::kStepChannels;
            // A thread without a position waits, too, before it arrives at the full barrier.
            int position = thread;
#pragma unroll 1
            do {
                uint32_t at[kTogether];
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    at[i] = kOutside;
                    if (position + i * kWarpgroup < cut.positions) {
                        at[i] = ptx::load_shared_4(sources + (position + i * kWarpgroup) * 4);
                    }
                }
                Element value[kTogether][kPieces][Config::kPieceChannels];
                const Element* from = source;
#pragma unroll
                for (int j = 0; j < Config::kStepChannels; ++j, from += cut.x_channel) {
#pragma unroll
                    for (int i = 0; i < kTogether; ++i) {
                        Element& to = value[i][j / Config::kPieceChannels][j % Config::kPieceChannels];
                        to = from_float<Element>(0.0f);
                        if (at[i] != kOutside && (all || j < exist)) to = __ldg(from + at[i]);
                    }
                }
                if (waits) wait();
                waits = false;
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    if (position + i * kWarpgroup >= cut.positions) continue;
                    const uint32_t to = patch + (position + i * kWarpgroup) * Config::kPiece;
#pragma unroll
                    for (int j = 0; j < Config::kPartPieces; ++j) {
                        const uint4 operand = Filters::operand(value[i][j % kPieces], j / kPieces);
                        ptx::store_shared_16(to + j * cut.plane_bytes, operand);
                    }
                }
                position += kWarpgroup * kTogether;
            } while (position < cut.positions);
            source += static_cast<int64_t>(Config::kStepChannels) * cut.x_channel;
            channel += Config::kStepChannels;
            patch += Config::kPartPieces * cut.plane_bytes;
        }
    }

    // ------------------------------------------------------------------------------------------- consumers

    static __device__ __forceinline__ void consume(const WgmmaCut& cut, unsigned char* memory, uint32_t shared,
                                                   Output* out, const Epilogue& epilogue) {
        const int warp = static_cast<int>(threadIdx.x) / 32, group_m = warp / 4 % Config::kGroupsM;
        const int first_segment = warp / 4 / Config::kGroupsM * Config::kGroupSegments;
        float* staged = reinterpret_cast<float*>(memory + cut.staged_at + warp * Config::kWarpStagedBytes);
        Ring ring(shared);
        const auto release = [&](int stage) {
            if (threadIdx.x % 32 == 0) ptx::barrier_arrive(ring.empty(stage));
        };
#pragma unroll 1
        for (unsigned index = blockIdx.x; index < cut.tiles; index += gridDim.x) {
            const Tile tile(cut, index);
            const Store store(cut, tile, group_m * Config::kGroupFilters + warp % 4 * 16, epilogue);
            Sum sum;
            const auto stage = [&] { return shared + Config::kHeaderBytes + ring.stage * cut.stage_bytes; };
            const uint32_t filters = cut.patch_bytes + group_m * (Config::kGroupFilters * Config::kPiece);
            if constexpr (Config::kParts > 1) {
                ptx::barrier_wait(ring.full(ring.stage), ring.phase);
                multiply_split(cut, sum, stage(), stage() + filters, first_segment);
                release(ring.stage);
                ring.advance(cut.stages);
            } else {
                int last = 0;
#pragma unroll 1
                for (int chunk = 0; chunk < cut.chunks; ++chunk) {
                    ptx::barrier_wait(ring.full(ring.stage), ring.phase);
                    multiply(cut, sum, stage(), stage() + filters, shared, first_segment, chunk > 0);
                    if (chunk > 0) {
                        ptx::wgmma_wait<1>();
                        release(last);
                    }
                    last = ring.stage;
                    ring.advance(cut.stages);
                }
                ptx::wgmma_wait<0>();
                release(last);
            }
            store.all(sum, first_segment, staged, out, epilogue);
        }
    }

    // Starts the products of a stage. For a filter size known at compile time they are unrolled: a loop would wait for
    // every descriptor.
    static __device__ __forceinline__ void multiply(const WgmmaCut& cut, Sum& sum, uint32_t patch, uint32_t filters,
                                                    uint32_t shared, int first_segment, bool adds) {
        constexpr uint32_t kHalf = Config::kFilterTile * Config::kPiece, kTap = Config::kStepPieces * kHalf / 16;
        // Shuffled from lane 0, so that the compiler knows the value to be the same in the warp: then it goes to
        // uniform registers, of which descriptors are made.
        ptx::Matrix a(__shfl_sync(~0u, filters, 0), kHalf);
        ptx::Matrix b[Config::kGroupSegments];
#pragma unroll
        for (int i = 0; i < Config::kGroupSegments; ++i) {
            const uint32_t position = WgmmaSegment(cut, first_segment + i).position(cut);
            b[i] = ptx::Matrix(__shfl_sync(~0u, patch + position * Config::kPiece, 0), cut.plane_bytes);
        }
        const auto start = [&](uint32_t offset) {
#pragma unroll
            for (int i = 0; i < Config::kGroupSegments; ++i) start_product(Mma{}, sum[i], a, b[i] + offset, adds);
            a = a + kTap;
            adds = true;
        };
        ptx::wgmma_fence();
#pragma unroll 1
        for (int step = 0; step < cut.steps; ++step) {
            if constexpr (Config::kKernel > 0) {
#pragma unroll
                for (int tap = 0; tap < Config::kKernel * Config::kKernel; ++tap) {
                    start(tap / Config::kKernel * static_cast<uint32_t>(cut.pitch) + tap % Config::kKernel);
                }
            } else {
#pragma unroll 1
                for (int tap = 0; tap < cut.taps; ++tap) {
                    start(ptx::load_shared_4(shared + Config::kTapOffset + tap * 4));
                }
            }
#pragma unroll
            for (int i = 0; i < Config::kGroupSegments; ++i) {
                b[i] = b[i] + Config::kStepPieces * cut.plane_bytes / 16;
            }
        }
        ptx::wgmma_commit();
    }

    // All products of split numbers for a tile whose channels are one step. Tensor cores truncate when they accumulate.
    // So the small products, lo times hi and hi times lo, come first, while sums lose nothing of them. The same sums
    // then take the large products of the first half of the taps. The other taps have a sum of their own, which is
    // added in float32: for half a segment at a time, because there are no registers for more.
    static __device__ __forceinline__ void multiply_split(const WgmmaCut& cut, Sum& sum, uint32_t patch,
                                                          uint32_t filters, int first_segment) {
        constexpr int kTaps = Config::kKernel * Config::kKernel, kFirst = (kTaps + 1) / 2;
        constexpr int kRest = Config::kSegment / 4;  // half of a thread's sums of a segment
        static_assert(kTaps > 1, "a filter that is known");
        constexpr uint32_t kHalf = Config::kFilterTile * Config::kPiece, kTap = Config::kStepPieces * kHalf / 16;
        const uint32_t to_lo = Config::kStepPieces * cut.plane_bytes / 16;
        const ptx::Matrix a(__shfl_sync(~0u, filters, 0), kHalf);
        ptx::Matrix b[Config::kGroupSegments];
#pragma unroll
        for (int i = 0; i < Config::kGroupSegments; ++i) {
            const uint32_t position = WgmmaSegment(cut, first_segment + i).position(cut);
            b[i] = ptx::Matrix(__shfl_sync(~0u, patch + position * Config::kPiece, 0), cut.plane_bytes);
        }
        const auto shift = [&](int tap) {
            return tap / Config::kKernel * static_cast<uint32_t>(cut.pitch) + tap % Config::kKernel;
        };
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < Config::kGroupSegments; ++i) {
#pragma unroll
            for (int tap = 0; tap < kTaps; ++tap) {
                start_product(Tf32{}, sum[i], a + (kTaps + tap) * kTap, b[i] + shift(tap), tap > 0);
                start_product(Tf32{}, sum[i], a + tap * kTap, b[i] + (to_lo + shift(tap)), true);
            }
#pragma unroll
            for (int tap = 0; tap < kFirst; ++tap) {
                start_product(Tf32{}, sum[i], a + tap * kTap, b[i] + shift(tap), true);
            }
        }
#pragma unroll
        for (int i = 0; i < Config::kGroupSegments; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float rest[kRest];
                const ptx::Matrix columns = b[i] + half * (Config::kSegment / 2);
                ptx::wgmma_fence();
#pragma unroll
                for (int tap = kFirst; tap < kTaps; ++tap) {
                    start_product(Tf32{}, rest, a + tap * kTap, columns + shift(tap), tap > kFirst);
                }
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
                ptx::sums_fence(sum[i]);
                ptx::sums_fence(rest);
#pragma unroll
                for (int j = 0; j < kRest; ++j) sum[i][half * kRest + j] += rest[j];
            }
        }
    }
};

}  // namespace fxfuse
