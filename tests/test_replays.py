"""Lists of launches that are replayed as CUDA graphs (executor.h, replays.h): on a runtime that stands in for CUDA's,
and on a GPU."""

from __future__ import annotations

import copy
import ctypes
import shutil
import subprocess
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import ON_GPU
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fxfuse
from fxfuse.build import PACKAGE

RUNTIME = r"""
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>
// A stream is a number. While one is captured, its launches become the nodes of a graph.
enum cudaError_t { cudaSuccess, cudaErrorUnknown };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
constexpr unsigned cudaStreamNonBlocking = 1;
using Nodes = std::vector<std::function<void()>>;
using cudaStream_t = struct Stream*;
using cudaGraph_t = Nodes*;
struct Executable { Nodes nodes; };
using cudaGraphExec_t = Executable*;
struct State { int64_t made, replayed, alive, streams, launch_us, replay_us, fails, captured; };
inline State state;
inline Nodes* capture = nullptr;
constexpr int64_t kOwnStream = 1000;
inline void wait(int64_t us) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(us);
    while (std::chrono::steady_clock::now() < end) {}
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    const bool is = reinterpret_cast<int64_t>(stream) == state.captured && state.captured != 0;
    return *status = is ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, cudaSuccess;
}
inline cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    return ++state.streams, *stream = reinterpret_cast<cudaStream_t>(kOwnStream), cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return --state.streams, cudaSuccess; }
inline cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    return capture = new Nodes, cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
    *graph = capture, capture = nullptr;
    return state.fails ? cudaErrorUnknown : cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
    return *made = new Executable{*graph}, ++state.made, ++state.alive, cudaSuccess;
}
inline cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return delete graph, --state.alive, cudaSuccess; }
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
    wait(state.replay_us);
    for (const auto& node : graph->nodes) node();
    return ++state.replayed, cudaSuccess;
}
"""
KERNELS = r"""
#include "executor.h"
extern "C" int add(const void* params, const uint64_t* pointers, uint64_t context) {
    const int64_t amount = *static_cast<const int64_t*>(params);
    if (amount < 0) return 7;
    auto* target = reinterpret_cast<int64_t*>(pointers[0]);
    const auto* source = reinterpret_cast<const int64_t*>(pointers[1]);
    const auto kernel = [=] { *target += *source * amount; };
    if (context == kOwnStream) return capture->push_back(kernel), 0;
    wait(state.launch_us);
    return kernel(), 0;
}
extern "C" const char* said(int code) { return code == 7 ? "seven" : "?"; }
extern "C" State* the_state() { return &state; }
"""
COMPILER = shutil.which("g++")


