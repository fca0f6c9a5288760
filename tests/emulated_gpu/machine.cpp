// Runs blocks of threads for the kernels' libraries: see cuda_runtime.h.
#include "cuda_runtime.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulation {

constexpr size_t kStackBytes = 256 << 10, kPage = 4096;
constexpr unsigned kMostThreads = 1024;
constexpr size_t kSharedUnasked = 48 << 10;  // bytes of shared memory for kernels that were allowed no more

size_t most_shared = 163 << 10;  // an A100's limit
unsigned char* shared;
size_t shared_bytes;
int current, running;

namespace {

struct Fiber {
    ucontext_t context;
    bool done, waits;                      // waits: at a barrier of the block, or for a phase of one in shared memory
    bool pauses;                           // lets all others go first
    std::vector<Copy> open;                // copies that are not committed
    std::deque<std::vector<Copy>> groups;  // committed ones
};

struct Meeting {
    int arrived = 0;
    uint64_t generation = 0;
    void* offered[kMostThreads];
    Complete complete;
    const void* how;

    void finish() {
        complete(offered, how);
        arrived = 0;
        ++generation;
        wake_all();
    }
};

std::vector<Fiber> fibers;
ucontext_t scheduler;
Meeting block_meeting, warp_meetings[kMostThreads / kWarp];
void (*body)(const void*);
const void* body_how;

void yield() { swapcontext(&fibers[current].context, &scheduler); }

void attend(Meeting& meeting, int index, int expected, void* mine, Complete complete, const void* how) {
    const uint64_t mine_is = meeting.generation;
    meeting.offered[index] = mine;
    meeting.complete = complete;
    meeting.how = how;
    if (++meeting.arrived == expected) return meeting.finish();
    while (meeting.generation == mine_is) {
        fibers[current].waits = &meeting == &block_meeting;
        yield();
    }
}

// Barriers of the block do not wait for threads that have ended.
void enter() {
    body(body_how);
    fibers[current].done = true;
    if (--running == block_meeting.arrived && running > 0) block_meeting.finish();
    yield();
}

void run_block(unsigned threads) {
    static auto* const stacks = static_cast<char*>(mmap(nullptr, kMostThreads * kStackBytes, PROT_READ | PROT_WRITE,
                                                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) fail("no memory for stacks");
    if (fibers.size() < threads) fibers.resize(threads);
    running = static_cast<int>(threads);
    block_meeting.arrived = 0;
    for (Meeting& meeting : warp_meetings) meeting.arrived = 0;
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.done = fiber.waits = fiber.pauses = false;
        fiber.open.clear();
        fiber.groups.clear();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks + i * kStackBytes;
        fiber.context.uc_stack.ss_size = kStackBytes;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
    const bool backwards = blockIdx.x % 2 == 1;  // the order of threads must not matter
    unsigned left = threads;
    while (left > 0) {
        const unsigned before = left;
        bool ran = false;
        for (unsigned i = 0; i < threads; ++i) {
            ran |= fibers[i].pauses;
            fibers[i].pauses = false;
        }
        for (unsigned first = 0; first < threads; first += kWarp) {
            for (bool runs = true; runs;) {
                runs = false;
                bool pauses = false;
                for (unsigned i = first; i < first + kWarp && i < threads; ++i) {
                    const unsigned thread = backwards ? threads - 1 - i : i;
                    Fiber& fiber = fibers[thread];
                    if (fiber.done || fiber.waits || fiber.pauses) continue;
                    current = static_cast<int>(thread);
                    threadIdx = {thread, 0, 0};
                    swapcontext(&scheduler, &fiber.context);
                    left -= fiber.done;
                    runs = ran = true;
                    pauses |= fiber.pauses;
                }
                if (pauses) break;  // for the whole warp: others of it may be waiting for that thread
            }
        }
        if (!ran && left == before) fail("threads wait for others that are gone");
    }
}

}  // namespace

void fail(const char* what) {
    std::fprintf(stderr, "emulated GPU: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
    std::abort();
}

size_t& shared_of(const void* kernel) {
    static std::map<const void*, size_t> of_kernels;
    return of_kernels.try_emplace(kernel, kSharedUnasked).first->second;
}

void begin_copy(const Copy& copy) { fibers[current].open.push_back(copy); }

void commit_copies() {
    Fiber& fiber = fibers[current];
    fiber.groups.push_back(std::move(fiber.open));
    fiber.open.clear();
}

void wait_for_copies(size_t pending) {
    auto& groups = fibers[current].groups;
    for (; groups.size() > pending; groups.pop_front()) {
        for (const Copy& copy : groups.front()) copy.arrive();
    }
}

void pause() {
    fibers[current].pauses = true;
    yield();
}

void wait() {
    fibers[current].waits = true;
    yield();
}

void wake_all() {
    for (Fiber& fiber : fibers) fiber.waits = false;
}

void meet_warp(void* mine, Complete complete, const void* how) {
    attend(warp_meetings[current / kWarp], current % kWarp, kWarp, mine, complete, how);
}

void meet_block(void* mine, Complete complete, const void* how) {
    attend(block_meeting, block_meeting.arrived, running, mine, complete, how);
}

void run(const void* kernel, dim3 grid, dim3 block, size_t bytes, void (*in_thread)(const void*), const void* how) {
    const unsigned threads = block.x;
    if (threads == 0 || threads > kMostThreads || bytes > std::min(shared_of(kernel), most_shared)) {
        fail("a launch that the GPU refuses");
    }
    const size_t room = (bytes + kPage - 1) / kPage * kPage;
    auto* base = static_cast<unsigned char*>(
        mmap(nullptr, room + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base + room, kPage, PROT_NONE);
    constexpr size_t kAlignment = 1024;
    shared = base + (room - bytes) / kAlignment * kAlignment;
    shared_bytes = base + room - shared;
    blockDim = dim3(threads);
    gridDim = grid;
    body = in_thread;
    body_how = how;
    for (uint32_t z = 0; z < grid.z; ++z) {
        for (uint32_t y = 0; y < grid.y; ++y) {
            for (uint32_t x = 0; x < grid.x; ++x) {
                blockIdx = {x, y, z};
                std::memset(base, 0xff, room);  // NaN in every type
                run_block(threads);
            }
        }
    }
    munmap(base, room + kPage);
}

}  // namespace emulation
