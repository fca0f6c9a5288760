// The same attention for many queries. A block takes a tile of queries and reads all keys and values, tile after tile,
// through shared memory: the next tile is on its way while this one is computed. Scores are never in memory (online
// softmax, as in attention.cuh; Dao 2023 has the division into warps).
//
//   scores [query][key] = q [query][channel] * k [channel][key]
//   sums [query][channel] = weights [query][key] * v [key][channel]
//
// A thread has the scores of two neighbouring keys (D of mma.cuh). In 16 bits that is what it needs of the weights (A).
// In float32 an instruction takes 8 keys, and a thread needs keys t and t + 4 of these. So keys 2t and 2t + 1 take their
// places, in weights and in values alike.
#pragma once

#include <cstdint>

#include "attention.cuh"
#include "epilogue.cuh"
#include "mma.cuh"
#include "ptx.cuh"

namespace fxfuse {

// What is added to the scores of two neighbouring keys, as it lies in memory.
template <class Mask>
struct alignas(2 * sizeof(Mask)) TwoAdded {
    Mask value[2];
};

// kWidth: channels, a multiple of 8. Distances between rows of q, k and v, and their addresses, are multiples of 16
// bytes. kKeys: of a tile, a multiple of 16. kPairs: whether two keys of the mask can be read at once. kBlocks: that a
// multiprocessor has registers for.
template <class Mma, class Mask_, int kWidth, int kKeys, int kWarps, bool kPairs, int kBlocks_, class Output_,
          class Epilogue_>
struct TiledAttention {
    using Element = typename Mma::Element;
    using Mask = Mask_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = AttentionProblem;
    using Head = AttentionHead<Element, Mask>;
    using Added = TwoAdded<Mask>;
    using A = typename Mma::A;
    using B = typename Mma::B;

    static constexpr bool kMasked = kIsMask<Mask>, kCausal = kIsCausal<Mask>;
    static constexpr bool kPacked = sizeof(Element) == 2;
    static constexpr int kTensors = 4 + kMasked;  // q, k, v, the mask, out
    static constexpr int kWarp = 32, kThreads = kWarps * kWarp;
    static constexpr int kBlocks = kBlocks_;
    static constexpr int kRows = kWarps * kMmaM;  // queries
    static constexpr int kBytes = kWidth * static_cast<int>(sizeof(Element)), kChunk = 16;
    static constexpr int kSteps = (kBytes + kMmaBytesOfK - 1) / kMmaBytesOfK;  // instructions along a row
    static constexpr int kStride = kBytes + kChunk;  // of a row in shared memory, zeros at its end: no bank conflicts
    static constexpr int kColumns = kKeys / kMmaN, kChannels = kWidth / kMmaN;  // tiles of scores, and of sums
    static constexpr int kOfKeys = kPacked ? kKeys / 16 : kColumns;             // instructions along a tile's keys
    static constexpr int kStage = 2 * kKeys * kStride;                          // bytes of a tile's keys and values
    static_assert(kWidth % kMmaN == 0 && kKeys % 16 == 0);

    // Two stages, unless there is one tile of keys.
    static __device__ __host__ __forceinline__ int stages(const Problem& problem) {
        return problem.keys > kKeys ? 2 : 1;
    }

    static __device__ __forceinline__ void run(const Problem& problem, const Element* q, const Element* k,
                                               const Element* v, const Mask* mask, Output* out, const SplitWorkspace&,
                                               const Epilogue& epilogue) {
        extern __shared__ __align__(16) unsigned char attention_shared[];  // [stage][keys, values][key][kStride]
        const Head head(problem, q, k, v, mask);
        const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, part = lane % 4;
        const auto tile = static_cast<int>(kCausal ? gridDim.x - 1 - blockIdx.x : blockIdx.x);  // first what takes long
        const int first_row = tile * kRows + thread / kWarp * kMmaM + lane / 4;                 // and + 8
        const int keys = keys_of_block(problem, tile * kRows);
        const float scale = static_cast<float>(problem.scale) * kLog2E;
        const uint32_t shared = ptx::shared_address(attention_shared);
        const auto keys_at = [&](int stage) { return shared + static_cast<uint32_t>(stage * kStage); };
        const auto values_at = [&](int stage) { return keys_at(stage) + kStage / 2; };

        if constexpr (kSteps * kMmaBytesOfK > kBytes || kChannels % 2) {  // the zeros at the ends of rows are read
            for (int row = thread; row < stages(problem) * 2 * kKeys; row += kThreads) {
                ptx::store_shared_16(shared + static_cast<uint32_t>(row * kStride + kBytes), uint4{0, 0, 0, 0});
            }
        }
        const auto fetch = [&](int first, int stage) {
            constexpr int kOfRow = kBytes / kChunk;
            for (int index = thread; index < kKeys * kOfRow; index += kThreads) {
                const int row = index / kOfRow, chunk = index % kOfRow, key = first + row;
                const int valid = key < keys ? kChunk : 0;
                const auto place = static_cast<uint32_t>(row * kStride + chunk * kChunk);
                const int64_t channel = chunk * (kChunk / static_cast<int>(sizeof(Element)));
                ptx::cp_async_16(keys_at(stage) + place, head.k + key * problem.k.row + channel, valid);
                ptx::cp_async_16(values_at(stage) + place, head.v + key * problem.v.row + channel, valid);
            }
            ptx::cp_async_commit();
        };
        fetch(0, 0);

        uint32_t query[kSteps][4];
        const Mask* of_mask[2];
        int own_keys[2];  // how many keys a row sees, if kCausal
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + 8 * half;
            const auto* bytes = reinterpret_cast<const unsigned char*>(head.query(row)) + 4 * part;
            of_mask[half] = kMasked ? head.mask_of(row) : nullptr;
            own_keys[half] = kCausal ? static_cast<int>(head.place(head.existing(row)).query) + 1 : 0;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
#pragma unroll
                for (int end = 0; end < 2; ++end) {
                    const int at = step * kMmaBytesOfK + end * kChunk;
                    query[step][2 * end + half] =
                        at < kBytes ? __ldg(reinterpret_cast<const uint32_t*>(bytes + at)) : 0u;
                }
            }
        }

