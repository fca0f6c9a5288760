"""Programs: calls without gradients that run as a list give what eager gives, whatever happens between them."""

import contextlib
import copy
import functools
import types
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from helpers import Net, Net2, assert_as_eager, linear, randn, skip_if_dynamo_refuses, skip_if_python
from torch import fx, nn
from torch.utils import _pytree as pytree

import fxfuse
from fxfuse import events, program
from fxfuse.guard import Guard
from fxfuse.module import state_of
from fxfuse.program import MOST_KEPT, constants, record
from fxfuse.program.binding import PATIENCE
from fxfuse.program.leaves import Leaves
from fxfuse.program.merge import in_one_launch
from fxfuse.program.values import Call, Launch, Slot

X = randn(4, 8)


def programs(fast):
    return state_of(fast).programs.programs


def views(m, x):
    q, k, v = m.fc(x * 2 + 1).view(-1, 2, 4).permute(1, 0, 2).sigmoid().mul(0.5).unbind(0)[0].chunk(4, -1)[:3]
    return q * k.exp() + v, k.transpose(0, 1)


def parts_are_set(m, x):
    y = m.fc(x * 2 + 1).tanh()
    y[:, 0] = 3
    y[y > 0.5] = 0
    y[1:3, 2:4] = x[:2, :2] * 2
    y[torch.tensor([0, 2]), torch.tensor([1, 3])] = -1.0
    y[:, torch.tensor([1])] = x[:, :1]
    return (y * 2 + 1).sigmoid()


def a_mask_of_numbers(m, x):
    places = torch.arange(8) - torch.arange(4).unsqueeze(1)
    mask = torch.zeros(4, 8).masked_fill_(places > 0, -3.0)
    mask[0, 0] = 2
    return (m.fc(x).relu() * 2 + mask).exp().cumsum(0), mask.sum() * x.sum()


def without_dimensions(m, x):
    y, index = m.fc(x)[0, 0] * 2 + 1, (x[:1, 0] * 0).long()
    found = y.index_select(0, index).gather(0, index) + y.gather(0, index) + y.gather(0, index[0]) + y.flip(())
    found = found + x[0].gather(0, index[0]) + x[0].index_select(0, index[0]) + y.sum(0, keepdim=True)
    return found.index_copy(0, index[0], y * 3), y.index_copy(0, index, y * 3) + y.cumsum(0)


MODELS = {
    "tensors without dimensions": without_dimensions,
    "parts are set": parts_are_set,
    "prelu of a vector": lambda m, x: F.prelu(m.fc(x)[0] * 2 + 1, m.fc.bias[:1]).cumsum(0) * 2 + 1,
    "prelu of a number": lambda m, x: F.prelu(m.fc(x)[0, 0] * 2 + 1, m.fc.bias[:1]) * 2 + 1,
    "a mask of numbers": a_mask_of_numbers,
    "the shape of numbers": lambda m, x: m.fc(x).relu() + torch.ones_like(torch.arange(8)).cumsum(0) + x.cumsum(1),
    "numbers that the caller gets": lambda m, x: (torch.arange(4), m.fc(x).relu() * torch.arange(8)),
    "numbers that are overwritten": lambda m, x: (lambda n: (n.add_(x), m.fc(n).relu() + n)[1])(x.new_ones(4, 8)),
    "a chain": lambda m, x: (x * 2 + 1).sigmoid() * x.tanh(),
    "two chains between layers": lambda m, x: F.softmax((m.fc((x * 2).tanh() + 1) * 3).exp().add(1), -1).mul(2).add(x),
    "views": views,
    "in place": lambda m, x: m.fc(x * 2 + 1).relu_().mul_(3).add_(1),
    "in place on a view": lambda m, x: (lambda y: (y[:, :4].mul_(2).add_(1), y * 3 + x)[1])(m.fc(x).sigmoid() + 1),
    "an argument is returned": lambda m, x: (x, (x + 1).exp() * 2),
    "a view of an argument is returned": lambda m, x: (x.t(), (x + 1).exp() * 2),
    "a value twice": lambda m, x: (lambda y: {"a": y, "b": [y, y.view(-1)]})((x + 1).exp() * 2),
    "a view of a result is returned": lambda m, x: ((x + 1).exp() * 2).view(2, -1).t(),
    "parts": lambda m, x: (lambda y: torch.cat([y[0].exp() * 2 + 1, y[1]], -1).sigmoid() - 1)(m.fc(x).chunk(2, -1)),
    "a named tuple": lambda m, x: torch.max((m.fc(x) * 2 + 1).relu(), 1),
    "another dtype": lambda m, x: (m.fc((x * 2 + 1).tanh()).double() * 2 + 1).exp().float().sin() * 3,
    "a fresh tensor": lambda m, x: (x + torch.ones(8) * 2).exp() * 3 - m.fc(x),
    "operators with many arguments": lambda m, x: (
        torch.max(x.add(2, alpha=3), 1, True).values
        + x.var(1, correction=2, keepdim=True)
        + x[torch.tensor([3, 2, 1, 0])]
        + torch.add(m.fc(x) * 2 + 1, 1, alpha=2)
        + F.pad(x[:, 1:], (1, 0), value=0.5)
        + torch.sort(x, stable=True).values
        + x.roll((1, 2), (0, 1))
        + torch.std(x, 0, unbiased=False)
        + x.sum(1, True, dtype=torch.float64).float()
        + torch.addcmul(x, x, x, value=0.5)
        + x.clamp(max=0.5)
        + x.new_full((1,), 2.0)
        + x.cumsum(1, dtype=torch.float32)
    ),
    "no memory of its own": lambda m, x: (x.expand(3, 4, 8) * 2 + 1).exp().sum(0),
}


