"""Training in several processes: what fxfuse makes of a model trains as eager's does, on each of two ranks.

Two processes stand ready for the tests of this module and run them as ranks of a gloo group on the CPU. What a test
returns is compared between them bit for bit. A rank that fails takes both processes with it: the next test starts two
new ones.
"""

import contextlib
import copy
import datetime
import functools
import hashlib
import inspect
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from multiprocessing import connection
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from fuzz.graphs import steps_on_a_cpu
from helpers import KNOWS_THE_LAST_BACKWARD, linear, randn, skip_if_python
from test_training import assert_errors_as_eagers
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

import fxfuse
from fxfuse import step_graphs
from fxfuse.backend import compiled_graphs
from fxfuse.module import state_of
from fxfuse.step_graphs import StepGraphs
from fxfuse.training_step import TrainingStep

if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

RANKS = 2
SECONDS_OF_A_COLLECTIVE = 60
"""After which gloo gives up on the other rank."""
SECONDS_OF_A_TEST = 150
SECONDS_AFTER_A_FAILURE = 3
"""For the other rank to fail, too: it may wait for the one that did."""
EAGER_KNOWS_ALL_SINCE = "2.13"
"""Of torch; what eager itself cannot do on a CPU in an older one is skipped."""


# ------------------------------------------------------------------------------------------------- processes


def serve(rank, folder, pipe):
    """Runs the tests that arrive. Sends back how each ended, why, and what is to be the same on all ranks."""
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # Inductor of torch 2.3 starts processes, which a daemon may not
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS,
        timeout=datetime.timedelta(seconds=SECONDS_OF_A_COLLECTIVE),
    )  # fmt: skip
    while (asked := pipe.recv()) is not None:
        name, arguments = asked
        torch.compiler.reset()
        try:
            found = getattr(sys.modules[__name__], name).on_rank(**arguments)
            pipe.send(("passed", "", [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in found]))
        except pytest.skip.Exception as reason:
            pipe.send(("skipped", str(reason), []))
        except BaseException:
            pipe.send(("failed", traceback.format_exc(), []))
    distributed.destroy_process_group()