        float sum[kChannels][4] = {}, most[2] = {nothing(), nothing()}, total[2] = {};
        for (int first = 0, stage = 0; first < keys; first += kKeys, stage ^= 1) {
            const int left = keys - first;
            if (left > kKeys) {
                fetch(first + kKeys, stage ^ 1);
                ptx::cp_async_wait<1>();
            } else {
                ptx::cp_async_wait<0>();
            }
            __syncthreads();
            float score[1][kColumns][4] = {};
            multiply_keys(score, query, keys_at(stage), lane);
            Added added[2][kColumns];
            read_mask(added, of_mask, problem, first + 2 * part);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int seen = kCausal ? min(left, own_keys[half] - first) : left;
                weigh(score[0], half, most[half], total[half], sum, added[half], seen - 2 * part, scale);
            }
            A weights[kOfKeys];
            pack(weights, score[0]);
            multiply_values(sum, weights, values_at(stage), lane);
            __syncthreads();  // the next tile but one takes this one's memory
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float all = total[half];
            all += __shfl_xor_sync(~0u, all, 1);
            all += __shfl_xor_sync(~0u, all, 2);
            const int row = first_row + 8 * half;
            if (row >= problem.group * problem.queries) continue;
            const float share = all == 0.0f ? 0.0f : 1.0f / all;  // zeros for a query that sees no keys
            const auto at = head.place(row);
            Output* to = out + head.batch * problem.out.batch + at.head * problem.out.head + at.query * problem.out.row;
#pragma unroll
            for (int j = 0; j < kChannels; ++j) {
                const int channel = j * kMmaN + 2 * part;
                float value[2] = {sum[j][2 * half] * share, sum[j][2 * half + 1] * share};
                epilogue.apply(value, Position{head.batch, at.head * problem.queries + at.query, channel}, 2);
                Elements<Output, 2> result;
                result.set(value);
                result.store_whole(to + channel);
            }
        }
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        const auto blocks = static_cast<unsigned>((problem.group * problem.queries + kRows - 1) / kRows);
        const dim3 grid(blocks, static_cast<unsigned>(problem.key_heads), static_cast<unsigned>(problem.batch));
        constexpr auto kKernel = attention_kernel<TiledAttention>;
        const int bytes = stages(problem) * kStage;
        if (const cudaError_t error = allow_shared_memory<kKernel>(bytes); error != cudaSuccess) return error;
        return queue(kKernel, grid, kThreads, static_cast<size_t>(bytes), stream, problem,
                     reinterpret_cast<const Element*>(pointers[0]), reinterpret_cast<const Element*>(pointers[1]),
                     reinterpret_cast<const Element*>(pointers[2]), reinterpret_cast<const Mask*>(pointers[3]),
                     reinterpret_cast<Output*>(pointers[3 + kMasked]), SplitWorkspace{}, epilogue);
    }
#endif  // __CUDACC_RTC__

