// A list of launches, replayed as a CUDA graph when it is made again with the same addresses.
//
// A launch takes the CPU 3 to 6 us. A graph takes little more than one launch, however many it holds. It holds nothing
// but kernels, their parameters and addresses. So a replay does what the launches would do, and owns no memory.
//
// In a loop, torch's allocator soon gives the same addresses at every turn, or alternates between a few.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

namespace fxfuse_executor {

class Replays {
public:
    // The replays in a cell, which is null at first.
    static Replays& of(Replays*& cell) {
        static std::mutex mutex;
        const std::lock_guard<std::mutex> lock(mutex);
        if (cell == nullptr) cell = new Replays;
        return *cell;
    }

    // Makes the launches of `list`, which has these addresses. Returns 0, or the code of an error as list.launch does.
    template <class Launches>
    int launch(const std::vector<uint64_t>& addresses, uint64_t context, const Launches& list) {
        const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        const auto stream = reinterpret_cast<cudaStream_t>(context);
        if (!lock.owns_lock() || !pays_ || is_captured(stream)) return list.launch(context);
        const auto found = std::find_if(recent_.begin(), recent_.end(),
                                        [&](const Call& each) { return each.addresses == addresses; });
        if (found != recent_.end()) std::rotate(found, found + 1, recent_.end());  // the latest is the last
        const bool is_known = found != recent_.end();
        if (is_known && recent_.back().graph != nullptr) {
            const Stopwatch watch;
            if (cudaGraphLaunch(recent_.back().graph.get(), stream) == cudaSuccess) {
                replayed_.add(watch);
                if (replayed_.count == kTimed && replayed_.shortest + kSaved > launched_.shortest) give_up();
                return 0;
            }
            cudaGetLastError();
            give_up();
            return list.launch(context);
        }
        const Stopwatch watch;
        const int code = list.launch(context);
        if (code != 0) return code;
        launched_.add(watch);
        if (!is_known) {
            if (recent_.size() == kRecent) recent_.erase(recent_.begin());
            recent_.push_back({addresses, nullptr});
        } else if (made_ < kMade + replayed_.count / kRepaid) {
            ++made_;
            recent_.back().graph = captured(list, stream);
            if (recent_.back().graph == nullptr) give_up();
        }
        return 0;
    }

private:
    static constexpr size_t kRecent = 4;  // calls that are remembered
    // Graphs that are made, one after another, and replays that repay one more. Where addresses go on changing, graphs cost
    // too much; in a long loop they change now and then.
    static constexpr int kMade = 12, kRepaid = 64;
    static constexpr int kTimed = 4;      // replays, before they are compared with launches
    // What a replay must save of the CPU's time: the GPU begins a graph later than a launch, and that is all that counts
    // where the CPU is ahead.
    static constexpr std::chrono::nanoseconds kSaved{8000};

    // While one lives, another thread's capture forbids this thread nothing.
    struct Relaxed {
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;

        Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode); }
        ~Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode); }
        Relaxed(const Relaxed&) = delete;
    };

    struct Destroy {
        void operator()(cudaGraphExec_t graph) const {
            const Relaxed relaxed;
            cudaGraphExecDestroy(graph);
        }
    };
    using Graph = std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, Destroy>;

    // The addresses of a call, with a graph from the second such call on.
    struct Call {
        std::vector<uint64_t> addresses;
        Graph graph;
    };

    struct Stopwatch {
        std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
    };

    struct Times {
        std::chrono::nanoseconds shortest = std::chrono::nanoseconds::max();
        int64_t count = 0;

        void add(const Stopwatch& watch) {
            shortest = std::min<std::chrono::nanoseconds>(shortest, std::chrono::steady_clock::now() - watch.start);
            ++count;
        }
    };

    // Whether somebody captures the stream: a graph cannot be launched there, but its launches can be captured.
    static bool is_captured(cudaStream_t stream) {
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
        cudaGetLastError();  // the default stream cannot be asked while another one is captured
        return true;
    }

    // The launches of a list as a graph, for a stream like this one; null if they cannot be captured.
    template <class Launches>
    static Graph captured(const Launches& list, cudaStream_t like) {
        const Relaxed relaxed;
        int priority = 0;  // that of the graph's kernels
        cudaStreamGetPriority(like, &priority);
        cudaStream_t stream = nullptr;
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t made = nullptr;
        if (cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority) == cudaSuccess) {
            if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) == cudaSuccess) {
                const int code = list.launch(reinterpret_cast<uint64_t>(stream));
                const bool is_whole = cudaStreamEndCapture(stream, &graph) == cudaSuccess && code == 0;
                if (is_whole && cudaGraphInstantiate(&made, graph, 0) != cudaSuccess) made = nullptr;
                if (graph != nullptr) cudaGraphDestroy(graph);
            }
            cudaStreamDestroy(stream);
        }
        Graph found(made);
        if (found != nullptr && cudaGraphUpload(made, like) == cudaSuccess) return found;  // else its first launch would
        cudaGetLastError();
        return nullptr;
    }

    void give_up() {
        pays_ = false;
        recent_.clear();
    }

    std::mutex mutex_;
    std::vector<Call> recent_;
    Times launched_, replayed_;  // the CPU's time
    int64_t made_ = 0;
    bool pays_ = true;  // unless replays turn out to save too little, or to be impossible
};

}  // namespace fxfuse_executor