class Ranks:
    """The two processes, started when they are needed."""

    def __init__(self):
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self):
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, self._folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def stop(self, patience=0):
        """Ends the processes; by force those that have not ended after so many seconds."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=patience)
            process.kill()
            process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def run(self, name, arguments):
        """Ends as the test does on the ranks."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((name, arguments))
        answers = self._answers()
        outcomes = {outcome for outcome, _, _ in answers}
        if outcomes == {"skipped"}:
            pytest.skip(answers[0][1])
        if outcomes != {"passed"}:
            self.stop()
            texts = (f"--- rank {rank} {outcome}: {text}" for rank, (outcome, text, _) in enumerate(answers))
            pytest.fail("\n".join(texts), pytrace=False)
        assert answers[0][2], "nothing is compared between ranks"
        assert answers[0][2] == answers[1][2], "what is to be the same on all ranks differs"

    def _answers(self):
        """By rank."""
        answers, until = {}, time.monotonic() + SECONDS_OF_A_TEST
        while len(answers) < RANKS:
            waited_for = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = connection.wait(waited_for, timeout=max(0, until - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answer = "failed", "the process has died", []
                answers[self._pipes.index(pipe)] = answer
                if answer[0] == "failed":
                    until = min(until, time.monotonic() + SECONDS_AFTER_A_FAILURE)
        return [answers.get(rank, ("unknown", "no answer came in time", [])) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def ranks(session_cache):
    both = Ranks()
    yield both
    both.stop()


def on_both_ranks(test):
    """The test, run by both processes with the same arguments. It returns tensors that are the same on both ranks."""

    def run(ranks, **arguments):
        ranks.run(test.__name__, arguments)

    run.__name__, run.__doc__, run.on_rank = test.__name__, test.__doc__, test
    own = inspect.signature(test).parameters.values()
    run.__signature__ = inspect.Signature([inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD), *own])
    return run


# -------------------------------------------------------------------------------------------------- training

STEPS = 8


class Network(nn.Module):
    """Two layers, and perhaps a normalisation."""

    def __init__(self, norm=nn.Identity):
        super().__init__()
        self.first, self.norm, self.last = linear(16), norm(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(F.gelu(self.norm(self.first(x))))


class Branching(nn.Module):
    """A part of it is used in some calls; of another nothing has gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.extra, self.aside, self.last = linear(16), nn.Linear(16, 16), linear(4), nn.Linear(16, 4)

    def forward(self, x, extra: bool = False):
        y = F.gelu(self.first(x))
        if extra:
            y = y + F.gelu(self.extra(y))
        return self.last(y) + F.gelu(self.aside(x)).detach()


class ByDynamo(nn.Module):
    """fx does not trace it: how many chunks there are is a question that no proxy answers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = linear(16), linear(4)

    def forward(self, x):
        return self.last(sum(F.gelu(each) for each in self.first(x).chunk(2, -1)))


class Blocks(nn.Module):
    """Two blocks of layers, one behind the other."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(linear(16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)))
        self.last = linear(4)

    def forward(self, x):
        return self.last(F.silu(self.blocks(x)))


MODELS = {
    "mlp": Network,
    "blocks": Blocks,
    "batch norm": lambda: Network(nn.BatchNorm1d),
    "branching": Branching,
    "by Dynamo": ByDynamo,
}


def rank():
    return distributed.get_rank()


def data(step, dtype, rows=6, of_rank=None):
    """Inputs and targets of a step, others on each rank."""
    seed = 2 * (RANKS * step + (rank() if of_rank is None else of_rank))
    return randn(rows, 8, seed=seed).to(dtype), randn(rows, 4, seed=seed + 1).to(dtype)


def whole(tensor):
    """All of a tensor of which each rank has a part."""
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
    return tensor if tensor.is_floating_point() else tensor.double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_loss(model, step, dtype, **options):
    x, y = data(step, dtype, **options)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.detach()


def train(model, loss_of=plain_loss, optimizer_of=sgd):
    """Losses of several steps, the last gradients, what parameters and buffers have become, and results afterwards."""
    parameters = list(model.parameters())
    optimizer, losses, dtype = optimizer_of(parameters), [], parameters[0].dtype
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(loss_of(model, step, dtype))
        optimizer.step()
    gradients = [None if each.grad is None else whole(each.grad) for each in parameters]
    state = [*map(whole, parameters), *map(whole, model.buffers())]
    model.eval()
    with torch.no_grad():
        results = [model(data(call, dtype, of_rank=0)[0]).clone() for call in range(3)]
    return {"losses": [torch.stack(losses)], "gradients": gradients, "state": state, "results": results}


WAYS = {
    "optimised": lambda model, wrap: wrap(fxfuse.optimize(model)),
    "compiled": lambda model, wrap: torch.compile(wrap(model), backend="fxfuse"),
    "compiled inside": lambda model, wrap: wrap(torch.compile(model, backend="fxfuse")),
    "optimised outside": lambda model, wrap: fxfuse.optimize(wrap(model)),
}
REPLAYED = {"replayed": lambda model, wrap: wrap(fxfuse.optimize(model, cuda_graphs=True))}
OF_A_MODEL = pytest.mark.parametrize("way", ["optimised", "compiled"])


def assert_trains_as_eager(name, wrap, way="optimised", fused=STEPS - 1, seed=None, exact_wrap=None, **options):
    """What `way` makes of a model and `wrap` trains as what `wrap` makes of the model alone.

    Args:
        fused: how many backwards are training steps' at least; of parameters in parts none need be.
        seed: of the parameters; others on each rank if there is none.
        exact_wrap: in the place of `wrap` for float64.

    Returns the parameters.
    """
    torch.manual_seed(rank() if seed is None else seed)
    model = MODELS[name]()
    try:
        expected = train(wrap(copy.deepcopy(model)), **options)
    except Exception as error:
        if TorchVersion(torch.__version__) >= EAGER_KNOWS_ALL_SINCE:
            raise
        pytest.skip(f"eager itself raises {error!r}")
    exact = train((exact_wrap or wrap)(copy.deepcopy(model).double()), **options)
    run, backwards = TrainingStep.begun, []
    with mock.patch.object(TrainingStep, "begun", lambda *args: backwards.append(args[0]) or run(*args)):
        found = train({**WAYS, **REPLAYED}[way](model, wrap), **options)
    for kind, have in found.items():
        assert_errors_as_eagers(have, expected[kind], exact[kind], where=kind)
    if not backwards:
        skip_if_python(fxfuse.optimize(copy.deepcopy(model)))
    assert len(backwards) >= fused, f"{len(backwards)} of {STEPS} backwards are fused"
    return found["state"][: len(list(model.parameters()))]


# -------------------------------------------------------------------------------- DistributedDataParallel

TINY = 1e-4
"""Megabytes of a bucket, fewer than two parameters have."""


def ddp(**options):
    return lambda model: DistributedDataParallel(model, **options)


@contextlib.contextmanager
def graphs_of_tiny_buckets():
    """torch.compile splits graphs where buckets end, and refuses them if the first may be larger than the others."""
    with mock.patch.object(distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1):
        yield


@pytest.mark.parametrize("name", ["mlp", "batch norm"])
@pytest.mark.parametrize("way", WAYS)
@on_both_ranks
def test_data_parallel(way, name):
    return assert_trains_as_eager(name, ddp(), way)


@OF_A_MODEL
@pytest.mark.parametrize("name", ["mlp", "batch norm"])
@on_both_ranks
def test_buckets_smaller_than_the_model(way, name):
    with graphs_of_tiny_buckets():
        found = assert_trains_as_eager(name, ddp(bucket_cap_mb=TINY), way)
    if way == "compiled":
        assert len(compiled_graphs()) > 1
    return found


@OF_A_MODEL
@pytest.mark.parametrize("bucket_cap_mb", [25, TINY])
@on_both_ranks
def test_gradients_that_are_views_of_buckets(way, bucket_cap_mb):
    with graphs_of_tiny_buckets():
        return assert_trains_as_eager("mlp", ddp(gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb), way)


@OF_A_MODEL
@pytest.mark.parametrize("bucket_cap_mb", [25, TINY])
@on_both_ranks
def test_static_graphs(way, bucket_cap_mb):
    with graphs_of_tiny_buckets():
        return assert_trains_as_eager("mlp", ddp(static_graph=True, bucket_cap_mb=bucket_cap_mb), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["mlp", "batch norm", "by Dynamo"])
@on_both_ranks
def test_buckets_are_sent_while_the_backward_runs(way, name):
    """The first one at least before the last part of the backward has begun."""
    events, run = [], TrainingStep.run_segment

    def sent(_, bucket):
        events.append("bucket")
        mean = bucket.buffer().div_(RANKS)
        return distributed.all_reduce(mean, async_op=True).get_future().then(lambda future: future.value()[0])

    def noted(*args):
        events.append("part")
        return run(*args)

    def wrap(model):
        wrapped = DistributedDataParallel(model, bucket_cap_mb=TINY)
        wrapped.register_comm_hook(None, sent)
        return wrapped

    with graphs_of_tiny_buckets():
        torch.manual_seed(0)
        fast = WAYS[way](MODELS[name](), wrap)
        for step in range(6):
            events.clear()
            with mock.patch.object(TrainingStep, "run_segment", noted):
                plain_loss(fast, step, torch.float32)
    if "part" not in events:
        skip_if_python(fxfuse.optimize(MODELS[name]()))
    assert events.count("bucket") > 1 and events.count("part") > 1, events
    last = len(events) - 1 - events[::-1].index("part")
    assert "bucket" in events[:last], events
    return [parameter.grad for parameter in fast.parameters()]


def accumulated_loss(model, step, dtype):
    """Of two batches, of which only the second's backward waits for the other rank."""
    with model.no_sync():
        first = plain_loss(model, 2 * step, dtype)
    return first + plain_loss(model, 2 * step + 1, dtype)


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("bucket_cap_mb", [25, TINY])
@on_both_ranks
def test_accumulated_gradients(as_views, bucket_cap_mb):
    wrap = ddp(gradient_as_bucket_view=as_views, bucket_cap_mb=bucket_cap_mb)
    with graphs_of_tiny_buckets():
        return assert_trains_as_eager("batch norm", wrap, fused=2 * STEPS - 1, loss_of=accumulated_loss)


@KNOWS_THE_LAST_BACKWARD
@pytest.mark.parametrize("loss_of", [plain_loss, accumulated_loss])
@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("bucket_cap_mb", [25, TINY])
@on_both_ranks
def test_steps_that_are_cuda_graphs(bucket_cap_mb, as_views, loss_of):
    """A stand-in takes the place of CUDA graphs."""
    run, replays = StepGraphs.backward, []
    wrap = ddp(gradient_as_bucket_view=as_views, bucket_cap_mb=bucket_cap_mb)
    with (
        graphs_of_tiny_buckets(),
        steps_on_a_cpu(),
        mock.patch.object(step_graphs, "STEPS_BEFORE", 2),
        mock.patch.object(StepGraphs, "backward", lambda *args: replays.append(found := run(*args)) or found),
    ):
        parameters = assert_trains_as_eager("batch norm", wrap, "replayed", loss_of=loss_of)
    assert sum(found is not None for found in replays) >= 2
    return parameters


@on_both_ranks
def test_accumulated_gradients_of_a_compiled_model():
    return assert_trains_as_eager("mlp", ddp(), "compiled", fused=2 * STEPS - 4, loss_of=accumulated_loss)


def branching_loss(model, step, dtype):
    """Of a branch that is used by no rank, by one of them, or by both."""
    x, y = data(step, dtype)
    loss = F.mse_loss(model(x, bool(step >> rank() & 1)), y)
    loss.backward()
    return loss.detach()


@OF_A_MODEL
@pytest.mark.parametrize("bucket_cap_mb", [25, TINY])
@on_both_ranks
def test_parameters_that_some_calls_do_not_use(way, bucket_cap_mb):
    wrap = ddp(find_unused_parameters=True, bucket_cap_mb=bucket_cap_mb)
    with graphs_of_tiny_buckets():
        return assert_trains_as_eager("branching", wrap, way, fused=STEPS - 2, loss_of=branching_loss)


def uneven_loss(model, step, dtype):
    """Of batches of which only one rank's is as the one before: the other's call is of a new kind."""
    return plain_loss(model, step, dtype, rows=6 if rank() == 0 or step < 3 else 6 + step)


@on_both_ranks
def test_one_rank_is_fused_while_the_other_is_not():
    fused = STEPS - 1 if rank() == 0 else 2
    return assert_trains_as_eager("mlp", ddp(bucket_cap_mb=TINY), fused=fused, loss_of=uneven_loss)


@pytest.mark.parametrize("bucket_cap_mb", [25, TINY])
@on_both_ranks
def test_a_model_that_dynamo_captures(bucket_cap_mb):
    """Inside of DistributedDataParallel torch.compile splits graphs by buckets, also those that optimize asks for."""
    return assert_trains_as_eager("by Dynamo", ddp(bucket_cap_mb=bucket_cap_mb), fused=STEPS - 4)


@OF_A_MODEL
@on_both_ranks
def test_compressed_gradients(way):
    hooks = pytest.importorskip("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")

    def compressing(model):
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, hooks.fp16_compress_hook)
        return wrapped

    return assert_trains_as_eager("mlp", compressing, way, exact_wrap=ddp())


@on_both_ranks
def test_optimizers_with_parts_of_the_state_on_each_rank():
    optim = pytest.importorskip("torch.distributed.optim")

    def optimizer_of(parameters):
        return optim.ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, momentum=0.9)

    return assert_trains_as_eager("mlp", ddp(), optimizer_of=optimizer_of)


# SyncBatchNorm is left out: on a CPU torch itself raises ValueError ("only work with GPU modules").


# ---------------------------------------------------------------------------------- parameters in parts


def mesh():
    return pytest.importorskip("torch.distributed.device_mesh").init_device_mesh("cpu", (RANKS,))


def sharded(parts, **options):
    """Shards layers, the root or both."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no FSDP2")

    def shard(model):
        if parts != "root":
            for layer in list(model.modules()):
                if layer is not model and list(layer.parameters(recurse=False)):
                    fsdp.fully_shard(layer, mesh=mesh(), **options)
        return model if parts == "layers" else fsdp.fully_shard(model, mesh=mesh(), **options)

    return shard


@pytest.mark.parametrize("name", ["mlp", "batch norm"])
@pytest.mark.parametrize("parts", ["root", "layers", "layers and root"])
@pytest.mark.parametrize("way", WAYS)
@on_both_ranks
def test_sharded_models(way, parts, name):
    return assert_trains_as_eager(name, sharded(parts), way, fused=0, seed=0)


@pytest.mark.parametrize("way", ["optimised", "optimised outside"])
@pytest.mark.parametrize("again", [False, True])
@on_both_ranks
def test_sharded_blocks_are_fused(way, again):
    fsdp = pytest.importorskip("torch.distributed.fsdp")

    def shard(model):
        for block in model.blocks.children():
            fsdp.fully_shard(block, mesh=mesh(), reshard_after_forward=again)
        return fsdp.fully_shard(model, mesh=mesh(), reshard_after_forward=again)

    return assert_trains_as_eager("blocks", shard, way, fused=2 * (STEPS - 5), seed=0)


@pytest.mark.parametrize("parts", ["root", "layers and root"])
@pytest.mark.parametrize("again", [False, True])
@on_both_ranks
def test_parameters_that_are_gone_between_forward_and_backward(again, parts):
    return assert_trains_as_eager("mlp", sharded(parts, reshard_after_forward=again), fused=0, seed=0)


@pytest.mark.parametrize("way", WAYS)
@on_both_ranks
def test_sharded_models_that_compute_in_16_bits(way):
    exact_wrap = sharded("layers and root")
    policy = pytest.importorskip("torch.distributed.fsdp").MixedPrecisionPolicy
    wrap = sharded("layers and root", mp_policy=policy(param_dtype=torch.bfloat16, output_dtype=torch.float32))
    return assert_trains_as_eager("mlp", wrap, way, fused=0, seed=0, exact_wrap=exact_wrap)


def divided(model):
    """The first layer's outputs and the last one's inputs."""
    parallel = pytest.importorskip("torch.distributed.tensor.parallel")
    first, last = (name for name, layer in model.named_modules() if isinstance(layer, nn.Linear))
    plan = {first: parallel.ColwiseParallel(), last: parallel.RowwiseParallel()}
    return parallel.parallelize_module(model, mesh(), plan)


@pytest.mark.parametrize("way", WAYS)
@on_both_ranks
def test_layers_of_which_each_rank_has_a_part(way):
    loss_of = functools.partial(plain_loss, of_rank=0)
    return assert_trains_as_eager("mlp", divided, way, fused=0, seed=0, loss_of=loss_of)


@on_both_ranks
def test_parts_are_fused_in_compiled_models():
    """On each rank, between collectives. Their own errors are compared by the tests above."""
    torch.manual_seed(0)
    model = divided(Network())
    fast = torch.compile(model, backend="fxfuse")
    for step in range(3):
        plain_loss(fast, step, torch.float32, of_rank=0)
    report = fxfuse.explain(fast, verbose=True)
    assert len(report.regions) >= 2 and any("one pass" in str(region) for region in report.regions)
    reasons = [state_of(graph).programs.reason for _, graph in report.graphs if state_of(graph).programs is not None]
    assert any(reason is not None and "is a collective" in reason for reason in reasons), reasons
    model.eval()
    with torch.no_grad():
        x, _ = data(0, torch.float32, of_rank=0)
        torch.testing.assert_close(fast(x), model(x))
    return [whole(parameter.grad) for parameter in model.parameters()]


class Dropping(Network):
    def forward(self, x):
        return self.last(F.dropout(F.gelu(self.first(x)), 0.5, self.training))


@on_both_ranks
def test_parts_that_are_drawn_are_left_to_torch():
    torch.manual_seed(0)
    model = divided(Dropping())
    fast = torch.compile(model, backend="fxfuse")
    for step in range(3):
        plain_loss(fast, step, torch.float32, of_rank=0)
    assert "come from torch" in str(fxfuse.explain(fast, verbose=True))
    return [whole(parameter.grad) for parameter in model.parameters()]


@on_both_ranks
def test_the_report_says_that_torch_computes_parts():
    torch.manual_seed(0)
    fast = divided(fxfuse.optimize(Network()))
    for step in range(3):
        plain_loss(fast, step, torch.float32, of_rank=0)
    report = fxfuse.explain(fast)
    assert "'first' has hooks, and parameters of which each process holds a part (DTensor)" in report.training[0]
    return [whole(parameter) for parameter in fast.parameters()]


@on_both_ranks
def test_tensors_that_are_in_parts_everywhere():
    """Without hooks: who calls the model gives parts."""
    parts = pytest.importorskip("torch.distributed.tensor")
    if not hasattr(parts, "Shard"):
        pytest.skip(f"torch {torch.__version__} has no public DTensor")

    def in_parts(model):
        for layer, placement in ((model.first, parts.Shard(0)), (model.last, parts.Shard(1))):
            whole_bias = placement if placement.is_shard(0) else parts.Replicate()
            layer.weight = nn.Parameter(parts.distribute_tensor(layer.weight.detach(), mesh(), [placement]))
            layer.bias = nn.Parameter(parts.distribute_tensor(layer.bias.detach(), mesh(), [whole_bias]))
        return model

    def loss_of(model, step):
        x, y = data(step, torch.float32, of_rank=0)
        loss = F.mse_loss(model(parts.distribute_tensor(x, mesh(), [parts.Replicate()])).full_tensor(), y)
        loss.backward()

    torch.manual_seed(0)
    model = in_parts(Network())
    loss_of(model, 3)
    expected = [whole(parameter.grad) for parameter in model.parameters()]
    fast = fxfuse.optimize(model)
    for step in range(4):
        for parameter in model.parameters():
            parameter.grad = None
        loss_of(fast, step)
    found = [whole(parameter.grad) for parameter in model.parameters()]
    torch.testing.assert_close(found, expected)
    assert "gradients of the model come from torch where each process holds a part" in fxfuse.explain(fast).training[0]
    return found