@pytest.mark.parametrize("name", MODELS)
def test_results_are_eagers(name):
    torch.manual_seed(0)
    model = Net(MODELS[name], fc=linear())
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for seed in range(5):
            torch.manual_seed(seed)
            assert_as_eager(model, fast, torch.randn(4, 8))
    assert len(programs(fast)) == 1, state_of(fast).programs.reason


def test_zeros_without_memory(caplog):
    """Gradients of complex numbers hold such tensors. Kernels that read them would read address 0."""
    model = Net(lambda m, x: m.fc(x).relu() * 2 + torch.ops.aten._efficientzerotensor([4, 8]), fc=linear())
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for _ in range(5):
            assert_as_eager(model, fast, X)
    assert not programs(fast) and "could not be noted" not in caplog.text


def at(place, *shape):
    """A tensor whose elements begin `place` of them behind a multiple of 16 bytes."""
    size = torch.Size(shape).numel()
    memory = torch.randn(size + 8)
    assert memory.data_ptr() % 16 == 0
    return memory[place : place + size].view(shape)


def program_of(model, *inputs, calls=5, **compared):
    """The only program of the optimised model, which gave what eager gives."""
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for _ in range(calls):
            assert_as_eager(model, fast, *inputs, **compared)
    (made,) = programs(fast) or [pytest.fail(state_of(fast).programs.reason)]
    return made


def test_what_is_made_of_numbers_is_made_once():
    made = program_of(Net(a_mask_of_numbers, fc=linear()), randn(4, 8))
    assert not made.calls.keys() & {"arange", "zeros", "masked_fill_", "setitem", "sub", "gt", "fill_"}


def test_what_a_region_makes_of_numbers_is_made_once():
    def forward(m, x):
        return m.fc(x).relu() * 2 + ((torch.arange(8.0) * 0.5 - 1).sigmoid() + 1).cumsum(0)

    made = program_of(Net(forward, fc=linear()), randn(4, 8))
    assert not made.calls.keys() & {"arange", "cumsum"} and made.launches == 1, made.code


def test_what_is_drawn_or_given_is_made_at_every_call():
    drawn = lambda x: torch.zeros(3).normal_(0, 0) + x.sum()  # noqa: E731
    model = Net(lambda m, x: (m.fc(x).relu() * 2, drawn(x), m.fc.bias.cumsum(0)), fc=linear())
    assert {"normal_", "cumsum"} <= program_of(model, X).calls.keys()


def test_no_more_numbers_are_kept_than_there_is_room_for(monkeypatch):
    model = Net(lambda m, x: (m.fc(x).relu() * torch.ones(4, 1).cos()) + torch.arange(8).cumsum(0), fc=linear())
    assert not program_of(model, randn(4, 8)).calls.keys() & {"ones", "cumsum"}
    monkeypatch.setattr(constants, "MOST_BYTES", 100)
    assert program_of(model, randn(4, 8)).calls.keys() & {"ones", "cumsum"} == {"cumsum"}


