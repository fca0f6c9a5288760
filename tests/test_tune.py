"""Which candidate runs: the model's first, the measured best or the remembered one. No GPU is needed here."""

import contextlib
import dataclasses
import json
from collections import Counter

import pytest
import torch

from fxfuse import build, cache
from fxfuse.cuda import exactness, tune
from fxfuse.errors import BuildError, ToolchainError
from fxfuse.problem import Plan, Postponed, Problem, TensorMeta, may_postpone

CPU = torch.device("cpu")


def problem(rows=64, epilogue="relu(acc)", features=32, dtype=torch.float32, alignment=16):
    x = TensorMeta((rows, 16), (16, 1), dtype, CPU, alignment)
    return Problem("linear", (), epilogue, x, TensorMeta((features, 16), (16, 1), dtype, CPU), None, ())


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """Tuning as on a GPU whose candidates take the seconds in `times`; notes what is built and what is measured."""

    class Gpu:
        def __init__(self):
            self.times, self.errors, self.built, self.measured = {}, {}, [], []

        def candidates(self, *names, broken=(), always=(), library=(), error=BuildError):
            def build(name):
                if name in broken:
                    raise error(name)
                self.built.append(name)
                return lambda *tensors: name

            return [
                tune.Candidate(
                    name,
                    name.split(",")[0],
                    lambda name=name: build(name),
                    always=name in (*always, *library),
                    library=name in library,
                )
                for name in names
            ]

        def measure(self, problem, ready):
            names = [candidate.name for candidate, _ in ready]
            self.measured.append(names)
            return {name: self.times[name] for name in names}

        def judge(self, problem, runs):
            return {name: self.errors.get(name, 0.5) for name in runs}

        def new_process(self):
            monkeypatch.setattr(tune, "_choices", {})

        def __call__(self, problem, candidates):
            self.built.clear()
            self.measured.clear()
            plan = tune.draft(problem, candidates)()
            assert plan.run(None, None, None, ()) == plan.kernel
            return plan.kernel

    fake = Gpu()
    fake.new_process()
    monkeypatch.setenv("FXFUSE_TUNE", "1")
    monkeypatch.setenv("FXFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "PROCESSORS", 4 * tune.MOST_CONTESTANTS)
    monkeypatch.setattr(tune, "_gpu", lambda device: ("a GPU", 108))
    monkeypatch.setattr(tune, "_measure", fake.measure)
    monkeypatch.setattr(exactness, "errors", fake.judge)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return fake


def test_the_fastest_is_chosen_and_remembered(gpu):
    gpu.times = {"a": 3.0, "b": 1.0, "c": 2.0}
    candidates = gpu.candidates("a", "b", "c")
    assert gpu(problem(), candidates) == "b" and gpu.measured == [["a", "b", "c"]]
    assert gpu(problem(), candidates) == "b" and not gpu.measured
    gpu.new_process()
    assert gpu(problem(), candidates) == "b" and gpu.built == ["b"] and not gpu.measured


def test_of_kernels_that_a_model_expects_to_take_as_long_one_is_compiled_for_all_problems(gpu, monkeypatch):
    monkeypatch.setattr(build, "PROCESSORS", 1)
    monkeypatch.setattr(tune, "_familiar", set())
    gpu.times = dict.fromkeys("abc", 1.0)

    def candidates(**estimates):
        return [
            dataclasses.replace(candidate, estimate=estimates[candidate.name], form=candidate.name)
            for candidate in gpu.candidates(*estimates)
        ]

    assert gpu(problem(64), candidates(a=1.0, b=1.02, c=3.0)) == "a"
    assert gpu(problem(1000), candidates(b=1.0, a=1.04, c=3.0)) == "a" and gpu.built == ["a"]
    assert gpu(problem(5000), candidates(b=1.0, c=1.01, a=1.2)) == "b"
    assert gpu(problem(20000), candidates(c=1.0, a=1.04, b=1.03)) == "a"  # in order, those that are familiar
    assert gpu(problem(90000), candidates(c=1.0)) == "c"


def test_the_report_gets_every_time(gpu):
    gpu.times = {"a": 3.0, "b": 1.0}
    assert dict(tune.draft(problem(), gpu.candidates("a", "b"))().measured) == gpu.times
    gpu.new_process()
    assert dict(tune.draft(problem(), gpu.candidates("a", "b"))().measured) == gpu.times


def test_the_model_decides_between_equals(gpu):
    gpu.times = {"a": 1.01, "b": 1.0}
    assert gpu(problem(), gpu.candidates("a", "b")) == "a"


@pytest.mark.parametrize(("error", "chosen"), [(1.0, "a"), (1.1, "b")])
def test_what_is_less_exact_than_eager_is_not_chosen(error, chosen, gpu):
    gpu.times, gpu.errors = {"a": 1.0, "b": 2.0, "library": 3.0}, {"a": error, "library": 9.0}
    candidates = gpu.candidates("a", "b", "library", library=("library",))
    for _ in range(2):
        assert gpu(problem(), candidates) == chosen
        assert dict(tune.draft(problem(), candidates)().errors) == {"a": error, "b": 0.5}
        gpu.new_process()


@pytest.mark.parametrize(("exact", "chosen"), [(("d",), "d"), ((), "library")])
def test_where_no_kernel_is_as_exact_the_next_are_tried_before_the_library_is_taken(exact, chosen, gpu):
    names = ("a", "b", "c", "d")
    gpu.times = {**dict.fromkeys(names, 1.0), "library": 3.0}
    gpu.errors = {name: 0.9 if name in exact else 1.5 for name in names}
    assert gpu(problem(), gpu.candidates(*names, "library", library=("library",))) == chosen
    assert gpu.built == ["a", "b", "c", "library", "d"]


def test_compiling_the_next_can_be_postponed(gpu):
    gpu.times = {**dict.fromkeys("abcd", 1.0), "library": 3.0}
    gpu.errors = {**dict.fromkeys("abc", 1.5), "d": 0.9}
    draft = tune.draft(problem(), gpu.candidates(*"abcd", "library", library=("library",)))
    with may_postpone(), pytest.raises(Postponed) as postponed:
        draft()
    assert gpu.built == ["a", "b", "c", "library"] and not gpu.measured
    postponed.value.compile()
    with may_postpone():
        assert draft().kernel == "d"
    assert gpu.built == ["a", "b", "c", "library", "d"] and len(gpu.measured) == 1


def test_few_are_measured_and_the_library_always(gpu):
    names = [f"k{i}" for i in range(10)]
    gpu.times = {**dict.fromkeys(names, 2.0), "library": 1.0}
    assert gpu(problem(), gpu.candidates(*names, "library", always=("library",))) == "library"
    assert gpu.measured == [[*names[: tune.MOST_CONTESTANTS], "library"]]


@pytest.mark.parametrize(("processors", "count"), [(1, 1), (4, 1), (8, 2), (64, 3)])
@pytest.mark.parametrize("library", [0, 10], ids=["library first", "library last"])
def test_few_processors_compile_few_but_one_at_least(processors, count, library, gpu, monkeypatch):
    monkeypatch.setattr(build, "PROCESSORS", processors)
    names = [f"k{i}" for i in range(10)]
    names.insert(library, "library")
    gpu.times = dict.fromkeys(names, 1.0)
    gpu(problem(), gpu.candidates(*names, always=("library",)))
    assert len(gpu.built) == 1 + (count if library else max(1, count - 1))


def test_what_a_model_expects_to_lose_is_not_compiled(gpu):
    gpu.times = dict.fromkeys(["library", "a", "b", "c"], 1.0)
    library, *kernels = gpu.candidates("library", "a", "b", "c", always=("library",))
    estimates = (10.0, 10.0 * tune.UNPROMISING, 10.1 * tune.UNPROMISING)
    kernels = [dataclasses.replace(kernel, estimate=time) for kernel, time in zip(kernels, estimates, strict=True)]
    gpu(problem(), [*kernels, library])
    assert gpu.built == ["a", "b", "library"] and gpu.measured == [["a", "b", "library"]]
    gpu.new_process()
    gpu(problem(rows=1000), [library, *kernels])  # those that are always measured count among the first
    assert gpu.measured == [["library", "a", "b"]]


@pytest.mark.parametrize(("single", "chosen"), [(2.0, "p + q"), (1.0, "a")])
def test_a_plan_made_of_others_is_measured_beside_the_candidates(single, chosen, gpu, monkeypatch):
    drafted = []

    def apart():
        drafted.append(True)
        return lambda: Plan(lambda *tensors: "p + q", "p + q", workspace=7)

    gpu.times = {"a": single, "p + q": 1.5}
    for first in (True, False):  # a new process finds what the first has stored, and makes nothing else
        made = tune.draft(problem(), gpu.candidates("a"), apart)()
        assert made.kernel == made.run(None, None, None, ()) == chosen and dict(made.measured) == gpu.times
        assert made.workspace == (7 if chosen == "p + q" else 0)
        assert gpu.built == (["a"] if first or chosen == "a" else [])
        assert bool(drafted) == (first or chosen == "p + q")
        gpu.new_process()
        gpu.built.clear()
        drafted.clear()
    monkeypatch.setenv("FXFUSE_TUNE", "0")
    assert tune.draft(problem(), gpu.candidates("a"), apart)().kernel == "a" and not drafted


def test_switched_off_the_first_is_taken(gpu, monkeypatch):
    monkeypatch.setenv("FXFUSE_TUNE", "0")
    assert gpu(problem(), gpu.candidates("a", "b")) == "a" and gpu.built == ["a"] and not gpu.measured


def test_a_single_candidate_is_not_measured(gpu):
    assert gpu(problem(), gpu.candidates("a")) == "a" and not gpu.measured


def test_under_capture_nothing_is_measured(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert gpu(problem(), gpu.candidates("a", "b")) == "a" and not gpu.measured
    assert tune.draft(problem(), gpu.candidates("a", "b"))().provisional
    assert not tune.draft(problem(), gpu.candidates("a"))().provisional
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    gpu.times = {"a": 2.0, "b": 1.0}
    assert gpu(problem(), gpu.candidates("a", "b")) == "b" and gpu.measured


def test_sizes_share_a_choice_up_to_the_next_power_of_two(gpu):
    gpu.times = {"tile 64, split 4": 1.0, "tile 64, split 2": 1.0, "tile 128": 2.0}
    assert gpu(problem(rows=40), gpu.candidates("tile 64, split 4", "tile 128")) == "tile 64, split 4"
    assert gpu(problem(rows=64), gpu.candidates("tile 128", "tile 64, split 2")) == "tile 64, split 2"
    assert not gpu.measured
    assert gpu(problem(rows=65), gpu.candidates("tile 128", "tile 64, split 2")) == "tile 64, split 2" and gpu.measured


@pytest.mark.parametrize(
    "other",
    [
        problem(epilogue="tanh(acc)"), problem(features=33), problem(dtype=torch.bfloat16), problem(alignment=4),
    ],
)  # fmt: skip
def test_other_problems_are_measured_anew(gpu, other):
    gpu.times = {"a": 1.0, "b": 2.0}
    gpu(problem(), gpu.candidates("a", "b"))
    gpu(other, gpu.candidates("a", "b"))
    assert gpu.measured


def test_gradients_of_filters_share_a_choice_among_images_of_like_number_and_size(gpu):
    def key(images, filters, channels, side, kernel=3):
        metas = (
            TensorMeta.of(
                torch.empty(images, count, side, side).to(torch.bfloat16, memory_format=torch.channels_last), CPU
            )
            for count in (filters, channels)
        )
        sides = {"kernel": kernel, "stride": 1, "padding": kernel // 2, "dilation": 1}
        options = (*((name, (value, value)) for name, value in sides.items()), ("groups", 1))
        return tune._key(Problem("conv2d_weight", options, "acc", *metas, None, ()))

    assert key(20, 64, 32, 28) == key(32, 64, 32, 30)
    for other in ((20, 63, 32, 28), (20, 64, 31, 28), (20, 64, 32, 40), (40, 64, 32, 28), (20, 64, 32, 28, 5)):
        assert key(*other) != key(20, 64, 32, 28)


@pytest.mark.parametrize("error", [BuildError, ZeroDivisionError, KeyError, MemoryError])
def test_a_candidate_that_does_not_compile_is_left_out(gpu, error, caplog):
    gpu.times = {"b": 1.0}
    assert gpu(problem(), gpu.candidates("a", "b", broken=("a",), error=error)) == "b"
    assert "a is left out" in caplog.text
    with pytest.raises(error):
        gpu(problem(rows=1000), gpu.candidates("a", "b", broken=("a", "b"), error=error))


@pytest.mark.parametrize("error", [BuildError, ZeroDivisionError])
def test_a_choice_that_no_longer_compiles_is_made_anew(gpu, error):
    gpu.times = {"a": 1.0, "b": 2.0}
    gpu(problem(), gpu.candidates("a", "b"))
    gpu.new_process()
    candidates = gpu.candidates("a", "b", broken=("a",), error=error)
    assert gpu(problem(), candidates) == "b" and gpu.measured == [["b"]]


@pytest.mark.parametrize("error", [BuildError, ZeroDivisionError])
def test_of_the_next_that_are_tried_those_that_fail_are_left_out(gpu, error):
    gpu.times = {**dict.fromkeys("abcde", 1.0), "library": 3.0}
    gpu.errors = {**dict.fromkeys("abc", 1.5), "e": 0.9}
    candidates = gpu.candidates(*"abcde", "library", library=("library",), broken=("d",), error=error)
    assert gpu(problem(), candidates) == "e"
    candidates = gpu.candidates(*"abcde", "library", library=("library",), broken=("d", "e"), error=error)
    assert gpu(problem(rows=1000), candidates) == "library"


@pytest.mark.parametrize("error", [ToolchainError, torch.cuda.OutOfMemoryError])
def test_what_is_no_candidates_fault_is_raised(gpu, error):
    with pytest.raises(error):
        gpu(problem(), gpu.candidates("a", "b", broken=("a",), error=error))


def test_a_candidate_that_fails_while_it_is_measured_is_left_out(gpu, monkeypatch, caplog):
    """At its first call, in a later one, or in those whose time on the CPU is taken."""
    calls = Counter()

    def failing_at(number, name):
        def run(*tensors):
            calls[name] += 1
            if calls[name] == number:
                raise ZeroDivisionError(name)
            return name

        return lambda: run

    monkeypatch.setattr(tune, "gpu_timer", lambda *device: lambda run, tensors: (run(*tensors), 1e-6)[1])
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(tune, "_measure", MEASURE)
    fails = {"first": 1, "second": 3, "third": 2 + tune.ROUNDS, "sound": 0}
    candidates = [tune.Candidate(name, name, failing_at(at, name), always=True) for name, at in fails.items()]
    plan = tune.draft(problem(), candidates)()
    assert plan.kernel == "sound" and [name for name, _ in plan.measured] == ["sound"]
    assert all(f"{name} is left out: ZeroDivisionError" in caplog.text for name in ("first", "second", "third"))


MEASURE = tune._measure


@pytest.mark.parametrize(("replayed", "expected"), [(False, "launched"), (True, "called")])
def test_a_call_that_takes_the_cpu_long_is_worth_a_slower_kernel_unless_it_is_replayed(
    replayed, expected, gpu, monkeypatch
):
    """In microseconds on the GPU and on the CPU, with a third whose CPU's time is hidden behind the GPU's."""
    times = {"called": (6, 30), "launched": (8, 10), "slow": (20, 10)}

    def running(name):
        def run(*tensors):
            return name

        run.times = times[name]
        return lambda: run

    monkeypatch.setattr(tune, "gpu_timer", lambda *device: lambda run, tensors: run.times[0] * 1e-6)
    monkeypatch.setattr(tune, "_time_to_issue", lambda run, tensors: run.times[1] * 1e-6)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(tune, "_measure", MEASURE)
    candidates = [tune.Candidate(name, name, running(name), always=True) for name in times]
    plan = tune.draft(dataclasses.replace(problem(), replayed=replayed), candidates)()
    assert plan.kernel == expected
    on_the_gpu = {name: seconds for name, (seconds, _) in times.items()}
    if not replayed:
        on_the_gpu |= {"called": 6 + (30 - 6) / 2, "launched": 8 + (10 - 8) / 2}
    assert {name: round(time * 1e6, 6) for name, time in plan.measured} == on_the_gpu


def test_a_new_generator_is_measured_against_the_old_choice(gpu, monkeypatch):
    gpu.times = {"a": 2.0, "b": 1.0, "new": 0.5}
    gpu(problem(), gpu.candidates("a", "b"))
    gpu.new_process()
    monkeypatch.setattr(tune, "_generators", lambda: "another version")
    assert gpu(problem(), gpu.candidates("a", "b", "new")) == "new"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_only_switches_that_matter_enter_the_key(gpu, dtype):
    """TF32 and fp32= say nothing about 16 bits."""
    fast = dataclasses.replace(problem(dtype=dtype), fp32="fast")
    assert (tune._key(problem(dtype=dtype)) == tune._key(fast)) == (dtype != torch.float32)


def test_without_a_compiler_the_error_is_the_compilers(gpu):
    def build():
        raise ToolchainError("no nvcc found")

    with pytest.raises(ToolchainError):
        gpu(problem(), [tune.Candidate(name, name, build) for name in "ab"])


DAMAGED = {
    "empty": "",
    "cut off": "{",
    "a list": "[]",
    "incomplete": '{"name": "a"}',
    "outdated": '{"name": "gone", "identity": "gone", "measured": [], "errors": []}',
    "no times": '{"name": "a", "identity": "a", "measured": 5, "errors": []}',
    "times that are none": '{"name": "a", "identity": "a", "measured": [["a", null]], "errors": []}',
    "times that no float holds": f'{{"name": "a", "identity": "a", "measured": [["a", 1{"0" * 400}]]}}',
    "nested": "[" * 100_000,
    "nested text": '"' + "[" * 100_000 + '"',
    "no text": "\x00\x01",
}


def as_stored(text):
    """The same as a document that nobody tampered with, where it is JSON at all."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    key = tune._key(problem())
    return json.dumps({"key": key, "digest": cache._digest(value), "value": value})


@pytest.mark.parametrize("store", [str, as_stored], ids=["bare", "stored"])
@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_or_outdated_file_is_replaced(gpu, text, store):
    gpu.times = {"a": 2.0, "b": 1.0}
    candidates = gpu.candidates("a", "b")
    gpu(problem(), candidates)
    (file,) = exactness.file_of("x").parent.glob("*.json")
    file.write_text(store(text))
    gpu.new_process()
    assert gpu(problem(), candidates) == "b" and gpu.measured
    assert json.loads(file.read_text())["value"]["name"] == "b"


def another_problems(file):
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "key": "0" * 32}))


def flipped(file):
    file.write_text(file.read_text().replace('"b"', '"a"'))  # as the digest tells


def linked(file):
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def in_a_folder_for_all(file):
    file.parent.chmod(0o777)


@pytest.mark.parametrize("tamper", [another_problems, flipped, linked, in_a_folder_for_all])
def test_choices_are_read_from_private_files_that_are_whole(gpu, tamper):
    gpu.times = {"a": 2.0, "b": 1.0}
    candidates = gpu.candidates("a", "b")
    gpu(problem(), candidates)
    tamper(exactness.file_of(tune._key(problem())))
    gpu.new_process()
    assert gpu(problem(), candidates) == "b" and gpu.measured


def test_a_cache_that_cannot_be_written_does_no_harm(gpu, monkeypatch, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "choices").write_text("in the way")
    gpu.times = {"a": 2.0, "b": 1.0}
    assert gpu(problem(), gpu.candidates("a", "b")) == "b"
    assert gpu(problem(), gpu.candidates("a", "b")) == "b" and not gpu.measured


def test_a_choice_that_cannot_be_stored_leaves_nothing_behind(gpu):
    gpu.times = {"a": 2.0, "b": 1.0}
    file = exactness.file_of(tune._key(problem()))
    file.mkdir(parents=True)
    assert gpu(problem(), gpu.candidates("a", "b")) == "b"
    assert list(file.parent.iterdir()) == [file]


def test_nothing_is_chosen_where_memory_does_not_suffice(gpu, monkeypatch):
    monkeypatch.setattr(tune, "_measure", lambda problem, ready: {})
    assert gpu(problem(), gpu.candidates("a", "b")) == "a"
    gpu.new_process()
    gpu.times = {"a": 2.0, "b": 1.0}
    monkeypatch.setattr(tune, "_measure", gpu.measure)
    assert gpu(problem(), gpu.candidates("a", "b")) == "b"