class State(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("made", "replayed", "alive", "streams", "launch_us", "replay_us", "fails", "captured")
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if COMPILER is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("replays")
    (folder / "cuda_runtime.h").write_text(RUNTIME)
    (folder / "it.cpp").write_text(KERNELS)
    flags = ["-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-D__CUDACC__", "-I", str(folder)]
    command = [COMPILER, *flags, "-I", str(PACKAGE), "-o", str(folder / "it.so"), str(folder / "it.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(folder / "it.so"))


class Lists:
    """Lists of launches; each launch adds `amount` times a source to a target."""

    def __init__(self, library: ctypes.CDLL, *lists: list[int]) -> None:
        self._library = library
        library.the_state.restype = ctypes.POINTER(State)
        library.fxfuse_error.restype = ctypes.c_char_p
        self.state = library.the_state().contents
        ctypes.memset(ctypes.byref(self.state), 0, ctypes.sizeof(State))
        self.state.launch_us = 50
        entry, error = (ctypes.cast(function, ctypes.c_void_p).value for function in (library.add, library.said))
        amounts = [amount for each in lists for amount in each]
        self._params = [array("q", [amount]) for amount in amounts]
        self._launches, self._references = array("Q"), array("Q")
        for number, params in enumerate(self._params):
            self._launches.extend((entry, error, params.buffer_info()[0], 2 * number | 2 << 32))
            self._references.extend((0, 0, 1, 8))  # the target; what lies behind the other address
        self._ends = [sum(map(len, lists[:count])) for count in range(len(lists) + 1)]
        self.cells = array("Q", bytes(8 * len(lists)))

    def launch(self, target: array[int], source: array[int], number: int = 0, stream: int = 5) -> int:
        table = array("Q", [target.buffer_info()[0], source.buffer_info()[0]])
        parts = [part.buffer_info()[0] for part in (self._launches, self._references, table)]
        return self._call(*parts, *self._ends[number : number + 2], self.cells.buffer_info()[0], number, stream=stream)

    def free(self) -> None:
        self._call(0, 0, 0, 0, 0, self.cells.buffer_info()[0], len(self.cells), stream=0)

    def _call(self, *arguments: int, stream: int) -> int:
        given = (ctypes.c_uint64 * len(arguments))(*arguments)
        return int(self._library.fxfuse_launch(None, given, ctypes.c_uint64(stream)))

    def error(self) -> str:
        return str(self._library.fxfuse_error(0).decode())


@pytest.fixture
def lists(library: ctypes.CDLL) -> Iterator[Lists]:
    """Lists of three, two and two launches; the last of which fails."""
    made = Lists(library, [1, 10, 100], [2, 20], [3, -1])
    yield made
    made.free()
    assert made.state.alive == made.state.streams == 0 and not any(made.cells)


def numbers(*values: int) -> array[int]:
    return array("q", values)


def test_launches_are_replayed_from_the_third_call_with_the_same_addresses(lists: Lists) -> None:
    target, source = numbers(0), numbers(0, 1)
    for call in range(1, 8):
        assert lists.launch(target, source) == 0
        assert target[0] == 111 * call
        assert (lists.state.made, lists.state.replayed) == (call >= 2, max(call - 2, 0))
    source[1] = 2  # read anew
    lists.launch(target, source)
    assert target[0] == 111 * 9


def test_each_list_has_its_own(lists: Lists) -> None:
    target, source = numbers(0), numbers(0, 1)
    for call in range(1, 5):
        assert lists.launch(target, source) == lists.launch(target, source, 1) == 0
        assert target[0] == 133 * call
    assert lists.state.made == lists.state.alive == 2


@pytest.mark.parametrize("count", [2, 4])
def test_a_few_addresses_may_alternate(lists: Lists, count: int) -> None:
    targets, source = [numbers(0) for _ in range(count)], numbers(0, 1)
    for call in range(5 * count):
        lists.launch(targets[call % count], source)
    assert all(target[0] == 555 for target in targets)
    assert (lists.state.made, lists.state.replayed) == (count, 3 * count)


def test_addresses_that_always_change_make_no_graphs(lists: Lists) -> None:
    targets, source = [numbers(0) for _ in range(9)], numbers(0, 1)
    for call in range(27):
        lists.launch(targets[call % 9], source)
    assert all(target[0] == 333 for target in targets)
    assert lists.state.made == 0


def test_addresses_that_go_on_changing_make_few_graphs(lists: Lists) -> None:
    targets, source = [numbers(0) for _ in range(20)], numbers(0, 1)
    for target in targets:
        for _ in range(3):
            lists.launch(target, source)
    assert all(target[0] == 333 for target in targets)
    assert lists.state.made == 12 and lists.state.alive <= 4


def test_in_a_long_loop_addresses_may_change_now_and_then(lists: Lists) -> None:
    targets, source = [numbers(0) for _ in range(20)], numbers(0, 1)
    for target in targets:
        for _ in range(102):
            lists.launch(target, source)
    assert all(target[0] == 102 * 111 for target in targets)
    assert (lists.state.made, lists.state.replayed) == (20, 2000)


@pytest.mark.parametrize(("launch", "replay", "stays"), [(100, 900, False), (300, 900, False), (300, 100, True)])
def test_replays_end_if_they_save_too_little(lists: Lists, launch: int, replay: int, stays: bool) -> None:
    lists.state.launch_us, lists.state.replay_us = launch, replay  # each of three launches, and all together
    target, source = numbers(0), numbers(0, 1)
    for call in range(1, 11):
        lists.launch(target, source)
        assert target[0] == 111 * call
    assert (lists.state.replayed, lists.state.alive) == ((8, 1) if stays else (4, 0))


def test_a_stream_that_is_captured_gets_the_launches(lists: Lists) -> None:
    target, source = numbers(0), numbers(0, 1)
    lists.state.captured = 5
    for call in range(1, 5):
        lists.launch(target, source)
        assert target[0] == 111 * call
    assert lists.state.made == 0
    for _ in range(4):
        lists.launch(target, source, stream=6)
    assert lists.state.replayed == 2


def test_launches_that_cannot_be_captured_are_made(lists: Lists) -> None:
    lists.state.fails = 1
    target, source = numbers(0), numbers(0, 1)
    for call in range(1, 6):
        assert lists.launch(target, source) == 0
        assert target[0] == 111 * call
    assert lists.state.made == 0


def test_errors_are_those_of_launches(lists: Lists) -> None:
    target, source = numbers(0), numbers(0, 1)
    for _ in range(5):
        assert lists.launch(target, source, 2) == 7
        assert lists.error() == "seven"
    assert target[0] == 15 and lists.state.made == 0


# ------------------------------------------------------------------------------------------------- on a GPU


class Rows(nn.Module):
    """Several kernels in a row: sums over rows and over columns, each of what the one before has made."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x + (x * self.scale).softmax(-1)
            x = x - x.softmax(0)
        return x


def graphs_launched(call: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return sum(event.count for event in profiled.key_averages() if event.key == "cudaGraphLaunch")


def close(made: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(made.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def rows() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """The model, optimised and with a program that is replayed; in float64; and what both are called with."""
    torch.manual_seed(0)
    model, x = Rows().cuda().eval(), torch.randn(96, 64, device="cuda")
    fast, exact = fxfuse.optimize(model), copy.deepcopy(model).double()  # later it would take memory of the calls'
    with torch.no_grad():
        for _ in range(8):
            fast(x)
    return fast, exact, x


class TestOnGpu:
    pytestmark = ON_GPU

    def test_programs_are_replayed_and_read_everything_anew(self, rows: Any) -> None:
        fast, exact, x = rows
        with torch.no_grad():
            assert graphs_launched(lambda: fast(x)) > 0
            for scale in (1.0, -0.5, 2.0):
                x.mul_(scale)
                close(fast(x), exact(x.double()))
            for mine, theirs in zip(fast.parameters(), exact.parameters(), strict=True):
                mine.mul_(0.5)
                theirs.mul_(0.5)
            close(fast(x), exact(x.double()))
            others = [x + number / 8 for number in range(6)]
            results = [fast(other) for other in others]  # all kept: memory is elsewhere at each call
            for other, result in zip(others, results, strict=True):
                close(result, exact(other.double()))

    def test_other_streams_and_captures_get_the_same(self, rows: Any) -> None:
        fast, exact, x = rows
        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(5):
                    result = fast(x)
            torch.cuda.current_stream().wait_stream(side)
            close(result, exact(x.double()))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = fast(x)
            x.mul_(-1.5)
            graph.replay()
            close(captured, exact(x.double()))
            close(fast(x), exact(x.double()))

    def test_steps_are_replayed(self) -> None:
        torch.manual_seed(0)
        model, x = Rows().cuda(), torch.randn(96, 64, device="cuda")
        exact, fast = copy.deepcopy(model).double(), fxfuse.optimize(model)

        def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            (parameter,) = model.parameters()
            parameter.grad = None
            model(x).square().mean().backward()
            return parameter.grad

        for turn in range(10):
            with torch.no_grad():
                x.mul_(-0.9)
                for each in (model, exact):
                    for parameter in each.parameters():
                        parameter.mul_(0.99)
            if turn == 9:
                assert graphs_launched(lambda: step(fast, x)) > 0
            mine, theirs = step(fast, x), step(exact, x.double())
            close(mine / theirs.norm(), theirs / theirs.norm())
