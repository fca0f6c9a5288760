"""A backward in segments gives the gradients that it gives in one, each as soon as its own segment has run.

In one process: what DistributedDataParallel says about its buckets is set here. tests/test_distributed.py has the rest.
"""

import contextlib
import copy
import gc
import itertools
import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers import KNOWS_THE_LAST_BACKWARD, Net, linear, randn
from test_loops import GPUS, where_steps_are
from test_training import Attention, Tied, made, weighed
from torch import nn

import fxfuse
from fxfuse import joint, segments, training_step

TINY = segments.Buckets(1, 1)
"""As many segments as there can be."""


@contextlib.contextmanager
def buckets(sizes=TINY):
    """Calls inside are as in DistributedDataParallel's forward, with buckets of these sizes."""
    with (
        mock.patch.object(training_step, "buckets_now", lambda: sizes),
        mock.patch.object(segments, "MOST", 32),  # so that small models have many
    ):
        yield


def normed(*layers):
    return nn.Sequential(*(each for layer in layers for each in (layer, nn.LayerNorm(16), nn.GELU())), nn.Linear(16, 4))


def both_added():
    """Two parameters whose gradients are one tensor."""
    model = Net(lambda m, x: torch.tanh(m.fc(x) + m.p + m.q) @ m.r, fc=linear(), p=randn(5, 8), q=randn(5, 8, seed=1))
    model.r = nn.Parameter(randn(8, 3))
    return model


def concatenated():
    """Parameters whose gradients are parts of one tensor."""
    return Net(lambda m, x: (m.fc(x) @ torch.cat((m.p, m.q), 1)).square(), fc=linear(), p=randn(8, 2), q=randn(8, 3))


def split():
    """One parameter that is used in parts, at both ends."""
    return Net(lambda m, x: F.silu(m.fc(torch.tanh(x @ m.p[:8]))) @ m.p[8:], fc=linear(), p=randn(16, 8))


def scaled():
    """A parameter that is read wherever there is anything."""
    return Net(
        lambda m, x: m.c(F.gelu(m.b(F.gelu(m.a(x) * m.s)) * m.s)) * m.s, a=linear(), b=linear(), c=linear(), s=randn(8)
    )


def convolutions():
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.BatchNorm2d(8),
        nn.SiLU(),
    ]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 4, 4))


def several():
    return Net(lambda m, x: (m.a(x).sigmoid(), m.b(F.gelu(m.a(x)))), a=linear(), b=linear())


CASES = {
    "linears": (lambda: normed(linear(16), nn.Linear(16, 16), nn.Linear(16, 16)), randn(5, 8)),
    "convolutions": (convolutions, randn(2, 3, 8, 8)),
    "a transformer": (lambda: nn.Sequential(Attention(), Attention(), nn.Linear(16, 4)), randn(2, 7, 16)),
    "tied weights": (Tied, torch.arange(10).view(2, 5)),
    "one gradient for two": (both_added, randn(5, 8)),
    "gradients in one memory": (concatenated, randn(5, 8)),
    "a weight in parts": (split, randn(5, 8)),
    "a weight everywhere": (scaled, randn(5, 8)),
    "dropout": (lambda: nn.Sequential(linear(), nn.Dropout(0.5), linear(), nn.Dropout(0.5), linear()), randn(5, 8)),
    "several results": (several, randn(5, 8)),
}  # fmt: skip


def model_of(name):
    torch.manual_seed(0)
    return CASES[name][0]().train(), CASES[name][1]