def test_indices_on_a_cpu_are_brought_to_the_device_once(monkeypatch):
    """Another device than the CPU is wanted, and its memory never read."""
    monkeypatch.setattr(record.Recorder, "_autocast", lambda _: None)
    fast = fxfuse.optimize(Net(lambda m, x: torch.ops.aten.index(x, [torch.arange(2).flip(0), None, torch.arange(2)])))
    x = torch.randn(8, 3, 4, device="meta")
    given = {node: x for node in fast.graph.nodes if node.op == "placeholder"}
    recorder = record.Recorder(fast, fast.graph, Leaves([]), given, [x])
    recorder.run()
    assert recorder.reason is None
    left, kept = constants.without_constants(recorder.steps, recorder.output)
    assert [step.name for step in left] == ["index.Tensor"]
    assert [slot.constant.device.type for slot in kept] == ["meta", "meta"]


class Further(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x, scale=2.0, **options):
        return (self.fc(x) * scale).relu()


def test_further_arguments_that_nobody_reads():
    model = Further()
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for _ in range(4):
            assert_as_eager(model, fast, X)
        assert len(programs(fast)) == 1
        for _ in range(2):
            assert_as_eager(model, fast, X, other=3)
            assert_as_eager(model, fast, X, 3.0, other=3)


@dataclass
class Output(dict):
    """As results of transformers are."""

    first: torch.Tensor | None = None
    second: torch.Tensor | None = None

    def __post_init__(self):
        self.update(first=self.first, second=self.second)


pytree.register_pytree_node(
    Output, lambda output: ([output["first"], output["second"]], None), lambda parts, _: Output(*parts)
)


def test_results_that_hold_what_they_are_given():
    made = program_of(Net(lambda m, x: Output(m.fc(x).relu() * 2, second=x + 1), fc=linear()), X)
    assert made.launches


def test_arguments_in_one_memory():
    model = Net2(lambda m, x, y: (m.fc(x).relu() * 2 + m.fc(y).tanh(), y, x.view(-1)), fc=linear())
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for first, second in 4 * [(0, 1)] + 4 * [(1, 0)] + [(0, 1)] + 4 * [(1, 1)]:
            memory = torch.randn(5, 8)
            x, y = memory[first : first + 4], memory[second : second + 4]
            expected, (made, same, view) = model(x, y), fast(x, y)
            torch.testing.assert_close(made, expected[0])
            assert same is y and view._base is memory and view.data_ptr() == x.data_ptr()
        for _ in range(2):
            assert_as_eager(model, fast, torch.randn(4, 8), torch.randn(4, 8))
    assert len(programs(fast)) == 4, "one for each distance, and one for two memories"


class Captured(nn.Module):
    """What fx cannot trace, so that Dynamo captures it."""

    def __init__(self, computed):
        super().__init__()
        self.fc, self.computed = linear(), computed

    def forward(self, x):
        x = x.view(*x.shape[:-1], -1)
        return self.computed(self.fc(x).relu() * 2)


def with_a_mask_by_vmap(x):
    places = torch.vmap(torch.vmap(lambda i, j: (i >= j) & (i - j < 3), (None, 0)), (0, None))
    return x.masked_fill(~places(torch.arange(4), torch.arange(8)), -1.0).cumsum(0)


