// The functions of cuda/kernels/ptx_sm90.cuh on the emulated GPU. Copies arrive, and products are computed, no sooner
// than they are waited for.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "ptx.cuh"

namespace fxfuse::ptx {

inline const bool has_more_shared_memory = (emulation::most_shared = 227 << 10, true);

// -------------------------------------------------------------------------------------------------- barriers

struct Barrier {
    int expected, arrived;
    int64_t bytes;  // that copies have still to bring
    uint32_t parity;
    std::vector<emulation::Copy> copies;

    void look() {
        if (arrived < expected || bytes > 0) return;
        arrived = 0;
        parity ^= 1;
        emulation::wake_all();
    }
};
inline std::map<uint32_t, Barrier> barriers;

inline Barrier& barrier_at(uint32_t address) {
    at(address, 8);
    return barriers.at(address);
}
inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
    at(barrier, 8);
    barriers[barrier] = {static_cast<int>(arrivals), 0, 0, 0, {}};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t barrier) {
    Barrier& it = barrier_at(barrier);
    if (++it.arrived > it.expected) emulation::fail("too many have arrived at a barrier");
    it.look();
    emulation::pause();  // whoever waited may do at once what this thread says that it may
}
inline void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    barrier_at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    Barrier& it = barrier_at(barrier);
    while (it.parity == parity) {
        std::vector<emulation::Copy> copies;
        copies.swap(it.copies);
        for (const emulation::Copy& copy : copies) {
            copy.arrive();
            it.bytes -= copy.bytes;
        }
        if (!copies.empty()) {
            it.look();
        } else {
            emulation::wait();
        }
    }
}

// ------------------------------------------------------------------------------------------------- clusters

// Blocks run one after the other here.
inline void cluster_barrier() { emulation::fail("there are no clusters"); }
inline float2 load_of_block(const float2* place, uint32_t) { return *place; }

// ----------------------------------------------------------------------------------------------------- copies

inline void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
    if (reinterpret_cast<uintptr_t>(source) % 16 != 0 || bytes % 16 != 0) emulation::fail("a misaligned bulk copy");
    if (destination % 16 != 0 || destination + bytes > emulation::shared_bytes) emulation::fail("a bad bulk copy");
    const int all = static_cast<int>(bytes);
    barrier_at(barrier).copies.push_back(
        {emulation::shared + destination, static_cast<const unsigned char*>(source), all, all});
}
inline void async_proxy_fence() {}

// ------------------------------------------------------------------------------------------------- warpgroups

template <int kRegisters>
void take_registers() {}
template <int kRegisters>
void give_registers() {}

struct Matrix {
    uint32_t low;

    Matrix() = default;
    Matrix(uint32_t address, uint32_t along_k) : low((address & 0x3ffff) >> 4 | (along_k & 0x3ffff) >> 4 << 16) {}
    explicit Matrix(uint32_t low) : low(low) {}
    Matrix operator+(uint32_t rows) const { return Matrix(low + rows); }

    // Word `word` of a row of 32 bytes.
    uint32_t word(int row, int word) const {
        const uint32_t address = (low & 0x3fff) << 4, along_k = (low >> 16 & 0x3fff) << 4;
        return load_shared_4(address + row / 8 * 128 + row % 8 * 16 + word / 4 * along_k + word % 4 * 4);
    }
};

struct SwizzledMatrix {
    uint32_t low;

    explicit SwizzledMatrix(uint32_t address, uint32_t slab = 0) : low((address & 0x3ffff) >> 4 | slab >> 4 << 16) {}
    SwizzledMatrix operator+(uint32_t pieces) const {
        SwizzledMatrix moved = *this;
        moved.low += pieces;
        return moved;
    }

    // As the hardware permutes: bits of the address, wherever rows begin.
    static uint32_t load(uint32_t address) { return load_shared_4(address ^ (address >> 7 & 7) << 4); }
    uint32_t word(int row, int word) const { return load(((low & 0x3fff) << 4) + row * 128 + word * 4); }

    // Turned, in 16 bits: the word that has the two m or n from `index` (even) on, of k.
    uint32_t word_of(int index, int k) const {
        const uint32_t slab = (low >> 16 & 0x3fff) << 4;
        return load(((low & 0x3fff) << 4) + index / 64 * slab + k * 128 + index % 64 * 2);
    }
};

// What a thread's products compute of its own sums, in groups.
struct Products {
    std::vector<std::function<void()>> open;
    std::deque<std::vector<std::function<void()>>> groups;
};
inline Products products[1024];

