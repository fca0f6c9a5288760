// Operand tiles in shared memory: how they are swizzled, filled from global memory and read as MMA fragments.
//
// A tile is kExtent indices of the output (m or n) by 128 bytes' worth of K. It is a piece of a row-major matrix in one
// of two orders (in CUTLASS's terms):
//   K-major    a row of the matrix is one m or n, K is contiguous     (x, and w as (N, K))
//   MN-major   a row of the matrix is one k, m or n is contiguous     (w as (K, N), x as (K, M))
// Within a row of a tile, 16-byte chunks are permuted by XOR with the row number, so that both the writes of cp.async
// (along rows) and the reads of fragments (across rows) touch every bank once. The order of chunks in a K-major tile:
//
//   row 0   chunks 0 1 2 3 4 5 6 7          row 3   chunks 3 2 1 0 7 6 5 4
//   row 1   chunks 1 0 3 2 5 4 7 6          ...
//   row 2   chunks 2 3 0 1 6 7 4 5          row 7   chunks 7 6 5 4 3 2 1 0
//
// Hopper's wgmma reads MN-major tiles in slabs: 128 bytes of every row, one row after another, then the next 128 bytes
// of every row.
#pragma once

#include <cstdint>

#include "mma.cuh"
#include "ptx.cuh"

namespace fxfuse {

constexpr int kChunkBytes = 16;
constexpr int kTileBytesOfK = 128;  // a K-major row then covers all 32 banks

enum class Major { kK, kMN };

template <class T, Major kMajor_, int kExtent, bool kInSlabs = false>
struct OperandTile {
    using Element = T;
    static constexpr Major kMajor = kMajor_;
    static constexpr int kElementBytes = static_cast<int>(sizeof(T));
    static constexpr int kTileK = kTileBytesOfK / kElementBytes;
    static constexpr int kRows = kMajor == Major::kK ? kExtent : kTileK;
    static constexpr int kCols = kMajor == Major::kK ? kTileK : kExtent;
    static constexpr int kRowBytes = kCols * kElementBytes;
    static constexpr int kBytes = kRows * kRowBytes;
    static constexpr int kSlabRowBytes = 8 * kChunkBytes, kSlabBytes = kRows * kSlabRowBytes;
    static_assert(kRowBytes % (8 * kChunkBytes) == 0, "8 chunks are permuted, and every row starts at bank 0");

    // Offset of a row's byte in the tile.
    static __device__ __forceinline__ uint32_t offset(uint32_t row, uint32_t byte) {
        if constexpr (kInSlabs) {
            return byte / kSlabRowBytes * kSlabBytes + row * kSlabRowBytes +
                   (byte % kSlabRowBytes / kChunkBytes ^ swizzle(row)) * kChunkBytes + byte % kChunkBytes;
        }
        return row * kRowBytes + (byte / kChunkBytes ^ swizzle(row)) * kChunkBytes + byte % kChunkBytes;
    }

private:
    static __device__ __forceinline__ uint32_t swizzle(uint32_t row) {
        // ldmatrix reads one chunk of 8 consecutive rows. 4-byte elements of MN-major tiles are read word by word: a
        // warp reads 2 neighbouring chunks of 4 consecutive rows.
        return kMajor == Major::kMN && kElementBytes == 4 ? row % 4 * 2 : row % 8;
    }
};

// One thread's share of filling tile after tile along K, in pieces of kAccess bytes. Beyond the end of K, tiles are
// filled with zeros; beyond the last m or n, with copies of existing ones, because results there are never stored.
// kAccess is the largest power of two up to 16 that divides the matrix's address and its row stride, in bytes.
// Without kRagged, a piece exists as a whole or not at all. With it, a row's last piece may exist in part, and only
// that part is read: this takes four more instructions per piece. A tile spans less than 4 GB of the matrix.
template <class Tile, int kThreads, int kAccess, bool kRagged = false>
class TileCopy {
    using T = typename Tile::Element;
    static constexpr bool kKMajor = Tile::kMajor == Major::kK;
    // cp.async moves at least 4 bytes: single halves go through registers, a chunk of them per thread.
    static constexpr bool kThroughRegisters = kAccess < 4;
    static constexpr int kPieceBytes = kThroughRegisters ? kChunkBytes : kAccess;
    static constexpr int kPieceElements = kPieceBytes / Tile::kElementBytes;
    static constexpr int kPiecesPerRow = Tile::kRowBytes / kPieceBytes;
    static constexpr int kRowsPerPass = kThreads / kPiecesPerRow;
    static constexpr int kPasses = Tile::kRows / kRowsPerPass;
    static constexpr int kPerPassOfK = kKMajor ? 0 : kRowsPerPass;
    // Narrow pieces take many passes, whose addresses and values would fill the registers if all were unrolled.
    static constexpr bool kUnrolled = kAccess == kChunkBytes;
    static constexpr int kUnroll = kUnrolled ? kPasses : kThroughRegisters ? 2 : 4;
    static constexpr int kKept = kUnrolled && kKMajor ? kPasses : 1;
    static_assert(kThreads % kPiecesPerRow == 0 && Tile::kRows % kRowsPerPass == 0, "every pass must be full");

