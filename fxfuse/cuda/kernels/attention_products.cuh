// What a warp does with the rows of attention by tensor cores. A block has rows of its own (queries, or keys) and reads
// the others, tile after tile, through shared memory.
//
//   scores [own row][row of a tile] = own [own row][channel] * tile [channel][row]
//   sums [own row][channel] = weights [own row][row of a tile] * tile [row][channel]
//
// A thread has the scores of two neighbouring rows of a tile (D of mma.cuh). In 16 bits that is what it needs of the
// weights (A). In float32 an instruction takes 8 rows of the tile, and a thread needs rows t and t + 4 of these. So rows
// 2t and 2t + 1 take their places, in weights and in the tile alike.
#pragma once

#include <cstdint>

#include "mma.cuh"
#include "ptx.cuh"

namespace fxfuse {

// kWidth: channels, a multiple of 8. Distances between rows, and their addresses, are multiples of 16 bytes. kTile: rows
// of a tile, a multiple of 16.
template <class Mma, int kWidth, int kTile>
struct AttentionProducts {
    using Element = typename Mma::Element;
    using A = typename Mma::A;
    using B = typename Mma::B;

    static constexpr bool kPacked = sizeof(Element) == 2;
    static constexpr int kWarp = 32;
    static constexpr int kBytes = kWidth * static_cast<int>(sizeof(Element)), kChunk = 16;
    static constexpr int kSteps = (kBytes + kMmaBytesOfK - 1) / kMmaBytesOfK;  // instructions along a row
    static constexpr int kStride = kBytes + kChunk;  // of a row in shared memory, zeros at its end: no bank conflicts
    static constexpr int kColumns = kTile / kMmaN, kChannels = kWidth / kMmaN;  // tiles of scores, and of sums
    static constexpr int kOfRows = kPacked ? kTile / 16 : kColumns;             // instructions along a tile's rows
    static constexpr int kTileBytes = kTile * kStride;
    static_assert(kWidth % kMmaN == 0 && kTile % 16 == 0);

    // The words of a thread's two own rows, as A has them; those of channels beyond the last one are zeros.
    using Own = uint32_t[kSteps][4];

    // Zeros at the ends of `rows` rows in shared memory, if they are read.
    template <int kThreads>
    static __device__ __forceinline__ void clear_ends(uint32_t shared, int rows, int thread) {
        if constexpr (kSteps * kMmaBytesOfK > kBytes || kChannels % 2) {
            for (int row = thread; row < rows; row += kThreads) {
                ptx::store_shared_16(shared + static_cast<uint32_t>(row * kStride + kBytes), uint4{0, 0, 0, 0});
            }
        }
    }

    // Begins to copy kRows rows, from `first` on, of two tensors to shared memory, the second one's behind the first
    // one's. Rows from `end` on are zeros.
    template <int kThreads, int kRows = kTile>
    static __device__ __forceinline__ void fetch(uint32_t to, const Element* one, int64_t stride, const Element* other,
                                                 int64_t other_stride, int first, int end, int thread) {
        constexpr int kOfRow = kBytes / kChunk;
        for (int index = thread; index < kRows * kOfRow; index += kThreads) {
            const int row = index / kOfRow, chunk = index % kOfRow, from = first + row;
            const int valid = from < end ? kChunk : 0;
            const auto place = static_cast<uint32_t>(row * kStride + chunk * kChunk);
            const int64_t channel = chunk * (kChunk / static_cast<int>(sizeof(Element)));
            ptx::cp_async_16(to + place, one + from * stride + channel, valid);
            ptx::cp_async_16(to + kRows * kStride + place, other + from * other_stride + channel, valid);
        }
        ptx::cp_async_commit();
    }