inline void wgmma_fence() {}
template <size_t kSums>
void sums_fence(float (&)[kSums]) {}
inline void wgmma_commit() {
    Products& mine = products[emulation::current];
    mine.groups.push_back(std::move(mine.open));
    mine.open.clear();
}
template <int kPending>
void wgmma_wait() {
    auto& groups = products[emulation::current].groups;
    for (; groups.size() > kPending; groups.pop_front()) {
        for (const auto& product : groups.front()) product();
    }
    __syncwarp();  // a warp waits as one
}

// `read_a` and `read_b` fill a row of 32 bytes: of a, half 0 or 1 of the rows of the calling thread's sums.
template <int kPerWord, size_t kSums, class ReadA, class ReadB>
void start_product(float (&d)[kSums], ReadA read_a, ReadB read_b, bool adds) {
    products[emulation::current].open.push_back([=, &d] {
        float left[2][8 * kPerWord];  // the rows of this thread's sums
        for (int half = 0; half < 2; ++half) read_a(left[half], half);
        const int lane = emulation::current % emulation::kWarp;
        for (int i = 0; i < static_cast<int>(kSums); i += i % 2 == 0 ? 1 : 3) {  // sums i and i + 2 are of one column
            float right[8 * kPerWord];
            read_b(right, i / 4 * 8 + lane % 4 * 2 + i % 2);
            for (int half = 0; half < 2; ++half) {
                double sum = adds ? d[i + half * 2] : 0.0;
                for (int k = 0; k < 8 * kPerWord; ++k) sum += double{left[half][k]} * right[k];
                d[i + half * 2] = static_cast<float>(sum);
            }
        }
    });
}

template <int kPerWord, bool kTurned = false, class Matrix, class Element>
auto row_reader(Matrix matrix, Element element) {
    return [=](float* row, int index) {
        for (int i = 0; i < 8 * kPerWord; ++i) {
            if constexpr (kTurned) {
                row[i] = element(matrix.word_of(index & ~1, i), index % 2);
            } else {
                row[i] = element(matrix.word(index, i / kPerWord), i % kPerWord);
            }
        }
    };
}

template <int kPerWord, bool kTurnedA = false, bool kTurnedB = false, size_t kSums, class Matrix, class Element>
void start_product(float (&d)[kSums], Matrix a, Matrix b, bool adds, Element element) {
    const int row = emulation::current / emulation::kWarp % 4 * 16 + emulation::current % emulation::kWarp / 4;
    const auto row_of_a = row_reader<kPerWord, kTurnedA>(a, element);
    start_product<kPerWord>(d, [=](float* to, int half) { row_of_a(to, row + half * 8); },
                            row_reader<kPerWord, kTurnedB>(b, element), adds);
}

// Registers are read when the product is waited for: as late as the hardware may read them.
template <size_t kSums, class Matrix>
void wgmma_tf32(float (&d)[kSums], const uint32_t (&a)[4], Matrix b, bool adds) {
    struct Lanes {
        const uint32_t* fragments[emulation::kWarp];
    } all{};
    all.fragments[emulation::current % emulation::kWarp] = a;
    emulation::with_warp(all, [](Lanes** lanes) {
        for (int i = 0; i < emulation::kWarp; ++i) {
            lanes[0]->fragments[i] = lanes[i]->fragments[i];
        }
        for (int i = 1; i < emulation::kWarp; ++i) *lanes[i] = *lanes[0];
    });
    const int first = emulation::current % emulation::kWarp / 4 * 4;  // of the lanes that have the same rows
    start_product<1>(
        d,
        [=](float* row, int half) {
            for (int k = 0; k < 8; ++k) row[k] = tf32_of(all.fragments[first + k % 4][half + k / 4 * 2], 0);
        },
        row_reader<1>(b, tf32_of), adds);
}
template <size_t kSums, class Matrix>
void wgmma_tf32(float (&d)[kSums], Matrix a, Matrix b, bool adds) {
    start_product<1>(d, a, b, adds, tf32_of);
}
template <bool kTurnedA = false, bool kTurnedB = false, size_t kSums, class Matrix>
void wgmma_f16(float (&d)[kSums], Matrix a, Matrix b, bool adds) {
    start_product<2, kTurnedA, kTurnedB>(d, a, b, adds, f16_of);
}
template <bool kTurnedA = false, bool kTurnedB = false, size_t kSums, class Matrix>
void wgmma_bf16(float (&d)[kSums], Matrix a, Matrix b, bool adds) {
    start_product<2, kTurnedA, kTurnedB>(d, a, b, adds, bf16_of);
}

}  // namespace fxfuse::ptx