def gradients_of(fast, x, loss_of=weighed, autocast=False):
    """Of the parameters, by the last of several calls."""
    parameters = list(fast.parameters())
    for call in range(4):
        torch.manual_seed(call)
        for parameter in parameters:
            parameter.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = fast(x)
        loss_of(result).backward()
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_segment(name, autocast):
    model, x = model_of(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected = gradients_of(fxfuse.optimize(model), x, autocast=autocast)
    model.load_state_dict(state)
    with buckets():
        fast = fxfuse.optimize(model)
        found = gradients_of(fast, x, autocast=autocast)
    (step,) = made(fast)
    assert len(step.segments) > 1
    for have, want in zip(found, expected, strict=True):  # torch's sums, or those of a kernel with other steps beside
        torch.testing.assert_close(have, want)


@pytest.fixture(params=GPUS)
def gpu(request, monkeypatch):
    """A GPU, or a CPU that takes operators apart as for one, whose programs run on the emulated GPU."""
    return where_steps_are(request.param, monkeypatch)


@pytest.mark.parametrize(
    "name", ["linears", *(pytest.param(each, marks=pytest.mark.slow) for each in ("convolutions", "a transformer"))]
)
def test_gradients_on_a_gpu(name, gpu):
    """Where more is taken apart, rows are padded, and what stands between products is merged."""
    model, x = model_of(name)
    model, x = model.to(gpu), x.to(gpu)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected = gradients_of(fxfuse.optimize(model), x)
    model.load_state_dict(state)
    with buckets(segments.Buckets(300, 2000)):
        fast = fxfuse.optimize(model)
        found = gradients_of(fast, x)
    (step,) = made(fast)
    assert len(step.segments) > 1
    for have, want in zip(found, expected, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("loss_of", [lambda result: weighed(result[0]), lambda result: weighed(result[1])])
def test_results_that_nobody_uses(loss_of):
    """What depends on nothing else has no gradient."""
    model, x = model_of("several results")
    expected = gradients_of(model, x, loss_of)
    with buckets():
        found = gradients_of(fxfuse.optimize(model), x, loss_of)
    assert [each is None for each in found] == [each is None for each in expected]
    for have, want in zip(found, expected, strict=True):
        torch.testing.assert_close(have, want)


@KNOWS_THE_LAST_BACKWARD
def test_memory_that_a_segment_behind_needs_is_not_lent():
    """Each weight's gradient needs what the layer before it made, and that layer's own segment needs it once more."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(512, 512), nn.GELU()))), randn(1024, 512)
    expected = gradients_of(fxfuse.optimize(copy.deepcopy(model)), x)
    with buckets():
        fast = fxfuse.optimize(model)
        for _ in range(2):
            found = gradients_of(fast, x)
        for have, want in zip(found, expected, strict=True):
            torch.testing.assert_close(have, want)
        result = fast(x)
        (step,) = made(fast)
        kept = [each for segment in saved_by(result) for each in segment]
        result.sum().backward()
    assert len(step.segments) > 4
    assert sum(each.untyped_storage().nbytes() == 0 for each in kept) >= 3


def saved_by(result):
    """What each segment of a step keeps."""
    function = result.grad_fn
    while function is not None and hasattr(function, "saved_tensors"):
        yield (*function.saved_tensors, *function.unseen)
        following = [one for one, _ in function.next_functions if one is not None and hasattr(one, "saved_tensors")]
        function = following[0] if following else None


def test_gradients_arrive_between_segments():
    model, x = model_of("linears")
    events = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    run = training_step.TrainingStep.run_segment

    def noted(step, number, *args):
        events.append(number)
        return run(step, number, *args)

    with buckets(), mock.patch.object(training_step.TrainingStep, "run_segment", noted):
        fast = fxfuse.optimize(model)
        for _ in range(3):
            events.clear()
            weighed(fast(x)).backward()
    (step,) = made(fast)
    count = len(step.segments)
    assert [event for event in events if isinstance(event, int)] == list(range(count)) and count >= 7
    starts = [events.index(number) for number in range(count)] + [len(events)]
    assert all(end - start > 1 for start, end in itertools.pairwise(starts)), "each gives something"
    assert events.index("9.weight") < events.index(2) and events.index("0.weight") > events.index(count - 1)


@pytest.mark.parametrize("sizes", [segments.Buckets(300, 2000), segments.Buckets(10**6, 10**6), None])
def test_buckets_are_full(sizes):
    """A segment's gradients have a bucket's bytes at least, but for the last one's."""
    model, x = model_of("linears")
    with buckets(sizes):
        fast = fxfuse.optimize(model)
        for _ in range(2):
            weighed(fast(x)).backward()
    (step,) = made(fast)
    given = [parameter.nbytes for parameter in model.parameters()]
    if sizes is None or sizes.first > sum(given):
        assert len(step.segments) == 1
        return
    first, *others, _ = (sum(each.meta["val"].nbytes for each in outputs(segment)) for segment in step.segments)
    assert first >= sizes.first and all(each >= sizes.others for each in others) and len(others) == 1


def outputs(segment):
    return joint.results_of(segment.graph.graph)[: len(segment.gradients)]


@pytest.mark.parametrize("most", [2, 6, 20])
def test_there_are_not_too_many_segments(most):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(4, 4), nn.Tanh())))
    with buckets(), mock.patch.object(segments, "MOST", most):
        fast = fxfuse.optimize(model)
        for _ in range(2):
            fast(randn(3, 4)).sum().backward()
    (step,) = made(fast)
    assert most // 2 < len(step.segments) <= most