    const T* tile_;        // the tile's first element: the same for all threads
    int64_t stride_;       // of the matrix's rows, in elements
    int extent_;           // of m or n
    int k_left_;           // from this thread's piece of the first pass to the end of K
    uint32_t row_, byte_;  // of that piece in the tile
    uint32_t kept_[kKept];  // source_offset of each pass

public:
    // `matrix` points to k = 0 of the tile's first m or n; `extent` of m or n, and `k` of K, exist from there.
    __device__ __forceinline__ TileCopy(const T* matrix, int64_t stride, int extent, int k, uint32_t thread)
        : tile_(matrix),
          stride_(stride),
          extent_(extent),
          row_(thread / kPiecesPerRow),
          byte_(thread % kPiecesPerRow * kPieceBytes) {
        k_left_ = k - (kKMajor ? col() : static_cast<int>(row_));
#pragma unroll
        for (int pass = 0; pass < kKept; ++pass) kept_[pass] = source_offset(pass);
    }

    // Starts to fill the tile at `shared`, then moves on to the next tile. The tile is full after cp_async_commit,
    // cp_async_wait and a barrier.
    __device__ __forceinline__ void start(uint32_t shared) {
#pragma unroll kUnroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const char* source = this->source(pass);
            const uint32_t destination = shared + Tile::offset(row_ + pass * kRowsPerPass, byte_);
            const bool exists = k_left_ > pass * kPerPassOfK;
            const int count = kKMajor ? k_left_ : exists ? extent_ - col() : 0;
            const int bytes = kRagged ? bytes_of(count) : exists ? kPieceBytes : 0;
            if constexpr (kThroughRegisters) {
                ptx::store_shared_16(destination, gather(reinterpret_cast<const T*>(source), count));
            } else if constexpr (kPieceBytes == kChunkBytes) {
                ptx::cp_async_16(destination, source, bytes);
            } else {
                ptx::cp_async_small<kPieceBytes>(destination, source, bytes);
            }
        }
        tile_ += kKMajor ? Tile::kTileK : Tile::kTileK * stride_;
        k_left_ -= Tile::kTileK;
    }

private:
    // Bytes to read of a piece, if `left` elements are left in its row.
    static __device__ __forceinline__ int bytes_of(int left) {
        return min(max(left, 0), kPieceElements) * Tile::kElementBytes;
    }

    __device__ __forceinline__ int col() const { return static_cast<int>(byte_) / Tile::kElementBytes; }

    __device__ __forceinline__ const char* source(int pass) const {
        const T* first = kKMajor ? tile_ : tile_ + pass * kRowsPerPass * stride_;
        const bool kept = !kKMajor || kUnrolled;
        return reinterpret_cast<const char*>(first) + (kept ? kept_[kKMajor ? pass : 0] : source_offset(pass));
    }

    // Offset of this thread's piece of a pass, in bytes from the tile's first element.
    __device__ __forceinline__ uint32_t source_offset(int pass) const {
        const int row = static_cast<int>(row_) + pass * kRowsPerPass;
        const int existing_row = kKMajor && row >= extent_ ? row & below_extent() : row;
        const int existing_col = kKMajor || col() < extent_ ? col() : 0;
        return (static_cast<uint32_t>(existing_row) * static_cast<uint32_t>(stride_) + existing_col) *
               Tile::kElementBytes;
    }

    // A mask for numbers below the largest power of two that is not above extent_. It spreads the rows that stand in
    // for missing ones: thread blocks that all read the last row would wait for the part of L2 that holds it.
    __device__ __forceinline__ int below_extent() const { return static_cast<int>(0x7fffffffu >> __clz(extent_)); }