private:
    // How many keys the rows of a block see. They may be of several heads.
    static __device__ __forceinline__ int keys_of_block(const Problem& problem, int first_row) {
        const int keys = static_cast<int>(problem.keys), queries = static_cast<int>(problem.queries);
        return kCausal ? min(keys, min(first_row % queries + kRows, queries)) : keys;
    }

    // What is added for keys `first` and the next, and for those 8 further on. Nothing is read beyond the last key.
    static __device__ __forceinline__ void read_mask(Added (&added)[2][kColumns], const Mask* const (&of_mask)[2],
                                                     const Problem& problem, int first) {
        if constexpr (kMasked) {
            const int keys = static_cast<int>(problem.keys);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int j = 0; j < kColumns; ++j) {
                    const int key = first + j * kMmaN;
                    Added& two = added[half][j];
                    two = {};
                    if constexpr (kPairs) {
                        if (key + 1 < keys) two = *reinterpret_cast<const Added*>(of_mask[half] + key);
                        if (key + 1 == keys) two.value[0] = of_mask[half][key];
                    } else {
                        if (key < keys) two.value[0] = of_mask[half][key * problem.mask_key];
                        if (key + 1 < keys) two.value[1] = of_mask[half][(key + 1) * problem.mask_key];
                    }
                }
            }
        }
    }

    // score = query * keys. Keys beyond the last one are zeros.
    static __device__ __forceinline__ void multiply_keys(float (&score)[1][kColumns][4],
                                                         const uint32_t (&query)[kSteps][4], uint32_t keys, int lane) {
        // An ldmatrix reads 16 keys: of each 8, both halves of an instruction's bytes.
        const int matrix = lane / 8, row = matrix / 2 * 8 + lane % 8;
        const uint32_t own = keys + static_cast<uint32_t>(row * kStride + matrix % 2 * kChunk);
        constexpr int kRun = kPacked ? kSteps : 4;  // tensor cores truncate where they accumulate
#pragma unroll
        for (int begin = 0; begin < kSteps; begin += kRun) {
            float run[1][kColumns][4] = {};
#pragma unroll
            for (int step = begin; step < begin + kRun && step < kSteps; ++step) {
                const A a[1] = {Mma::make_a(query[step])};
#pragma unroll
                for (int two = 0; two < kColumns / 2; ++two) {
                    uint32_t raw[4];
                    ptx::ldmatrix_x4(raw, own + static_cast<uint32_t>(two * 16 * kStride + step * kMmaBytesOfK));
                    const B b[2] = {Mma::make_b({raw[0], raw[1]}), Mma::make_b({raw[2], raw[3]})};
                    multiply_add<Mma, 0, Mma::kProducts>(run, 2 * two, a, b);
                }
            }
#pragma unroll
            for (int j = 0; j < kColumns; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) score[0][j][i] = begin == 0 ? run[0][j][i] : score[0][j][i] + run[0][j][i];
            }
        }
    }

    // Turns 8 queries' scores into weights relative to the greatest score so far, and shrinks the sums accordingly.
    // `left`: the number of keys that the queries see, from the thread's first one on.
    static __device__ __forceinline__ void weigh(float (&score)[kColumns][4], int half, float& most, float& total,
                                                 float (&sum)[kChannels][4], const Added (&added)[kColumns], int left,
                                                 float scale) {
        float top = most;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float plus = 0.0f;
                if constexpr (kMasked) plus = added_for(added[j].value[i]);
                float& one = score[j][2 * half + i];
                one = j * kMmaN + i < left ? fmaf(one, scale, plus) : nothing();
                top = fmaxf(top, one);
            }
        }
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float shrinks = shrunk(most, top);
        most = top;
        total *= shrinks;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& one = score[j][2 * half + i];
                one = shrunk(one, top);
                total += one;
            }
        }
#pragma unroll
        for (int j = 0; j < kChannels; ++j) {
            sum[j][2 * half] *= shrinks;
            sum[j][2 * half + 1] *= shrinks;
        }
    }

    static __device__ __forceinline__ void pack(A (&weights)[kOfKeys], const float (&score)[kColumns][4]) {
#pragma unroll
        for (int i = 0; i < kOfKeys; ++i) {
            uint32_t raw[4];
#pragma unroll
            for (int end = 0; end < 2; ++end) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if constexpr (kPacked) {
                        const float(&of_keys)[4] = score[2 * i + end];
                        raw[2 * end + half] = pack_two<Element>(of_keys[2 * half], of_keys[2 * half + 1]);
                    } else {
                        raw[2 * end + half] = __float_as_uint(score[i][2 * half + end]);
                    }
                }
            }
            weights[i] = Mma::make_a(raw);
        }
    }

    // sum += weights * values.
    static __device__ __forceinline__ void multiply_values(float (&sum)[kChannels][4], const A (&weights)[kOfKeys],
                                                           uint32_t values, int lane) {
        if constexpr (kPacked) {
            // An ldmatrix reads 16 keys of 16 channels.
            const int matrix = lane / 8, row = matrix % 2 * 8 + lane % 8;
            const uint32_t own = values + static_cast<uint32_t>(row * kStride + matrix / 2 * kChunk);
#pragma unroll
            for (int i = 0; i < kOfKeys; ++i) {
#pragma unroll
                for (int j = 0; j < kChannels; j += 2) {
                    uint32_t raw[4];
                    ptx::ldmatrix_x4_trans(raw, own + static_cast<uint32_t>(i * 16 * kStride + j * kChunk));
                    Mma::template product<0>(sum[j], weights[i], Mma::make_b({raw[0], raw[1]}));
                    if (j + 1 < kChannels) {
                        Mma::template product<0>(sum[j + 1], weights[i], Mma::make_b({raw[2], raw[3]}));
                    }
                }
            }
        } else {
            const uint32_t own = values + static_cast<uint32_t>(lane % 4 * 2 * kStride + lane / 4 * 4);
#pragma unroll
            for (int j = 0; j < kChannels; ++j) {
                float run[1][1][4] = {};  // tensor cores truncate where they accumulate
#pragma unroll
                for (int i = 0; i < kOfKeys; ++i) {
                    const uint32_t at = own + static_cast<uint32_t>(i * kMmaN * kStride + j * kMmaN * 4);
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