def test_calls_inside_and_outside_of_data_parallelism_have_steps_of_their_own():
    model, x = model_of("linears")
    fast = fxfuse.optimize(model)
    for sizes in (None, TINY, None):
        with buckets(sizes):
            for _ in range(3):  # the last one with programs, even where torch does not tell which backward is the last
                weighed(fast(x)).backward()
    assert sorted(len(step.segments) > 1 for step in made(fast)) == [False, True]
    assert "the backward (2 of 8)" in str(fxfuse.explain(fast, verbose=True))


# ------------------------------------------------------------------------------- what may happen in the meantime


@pytest.mark.parametrize("name", CASES)
def test_hooks_may_change_parameters_and_gradients_at_once(name):
    """An optimiser in the backward: what it writes into is read no more."""

    def trained(fused):
        model, x = model_of(name)

        def updated(parameter):
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad.fill_(torch.nan)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(updated)
        call = fxfuse.optimize(model) if fused else model
        for step in range(5):
            torch.manual_seed(step)
            weighed(call(x)).backward()
        return [parameter.detach() for parameter in model.parameters()]

    expected = trained(fused=False)
    with buckets():
        found = trained(fused=True)
    torch.testing.assert_close(found, expected)


def test_what_a_later_segment_reads_may_not_change():
    """As in eager: an error, not a wrong gradient."""
    model, x = model_of("linears")

    def hook(_):
        with torch.no_grad():
            model[0].weight.zero_()
            model[3].weight.zero_()

    with buckets():
        fast = fxfuse.optimize(model)
        for _ in range(3):
            weighed(fast(x)).backward()
        model[9].weight.register_post_accumulate_grad_hook(hook)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            weighed(fast(x)).backward()


def test_a_part_of_the_gradients_takes_a_part_of_the_segments():
    model, x = model_of("linears")
    expected = torch.autograd.grad(weighed(model(x)), [model[6].weight])
    ran = []
    run = training_step.TrainingStep.run_segment
    with buckets():
        fast = fxfuse.optimize(model)
        for _ in range(3):
            weighed(fast(x)).backward()
        (step,) = made(fast)
        with mock.patch.object(
            training_step.TrainingStep, "run_segment", lambda *args: ran.append(args[1]) or run(*args)
        ):
            found = torch.autograd.grad(weighed(fast(x)), [model[6].weight])
    torch.testing.assert_close(found, expected)
    assert ran == list(range(len(ran))) and 1 < len(ran) < len(step.segments)


def test_a_backward_may_run_again():
    model, x = model_of("a transformer")
    with buckets():
        fast = fxfuse.optimize(model)
        gradients_of(fast, x)
        loss, parameters = weighed(fast(x)), list(fast.parameters())
        once = torch.autograd.grad(loss, parameters, retain_graph=True)
        again = torch.autograd.grad(loss, parameters)
        assert all(map(torch.equal, once, again))
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_gradients_of_gradients():
    model, x = model_of("linears")

    def second(call):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(weighed(call(x)), parameters, create_graph=True)
        penalty = sum(each.square().sum() for each in gradients)
        return torch.autograd.grad(penalty, parameters, allow_unused=True)

    expected = second(model)
    with buckets():
        fast = fxfuse.optimize(model)
        gradients_of(fast, x)
        torch.testing.assert_close(second(fast), expected)


def test_many_gradients_at_once():
    model, x = model_of("linears")
    many = randn(3, 5, 4)

    def batched(call):
        parameters = list(model.parameters())
        return torch.autograd.grad(call(x), parameters, many, is_grads_batched=True)

    expected = batched(model)
    with buckets():
        fast = fxfuse.optimize(model)
        gradients_of(fast, x)
        torch.testing.assert_close(batched(fast), expected)


def test_nothing_is_kept_when_results_are_gone():
    """A result that the backward takes, too, is in no circle."""
    model = Net(lambda m, x: m.b(m.a(x).tanh()).sigmoid(), a=linear(), b=linear())
    x = randn(5, 8)
    with buckets():
        fast = fxfuse.optimize(model)
        for _ in range(4):
            fast(x).sum().backward()
        (step,) = made(fast)
        assert len(step.segments) > 1 and ("result", 0) in step.joint.kept
        gc.collect()
        gc.disable()
        try:
            for run in (lambda result: None, lambda result: result.sum().backward()):
                result = fast(x)
                run(result)
                gone = weakref.ref(result)
                node = weakref.ref(result.grad_fn)
                del result
                assert gone() is None and node() is None
        finally:
            gc.enable()