    static __device__ __forceinline__ uint4 gather(const T* source, int count) {
        alignas(kChunkBytes) uint16_t piece[kPieceElements];
#pragma unroll
        for (int i = 0; i < kPieceElements; ++i) {
            piece[i] = i < count ? __ldg(reinterpret_cast<const uint16_t*>(source) + i) : uint16_t{0};
        }
        return *reinterpret_cast<const uint4*>(piece);
    }
};

// A warp's view of a tile, from m or n `first` on: raw fragments of 16 m or n by 32 bytes of K. raw is one A fragment;
// or two B fragments, the second in raw[2] and raw[3].
enum class Side { kA, kB };

template <class Tile, Side kSide, Major kMajor = Tile::kMajor, int kElementBytes = Tile::kElementBytes>
class Fragments;

template <class Tile, Side kSide, int kElementBytes>
class Fragments<Tile, kSide, Major::kK, kElementBytes> {
    uint32_t offset_;

public:
    __device__ __forceinline__ Fragments(uint32_t first, uint32_t lane) {
        // Lane l addresses row l % 8 of 8x8 matrix l / 8. A's matrices 0 and 1 are rows 0-7 and 8-15 of the first half
        // of K, 2 and 3 those of the second half. For B, matrices 1 and 2 are swapped.
        const uint32_t lower_rows = kSide == Side::kA ? lane / 8 % 2 : lane / 16;
        const uint32_t second_half = kSide == Side::kA ? lane / 16 : lane / 8 % 2;
        offset_ = Tile::offset(first + lane % 8 + lower_rows * 8, second_half * kChunkBytes);
    }

    // index: which 16 m or n; step: which 32 bytes of the tile's K. XOR moves along a row, because the swizzle is an
    // XOR too.
    __device__ __forceinline__ void load(uint32_t (&raw)[4], uint32_t shared, int index, int step) const {
        const uint32_t address = (shared + offset_) ^ (step * kMmaBytesOfK);
        ptx::ldmatrix_x4(raw, address + index * 16 * Tile::kRowBytes);
    }
};

template <class Tile, Side kSide>
class Fragments<Tile, kSide, Major::kMN, 2> {
    static constexpr int kStepBytes = kMmaBytesOfK / 2 * Tile::kRowBytes;
    uint32_t offset_;

public:
    __device__ __forceinline__ Fragments(uint32_t first, uint32_t lane) {
        // The matrices are in the same order as above; a lane addresses a row of K.
        const uint32_t second_half = kSide == Side::kA ? lane / 16 : lane / 8 % 2;
        const uint32_t next_chunk = kSide == Side::kA ? lane / 8 % 2 : lane / 16;
        offset_ = Tile::offset(lane % 8 + second_half * 8, first * 2 + next_chunk * kChunkBytes);
    }

    __device__ __forceinline__ void load(uint32_t (&raw)[4], uint32_t shared, int index, int step) const {
        const uint32_t address = (shared + offset_) ^ (index * 2 * kChunkBytes);
        ptx::ldmatrix_x4_trans(raw, address + step * kStepBytes);
    }
};

// ldmatrix cannot transpose 4-byte elements.
template <class Tile, Side kSide>
class Fragments<Tile, kSide, Major::kMN, 4> {
    static constexpr int kStepBytes = kMmaBytesOfK / 4 * Tile::kRowBytes;
    // Distance in raw to the second 8 m or n, and to the second half of K.
    static constexpr int kNext = kSide == Side::kA ? 1 : 2, kHalf = kSide == Side::kA ? 2 : 1;
    uint32_t offset_;

public:
    __device__ __forceinline__ Fragments(uint32_t first, uint32_t lane) {
        offset_ = Tile::offset(lane % 4, (first + lane / 4) * 4);
    }

    __device__ __forceinline__ void load(uint32_t (&raw)[4], uint32_t shared, int index, int step) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t address = ((shared + offset_) ^ ((index * 2 + i) * 2 * kChunkBytes)) + step * kStepBytes;
            raw[i * kNext] = ptx::load_shared_4(address);
            raw[i * kNext + kHalf] = ptx::load_shared_4(address + 4 * Tile::kRowBytes);
        }
    }
};

}  // namespace fxfuse