    // Reads the first (half 0) or second of a thread's own rows.
    static __device__ __forceinline__ void read_own(Own& own, int half, const Element* row, int part) {
        const auto* bytes = reinterpret_cast<const unsigned char*>(row) + 4 * part;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int end = 0; end < 2; ++end) {
                const int at = step * kMmaBytesOfK + end * kChunk;
                own[step][2 * end + half] = at < kBytes ? __ldg(reinterpret_cast<const uint32_t*>(bytes + at)) : 0u;
            }
        }
    }

    // The address from which a thread reads its warp's own rows, if they lie in shared memory from `rows` on: an
    // ldmatrix reads both halves of an instruction's bytes of 16 rows.
    static __device__ __forceinline__ uint32_t own_at(uint32_t rows, int lane) {
        return rows + static_cast<uint32_t>((lane / 8 % 2 * 8 + lane % 8) * kStride + lane / 16 * kChunk);
    }
    static __device__ __forceinline__ A own_words(uint32_t own, int step) {
        uint32_t words[4];
        ptx::ldmatrix_x4(words, own + static_cast<uint32_t>(step * kMmaBytesOfK));
        return Mma::make_a(words);
    }
    static __device__ __forceinline__ A own_words(const Own& own, int step) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[i] = own[step][i];
            // float32's words are split for each tile anew: their parts would take twice the registers
            if constexpr (!kPacked) ptx::forget(words[i]);
        }
        return Mma::make_a(words);
    }

    // score = own * tile. `own`: a thread's words of its own rows, or where it reads them.
    template <class OwnRows>
    static __device__ __forceinline__ void multiply_rows(float (&score)[kColumns][4], const OwnRows& own, uint32_t tile,
                                                         int lane) {
        // An ldmatrix reads 16 rows: of each 8, both halves of an instruction's bytes.
        const int matrix = lane / 8, row = matrix / 2 * 8 + lane % 8;
        const uint32_t place = tile + static_cast<uint32_t>(row * kStride + matrix % 2 * kChunk);
        constexpr int kRun = kPacked ? kSteps : 4;  // tensor cores truncate where they accumulate
#pragma unroll
        for (int begin = 0; begin < kSteps; begin += kRun) {
            float run[1][kColumns][4] = {};
#pragma unroll
            for (int step = begin; step < begin + kRun && step < kSteps; ++step) {
                const A a[1] = {own_words(own, step)};
#pragma unroll
                for (int two = 0; two < kColumns / 2; ++two) {
                    uint32_t raw[4];
                    ptx::ldmatrix_x4(raw, place + static_cast<uint32_t>(two * 16 * kStride + step * kMmaBytesOfK));
                    const B b[2] = {Mma::make_b({raw[0], raw[1]}), Mma::make_b({raw[2], raw[3]})};
                    multiply_add<Mma, 0, Mma::kProducts>(run, 2 * two, a, b);
                }
            }
#pragma unroll
            for (int j = 0; j < kColumns; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) score[j][i] = begin == 0 ? run[0][j][i] : score[j][i] + run[0][j][i];
            }
        }
    }

    static __device__ __forceinline__ void clear(float (&sum)[kChannels][4]) {
#pragma unroll
        for (int j = 0; j < kChannels; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[j][i] = 0.0f;
        }
    }

    static __device__ __forceinline__ bool all_finite(const float (&sum)[kChannels][4]) {
        float zero = 0.0f;  // becomes NaN at a value that is not finite: 0 * inf and 0 * NaN are NaN
#pragma unroll
        for (int j = 0; j < kChannels; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) zero = fmaf(sum[j][i], 0.0f, zero);
        }
        return zero == 0.0f;
    }

    static __device__ __forceinline__ void pack(A (&weights)[kOfRows], const float (&score)[kColumns][4]) {
#pragma unroll
        for (int i = 0; i < kOfRows; ++i) {
            uint32_t raw[4];
#pragma unroll
            for (int end = 0; end < 2; ++end) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if constexpr (kPacked) {
                        const float(&of_rows)[4] = score[2 * i + end];
                        raw[2 * end + half] = pack_two<Element>(of_rows[2 * half], of_rows[2 * half + 1]);
                    } else {
                        raw[2 * end + half] = __float_as_uint(score[i][2 * half + end]);
                    }
                }
            }
            weights[i] = Mma::make_a(raw);
        }
    }

    // sum += weights * tile.
    static __device__ __forceinline__ void multiply_tile(float (&sum)[kChannels][4], const A (&weights)[kOfRows],
                                                         uint32_t tile, int lane) {
        if constexpr (kPacked) {
            // An ldmatrix reads 16 rows of 16 channels.
            const int matrix = lane / 8, row = matrix % 2 * 8 + lane % 8;
            const uint32_t place = tile + static_cast<uint32_t>(row * kStride + matrix / 2 * kChunk);
#pragma unroll
            for (int i = 0; i < kOfRows; ++i) {
#pragma unroll
                for (int j = 0; j < kChannels; j += 2) {
                    uint32_t raw[4];
                    ptx::ldmatrix_x4_trans(raw, place + static_cast<uint32_t>(i * 16 * kStride + j * kChunk));
                    Mma::template product<0>(sum[j], weights[i], Mma::make_b({raw[0], raw[1]}));
                    if (j + 1 < kChannels) {
                        Mma::template product<0>(sum[j + 1], weights[i], Mma::make_b({raw[2], raw[3]}));
                    }
                }
            }
        } else {
            const uint32_t place = tile + static_cast<uint32_t>(lane % 4 * 2 * kStride + lane / 4 * 4);
#pragma unroll
            for (int j = 0; j < kChannels; ++j) {
                float run[1][1][4] = {};  // tensor cores truncate where they accumulate
#pragma unroll
                for (int i = 0; i < kOfRows; ++i) {
                    const uint32_t at = place + static_cast<uint32_t>(i * kMmaN * kStride + j * kMmaN * 4);
                    const A a[1] = {weights[i]};
                    const B b[1] = {Mma::make_b({ptx::load_shared_4(at), ptx::load_shared_4(at + kStride)})};
                    multiply_add<Mma, 0, Mma::kProducts>(run, 0, a, b);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[j][i] += run[0][0][i];
            }
        }
    }
};

}  // namespace fxfuse