def under_autocast(enabled):
    def computed(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return (x @ x.t()).float().softmax(-1)

    return computed


def asking(x):
    torch._check(x.sum().item() < 1e9)
    return x.cumsum(0)


def opaque(x):
    """Something that Dynamo keeps as a node, once it is told to, as einx does for its functions."""
    return x.sin().cumsum(0) if x.shape[0] == 4 else x


CAPTURED = {
    "a function allowed in graphs": lambda x: opaque(x * 2),
    "a mask by vmap": with_a_mask_by_vmap,
    "values by vmap": lambda x: torch.vmap(lambda row: row.cumsum(0) * 2)(x),
    "a question about values": asking,
    "a question about numbers": lambda x: (torch._check(torch.ones(3).all().item()), x.cumsum(0))[1],
    "autocast": under_autocast(True),
    "without autocast": under_autocast(False),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_graphs_of_dynamo(name):
    torch.compiler.allow_in_graph(opaque)
    model = Captured(CAPTURED[name])
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for seed in range(7):
            torch.manual_seed(seed)
            assert_as_eager(model, fast, torch.randn(4, 8))
    skip_if_python(fast)
    skip_if_dynamo_refuses(model, torch.randn(4, 8))
    (graph,) = state_of(fast).recapture.graphs
    assert programs(graph), state_of(graph).programs.reason


def test_what_cannot_be_noted_runs_as_it_comes(monkeypatch, caplog):
    def mistaken(*_):
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(record, "loops_of", mistaken)
    model = Net(lambda m, x: (m.fc(x * 2 + 1).relu() * 2).cumsum(1), fc=linear())
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for _ in range(4):
            assert_as_eager(model, fast, X)
    assert "a mistake" in state_of(fast).programs.reason and "could not be noted" in caplog.text


def test_a_graph_whose_code_puts_results_together_has_no_program():
    """torch.export's: the graph returns a flat tuple, its code what the model returned."""
    model = Net(lambda m, x: (m.fc(x) * 2).relu(), fc=linear())
    graph = copy.deepcopy(fxfuse.optimize(model).graph)
    assert program.Programs(model, graph).reason is None
    spec = pytree.tree_flatten(((0,), {}))[1]
    graph.set_codegen(fx.graph._PyTreeCodeGen(fx.graph._PyTreeInfo(["x"], spec, pytree.tree_flatten(0)[1])))
    assert "puts results together" in program.Programs(model, graph).reason


TRANSPOSED = {
    "returned": lambda m, x: (lambda y: (y + 0).add_(y, alpha=2))(x.t()),
    "read": lambda m, x: (lambda y: (y + 0).add_(y, alpha=2).cumsum(0))(x.t()),
    "nobody reads it": lambda m, x: (lambda y: ((y + 0).add_(y, alpha=2), y)[1])(x.t()),
}


@pytest.mark.parametrize("name", TRANSPOSED)
@pytest.mark.parametrize("rows", [0, 3])
def test_memory_that_torch_fills(name, rows):
    """What torch computes for a region is copied to where its strides are eager's."""
    model = Net(TRANSPOSED[name])
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for _ in range(4):
            assert_as_eager(model, fast, torch.randn(rows, 8))


GUARDED = {
    "another dtype": lambda t: t.data.double(),
    "other sizes": lambda t: t.data[:4],
    "other strides": lambda t: t.data.t(),
    "negated": lambda t: torch._neg_view(t.data),
}


@pytest.mark.parametrize("name", GUARDED)
def test_the_guard_sees_what_data_is_set_to(name):
    tensors = [torch.randn(8, 8), nn.Parameter(torch.randn(8, 8)), torch.randn(3)]
    guard = Guard(tensors)
    addresses = guard.addresses[:]
    assert guard.holds(tensors, addresses)
    assert list(addresses[:3]) == [tensor.data_ptr() for tensor in tensors]
    before = tensors[1].data
    tensors[1].data = GUARDED[name](tensors[1])
    assert not guard.holds(tensors, addresses)
    tensors[1].data = before.clone()
    assert guard.holds(tensors, addresses) and addresses[1] == tensors[1].data_ptr() != before.data_ptr()


class Labelled(torch.Tensor):
    pass


def test_the_guard_sees_alignment_if_asked():
    guards = [Guard([at(0, 8), at(1, 8), at(2, 8)], alignment=most) for most in (1, 8, 16)]
    for places, expected in (
        ((0, 1, 2), [True, True, True]),
        ((0, 3, 2), [True, True, True]),
        ((0, 1, 0), [True, True, False]),
        ((2, 1, 2), [True, True, False]),
        ((0, 2, 2), [True, False, False]),
        ((1, 1, 2), [True, False, False]),
    ):
        tensors = [at(place, 8) for place in places]
        assert [guard.holds(tensors, guard.addresses[:]) for guard in guards] == expected, places


def test_the_guard_sees_modes_and_other_objects():
    tensors = [torch.randn(8, 8), nn.Parameter(torch.randn(8, 8))]
    guard = Guard(tensors)
    addresses = guard.addresses[:]
    with torch.inference_mode():
        assert not guard.holds(tensors, addresses)
    with torch.autocast("cpu"):
        assert not guard.holds(tensors, addresses)
    tensors[1].requires_grad_(False)
    assert not guard.holds(tensors, addresses)
    tensors[1].requires_grad_()
    for other in (
        None,
        3,
        "x",
        tensors[0].to_sparse(),
        torch.randn(8, 8).as_subclass(Labelled),
        torch.randn(8, 8, device="meta"),
    ):
        assert not guard.holds([tensors[0], other], addresses)
        assert not guard.holds([other, tensors[1]], addresses) or type(other) is torch.Tensor
    assert not guard.holds(tensors[:1], addresses)
    assert guard.holds([torch.randn(8, 8), nn.Parameter(torch.randn(8, 8))], addresses)


def leaf_modules():
    return nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.LogSoftmax(-1))


LEAF_CHANGES = {
    "an attribute": lambda m: setattr(m[1], "dim", 0),
    "a hook": lambda m: m[1].register_forward_hook(lambda module, args, result: result + 1),
    "another forward": lambda m: setattr(m[1], "forward", lambda x: x * 2),
    "a bias": lambda m: setattr(m[3], "bias", nn.Parameter(torch.ones(8))),
    "no bias": lambda m: setattr(m[0], "bias", None),
    "another class": lambda m: setattr(m[1], "__class__", nn.LogSoftmax),
    "weights": lambda m: setattr(m[3], "weight", nn.Parameter(torch.ones(8, 8))),
}


@pytest.mark.parametrize("name", LEAF_CHANGES)
def test_modules_that_are_taken_apart_may_change(name):
    model = Net(lambda m, x: m.all((x.relu() * 2).neg()), all=leaf_modules())
    fast = recorded(copy.deepcopy(model), torch.randn(4, 8))
    for each in (model.all, fast.get_submodule("all")):
        LEAF_CHANGES[name](each)
    with torch.no_grad():
        for _ in range(4):
            assert_as_eager(model, fast, torch.randn(4, 8))


def recorded(model, x):
    """The optimised model with a program for such calls."""
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
    assert len(programs(fast)) == 1, state_of(fast).programs.reason
    return fast


def chained():
    return Net(
        lambda m, x: F.softmax((m.fc((x * 2).tanh() + 1) * 3).exp().add(1), -1).mul(2).add(m.p), fc=linear(), p=randn(8)
    )


def in_another_shape(model, fast, x):
    return x[:3]


def with_other_strides(model, fast, x):
    return x.t().contiguous().t()


def with_other_weights(model, fast, x):
    for net in (model, fast):
        net.load_state_dict({name: tensor * 2 for name, tensor in net.state_dict().items()})


def with_another_parameter(model, fast, x):
    new = randn(8)
    model.p, fast.p = nn.Parameter(new), nn.Parameter(new)


def with_data_moved(model, fast, x):
    for net in (model, fast):
        net.fc.weight.data = net.fc.weight.data.clone() + 1


def in_float64(model, fast, x):
    model.double(), fast.double()
    return x.double()


def unaligned(model, fast, x):
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def with_a_hook(model, fast, x):
    for net in (model, fast):
        net.fc.register_forward_hook(lambda module, args, result: result + 1)


CHANGES = (
    in_another_shape, with_other_strides, with_other_weights, with_another_parameter, with_data_moved, in_float64,
    unaligned, with_a_hook,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_calls(change):
    model, x = chained(), randn(4, 8)
    fast = recorded(copy.deepcopy(model), x)
    with torch.no_grad():
        changed = change(model, fast, x)
        for _ in range(4):
            assert_as_eager(model, fast, x if changed is None else changed, exact=False)


def test_calls_that_want_gradients_get_them():
    model, x = chained(), randn(4, 8)
    fast = recorded(copy.deepcopy(model), x)
    for net in (model, fast):
        net(x).sum().backward()
    for mine, theirs in zip(fast.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("inference", [False, True])
def test_results_are_the_callers_own(inference):
    model, x = chained(), randn(4, 8)
    fast = recorded(model, x)
    with torch.inference_mode(inference), torch.no_grad():
        first = fast(x)
        kept = first.clone()
        fast(x * 2)
    assert torch.equal(first, kept)
    assert first.is_inference() is inference


VIEWS = {
    "of a kernel's result": lambda m, x: ((m.fc(x).relu() * 2).mean(-1), (x.exp() + 1).view(2, -1).t()),
    "of torch's result": lambda m, x: (m.fc(x).view(2, 16), (m.fc(x).relu() * 2).mean(-1)),
    "of a part": lambda m, x: (m.fc(x)[1:3].view(-1), (m.fc(x).relu() * 2).mean(-1)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_that_is_alone_in_its_memory_takes_no_call(name):
    model, x = Net(VIEWS[name], fc=linear()), randn(4, 8)
    fast = recorded(copy.deepcopy(model), x)
    [program] = programs(fast)
    assert not set(program.calls) & {"view", "t", "reshape", "getitem"}, program.code
    with torch.no_grad():
        for _ in range(2):
            assert_as_eager(model, fast, randn(4, 8))


def test_a_view_that_several_calls_read_is_made_once():
    model = Net(
        lambda m, x: m.fc(x.exp() + 1) + m.gate(x.exp() + 1).sin(), fc=linear(bias=False), gate=linear(bias=False)
    )
    fast = recorded(copy.deepcopy(model), randn(2, 3, 8))
    [program] = programs(fast)
    views = [line.split(" = ")[1] for line in program.code.splitlines() if "= reinterpret(" in line]
    read = [view for view in views if "(6, 8), (8, 1)" in view]
    assert read and len(set(views)) == len(views), program.code
    with torch.no_grad():
        assert_as_eager(model, fast, randn(2, 3, 8))


def test_views_of_one_result_stay_views():
    model = Net(lambda m, x: (lambda y: (y.view(-1), y.t()))(m.fc(x).relu() * 2), fc=linear())
    fast, x = recorded(copy.deepcopy(model), randn(4, 8)), randn(4, 8)
    with torch.no_grad():
        flat, turned = fast(x)
        assert_as_eager(model, fast, x)
        flat.zero_()
    assert flat._is_view() and turned._is_view() and not turned.any()


def test_random_numbers_are_drawn_anew():
    model = Net(lambda m, x: F.dropout((x * 2 + 1).exp(), 0.5, True) * 3 + 1)
    fast, x = recorded(model, randn(4, 8)), randn(4, 8)
    with torch.no_grad():
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            mine = fast(x)
            torch.manual_seed(seed)
            torch.testing.assert_close(mine, model(x))


@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
def test_statistics_are_updated_though_nobody_reads_what_was_normalised(norm):
    model = Net(lambda m, x: (norm(x, m.mean, m.var, None, None, True), (x * 2 + 1).exp())[1])
    model.register_buffer("mean", torch.zeros(3))
    model.register_buffer("var", torch.ones(3))
    fast, x = recorded(copy.deepcopy(model), randn(4, 3, 5)), randn(4, 3, 5)
    model.load_state_dict(fast.state_dict())
    with torch.no_grad():
        assert_as_eager(model, fast, x)
    torch.testing.assert_close(fast.state_dict(), model.state_dict())


def test_a_kernel_that_cannot_be_launched_any_more():
    model, x = chained(), randn(4, 8)
    fast = recorded(copy.deepcopy(model), x)

    def fail(*_):
        raise fxfuse.LaunchError("no more")

    programs(fast)[0].run = fail
    with torch.no_grad():
        assert_as_eager(model, fast, x)
    assert not programs(fast)


def test_numbers_among_the_arguments():
    """Each number is another kind of call, and so is another order of the same."""

    def forward(m, x, y):
        return torch.roll((m.fc(m.p) * 2).tanh(), x if isinstance(x, int) else y, 0) + (x - y)

    model = Net2(forward, fc=linear(), p=randn(4, 8))
    fast, x = fxfuse.optimize(model), randn(4, 8)
    with torch.no_grad():
        for first, second in ((x, 1), (x, 2), (1, x), (x, 1)):
            for _ in range(4):
                assert_as_eager(model, fast, first, second, exact=False)


def test_calls_that_never_come_again_are_not_looked_at_for_ever():
    model = Net(lambda m, x: (m.fc(x) * 2 + 1).exp() * 2, fc=linear())
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for rows in range(1, 3 * PATIENCE):
            fast(randn(rows, 8))
        assert not programs(fast)
        for _ in range(3 * PATIENCE):
            assert_as_eager(model, fast, randn(4, 8))
    assert len(programs(fast)) == 1


def test_kinds_that_alternate():
    model = Net(lambda m, x: (m.fc(x) * 2 + 1).exp() * 2, fc=linear())
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for _ in range(4):
            for rows in (1, 4, 3):
                assert_as_eager(model, fast, randn(rows, 8))
    assert len(programs(fast)) == 3


def test_kinds_that_alternate_with_more_than_are_kept():
    """Those that have a program keep it: nothing is recorded to be dropped."""
    model = Net(lambda m, x: (m.fc(x) * 2 + 1).exp() * 2, fc=linear())
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for rows in (*range(1, MOST_KEPT + 1), *range(1, MOST_KEPT + 1)):
            fast(randn(rows, 8))
        kept = programs(fast)
        assert len(kept) == MOST_KEPT
        for _ in range(4):
            for rows in range(1, MOST_KEPT + 4):
                assert_as_eager(model, fast, randn(rows, 8))
        assert programs(fast) == kept
        for _ in range(PATIENCE + 2):
            fast(randn(MOST_KEPT + 5, 8))
        assert len(programs(fast)) == MOST_KEPT and programs(fast) != kept


REFUSED = {
    "a result's size depends on values": lambda m, x: (x * 2 + 1).exp()[x > 0].mul(2).add(1),
    "a number of a tensor": lambda m, x: (x * 2 + 1).exp() * x.sum().item(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_values_is_not_recorded(name):
    model = Net(REFUSED[name], fc=linear())
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for _ in range(4):
            assert_as_eager(model, fast, randn(4, 8), exact=False)
    assert not programs(fast)
    assert "depend" in state_of(fast).programs.reason


def test_tied_parameters():
    model = Net(lambda m, x: m.a((m.b(x) * 2).tanh() + 1) * 3 + 1, a=linear(), b=linear())
    model.a.weight = model.b.weight
    fast, x = recorded(copy.deepcopy(model), randn(4, 8)), randn(4, 8)
    with torch.no_grad():
        for net in (model, fast):
            net.b.weight = nn.Parameter(torch.ones(8, 8))
        for _ in range(3):
            assert_as_eager(model, fast, x)


def test_products_of_torch_lie_where_kernels_results_do():
    """Memory of the first is that of the third, and the caller's result is none of it."""
    model = Net(lambda m, x: ((m.fc(m.fc(m.fc(x).relu() * 2).relu() * 2) + 1).exp() @ x.t()) @ x, fc=linear())
    model.fc = nn.Linear(8, 8)
    made = program_of(model, randn(64, 8))
    assert made.code.count("out=") == 4 and made.arena_size <= 2 * 64 * 64 * 4, made.code


def test_a_kernel_writes_where_torchs_result_lies():
    """The last kernel that reads it overwrites it. Not so if torch reads it later, too, or the caller gets it."""
    made = program_of(Net(lambda m, x: (x.cumsum(0) * 2).tanh().cumsum(1)), randn(64, 64))
    assert made.arena_size == 64 * 64 * 4 and "empty" not in made.code, made.code
    for body in (
        lambda m, x: (lambda y: (y * 2).tanh().cumsum(1) @ y)(x.cumsum(0)),
        lambda m, x: (lambda y: ((y * 2).tanh().cumsum(1), y))(x.cumsum(0)),
    ):
        made = program_of(Net(body), randn(64, 64))
        assert "empty" in made.code, made.code


def test_what_an_operator_of_others_returns_is_not_overwritten():
    """An operator that returns what it has returned before. None should, but nothing prevents it."""
    library, x = torch.library.Library("fxfuse_test_kept", "DEF"), randn(64, 64)
    before = x.cumsum(0)
    try:
        library.define("kept(Tensor x) -> Tensor")
        library.impl("kept", lambda x: before, "CPU")
        made = program_of(Net(lambda m, x: (torch.ops.fxfuse_test_kept.kept(x) * 2).tanh().cumsum(1)), x)
        assert "kept" in made.code and torch.equal(before, x.cumsum(0))
    finally:
        library._destroy()


def test_values_that_die_leave_their_memory():
    def body(m, x):
        for _ in range(6):
            x = F.softmax(x * 2 + 1, -1).exp() - 1
        return x

    fast = recorded(Net(body), randn(64, 64))
    assert 0 < programs(fast)[0].arena_size <= 2 * 64 * 64 * 4


@torch.no_grad()
def test_what_torch_runs_alone_is_no_program_on_a_cpu():
    x = torch.randn(4, 32)
    alone = fxfuse.optimize(nn.Softmax(-1))
    written_out = fxfuse.optimize(Net(lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)))
    for _ in range(4):
        assert torch.equal(alone(x), x.softmax(-1))
        written_out(x)
    assert state_of(alone).programs.reason == "torch runs all of it"
    (program,) = state_of(written_out).programs.programs
    assert program.launches == 1
    assert not program.calls


# ------------------------------------------------------------------------------------------ one launch


def product(function, reads, writes, together=4):
    """A launch of a kernel that may have several problems."""
    event = events.Launch(function, (1).to_bytes(8, "little") + b"own     ", (), together)
    return Launch(event, [(slot, 0) for slot in (*reads, *writes)], frozenset(writes))


def binding(number):
    return types.MethodType(lambda *_: None, types.SimpleNamespace(functions=(number, 0)))


class TestOneLaunch:
    kernel, other = binding(1), binding(2)

    def slots(self, names):
        return [Slot("memory", name) for name in names]

    def test_products_that_need_none_of_each_other(self):
        x, w, q, k, v = self.slots("xwqkv")
        view = Call("view", (), {}, None, True, True)
        steps = [product(self.kernel, (x, w), (one,)) for one in (q, k, v)]
        (first, seen) = in_one_launch([steps[0], view, *steps[1:]])
        assert seen is view
        assert first.event.params[:16] == (3).to_bytes(8, "little") + b"own     "
        assert first.event.params.count(b"own     ") == 3 and len(first.event.params) == 3 * 16
        assert [slot for slot, _ in first.references] == [x, w, q, x, w, k, x, w, v]
        assert first.writes == {q, k, v}

    def test_memory_that_another_of_them_reads_is_not_overwritten(self):
        x, y, q, k, v = self.slots("xyqkv")
        steps = [product(self.kernel, (x,), (q,)), product(self.kernel, (x, y), (k,)), product(self.kernel, (), (v,))]
        steps[0].in_place, steps[1].in_place = [(x, q)], [(x, k), (y, k)]
        (found,) = in_one_launch(steps)
        assert found.in_place == [(y, k)]

    def test_no_more_than_a_launch_has(self):
        x, *results = self.slots("xabcdef")
        found = in_one_launch([product(self.kernel, (x,), (one,)) for one in results])
        assert [int.from_bytes(step.event.params[:8], "little") for step in found] == [4, 2]

    def test_what_needs_the_one_before_comes_after_it(self):
        x, y, z = self.slots("xyz")
        steps = [product(self.kernel, (x,), (y,)), product(self.kernel, (y,), (z,))]
        assert len(in_one_launch(steps)) == 2
        steps = [product(self.kernel, (x, y), (z,)), product(self.kernel, (x,), (y,))]
        assert len(in_one_launch(steps)) == 2, "the second overwrites what the first reads"

    def test_nothing_changes_places_with_a_call(self):
        x, y, z = self.slots("xyz")
        call = Call(torch.relu, (), {}, None, False, True)
        steps = [product(self.kernel, (x,), (y,)), call, product(self.kernel, (x,), (z,))]
        assert in_one_launch(steps) == steps

    def test_other_kernels(self):
        x, y, z = self.slots("xyz")
        for other, together in ((self.other, 4), (self.kernel, 1)):
            steps = [product(self.kernel, (x,), (y,)), product(other, (x,), (z,), together)]
            assert len(in_one_launch(steps)) == 2


# ------------------------------------------------------------------------------------------------------ watched


@contextlib.contextmanager
def noted(seen, step):
    seen.append(step)
    yield


@pytest.mark.parametrize("name", MODELS)
def test_a_watched_program_computes_the_same_step_by_step(name):
    model = Net(MODELS[name], fc=linear()).eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for _ in range(4):
            expected = fast(X.clone())
        (program,) = programs(fast)
        seen, before = [], program.run
        with program.watched(functools.partial(noted, seen)):
            result = fast(X.clone())
    assert all(map(torch.equal, pytree.tree_leaves(expected), pytree.tree_leaves(result)))
    assert tuple(seen) == program.steps and program.run is before
    assert sum(step.is_launch for step in seen) == program.launches
    computing = sum(count for name, count in program.calls.items() if name not in ("t", "transpose", "view"))
    assert sum(not step.is_launch for step in seen) == computing
    nodes = {node.name for node in fast.graph.nodes}
    assert all(nodes.issuperset(step.nodes) for step in seen), "each step names nodes of the graph"


def test_a_launch_names_all_nodes_that_were_merged_into_it():
    def rotary(m, x):
        return torch.cat((-x[:, 4:], x[:, :4]), -1) * 2 + m.fc(x).relu()

    fast = fxfuse.optimize(Net(rotary, fc=linear()).eval())
    with torch.no_grad():
        for _ in range(4):
            fast(X)
    (program,) = programs(fast)
    launches = [step for step in program.steps if step.is_launch]
    assert any({"neg", "cat"} <= set(step.nodes) for step in launches), launches


def test_a_program_knows_what_its_nodes_are_like():
    fast = fxfuse.optimize(Net(lambda m, x: m.fc(x).relu().t() * x.shape[0], fc=linear()).eval())
    with torch.no_grad():
        for _ in range(4):
            fast(X)
    (program,) = programs(fast)
    like = program.values["t"]
    assert (like.shape, like.strides, like.dtype, like.device.type) == ((8, 4), (1, 8), torch.float32, "cpu")
    assert program.values["x"].shape == (4, 8) and program.values["fc_weight"].is_parameter
