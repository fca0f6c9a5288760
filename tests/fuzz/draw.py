"""Random models, drawn by seed, as the source text of a Python module.

Every statement is run once in eager while it is drawn, which tells its result's shape; one that raises is not taken.
"""

from __future__ import annotations

import random
import re
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

# feature, statements of __init__, expression. {x}: a value, {y}: another of its shape, {n}: its last size, {c}: its
# second size, {k}: a number of its own, {d}: where tensors are made. `rank`: of x, 0 for any.
Row = tuple[str, int, str, str]
LAYERS: list[Row] = [
    ("linear", 0, "self.l{k} = nn.Linear({n}, {m})", "self.l{k}({x})"),
    ("linear no bias", 0, "self.l{k} = nn.Linear({n}, {m}, bias=False)", "self.l{k}({x})"),
    ("F.linear", 0, "self.w{k} = nn.Parameter(torch.randn({m}, {n}) * .3)", "F.linear({x}, self.w{k})"),
    ("matmul", 0, "self.w{k} = nn.Parameter(torch.randn({n}, {m}) * .3)", "{x} @ self.w{k}"),
    (
        "addmm",
        2,
        "self.w{k} = nn.Parameter(torch.randn({n}, {m}) * .3); self.b{k} = nn.Parameter(torch.randn({m}))",
        "torch.addmm(self.b{k}, {x}, self.w{k})",
    ),
    ("bmm", 3, "", "torch.bmm({x}, {x}.transpose(1, 2))"),
    (
        "gated unit",
        0,
        "self.g{k} = nn.Linear({n}, {m}); self.u{k} = nn.Linear({n}, {m})",
        "F.silu(self.g{k}({x})) * self.u{k}({x})",
    ),
    ("shared module", 0, "self.s{k} = nn.Linear({n}, {n})", "F.relu(self.s{k}(F.gelu(self.s{k}({x}))))"),
    (
        "Sequential",
        0,
        "self.q{k} = nn.Sequential(nn.Linear({n}, {m}), nn.GELU(), nn.Dropout(.25), nn.Tanh())",
        "self.q{k}({x})",
    ),
    (
        "loop over ModuleList",
        0,
        "self.ml{k} = nn.ModuleList([nn.Linear({n}, {n}) for _ in range(2)])",
        "functools.reduce(lambda v, l: F.relu(l(v)) + v, self.ml{k}, {x})",
    ),
    ("cast after a linear", 0, "self.l{k} = nn.Linear({n}, {m})", "(self.l{k}({x}) * 2).to(torch.bfloat16)"),
    ("cast after a convolution", 4, "self.c{k} = nn.Conv2d({c}, 4, 1)", "F.relu(self.c{k}({x})).half() + 1"),
    ("Conv2d", 4, "self.c{k} = nn.Conv2d({c}, {m}, 3, padding=1)", "self.c{k}({x})"),
    ("Conv2d 1x1 padded", 4, "self.c{k} = nn.Conv2d({c}, 4, 1, padding=1)", "self.c{k}({x})"),
    ("Conv2d strided", 4, "self.c{k} = nn.Conv2d({c}, 4, 2, stride=2, bias=False)", "self.c{k}({x})"),
    ("Conv2d depthwise", 4, "self.c{k} = nn.Conv2d({c}, {c}, 3, padding='same', groups={c})", "self.c{k}({x})"),
    ("ConvTranspose2d", 4, "self.c{k} = nn.ConvTranspose2d({c}, 4, 2)", "self.c{k}({x})"),
    ("Conv1d", 3, "self.c{k} = nn.Conv1d({c}, 4, 3, padding=1)", "self.c{k}({x})"),
    ("Conv3d", 4, "self.c{k} = nn.Conv3d(1, 2, 1)", "self.c{k}({x}.unsqueeze(1)).mean(1)"),
    ("BatchNorm2d", 4, "self.n{k} = nn.BatchNorm2d({c})", "self.n{k}({x})"),
    ("BatchNorm1d", 2, "self.n{k} = nn.BatchNorm1d({c})", "self.n{k}({x})"),
    ("GroupNorm", 4, "self.n{k} = nn.GroupNorm(1, {c})", "self.n{k}({x})"),
    ("InstanceNorm2d", 4, "self.n{k} = nn.InstanceNorm2d({c}, affine=True)", "self.n{k}({x})"),
    ("LayerNorm", 0, "self.n{k} = nn.LayerNorm({n})", "self.n{k}({x})"),
    (
        "RMS by hand",
        0,
        "self.p{k} = nn.Parameter(torch.rand({n}) + .5)",
        "{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-5) * self.p{k}",
    ),
    ("PReLU", 0, "self.a{k} = nn.PReLU()", "self.a{k}({x})"),
    ("Dropout", 0, "self.d{k} = nn.Dropout(.25)", "self.d{k}({x})"),
    ("Dropout in place", 0, "self.d{k} = nn.Dropout(.5, inplace=True)", "self.d{k}({x} * 2)"),
    ("MaxPool2d", 4, "self.p{k} = nn.MaxPool2d(2)", "self.p{k}({x})"),
    ("avg_pool", 4, "", "F.avg_pool2d({x}, 2, 1)"),
    ("attention", 3, "self.a{k} = nn.MultiheadAttention({n}, 1, batch_first=True)", "self.a{k}({x}, {x}, {x})[0]"),
    (
        "attention, batch second",
        3,
        "self.a{k} = nn.MultiheadAttention({n}, 1)",
        "self.a{k}({x}, {x}, {x}, need_weights=False)[0]",
    ),
    (
        "attention to another",
        3,
        "self.a{k} = nn.MultiheadAttention({n}, 1, batch_first=True, bias=False)",
        "self.a{k}({x}, {y}, {y})[0]",
    ),
    (
        "masked attention",
        3,
        "self.a{k} = nn.MultiheadAttention({n}, 1, batch_first=True)",
        "self.a{k}({x}, {x}, {x}, attn_mask=torch.ones({x}.shape[1], {x}.shape[1]{d}).triu(1) > 0)[0]",
    ),
    (
        "padded attention",
        3,
        "self.a{k} = nn.MultiheadAttention({n}, 1, batch_first=True)",
        "self.a{k}({x}, {x}, {x}, torch.ones({x}.shape[:2]{d}).triu(1) > 0, False)[0]",
    ),
    ("encoder layer", 3, "self.a{k} = nn.TransformerEncoderLayer({n}, 1, 8, .25, norm_first=True)", "self.a{k}({x})"),
    (
        "padded encoder",
        3,
        "self.a{k} = nn.TransformerEncoder(nn.TransformerEncoderLayer({n}, 1, 8, 0., batch_first=True), 1)",
        "self.a{k}({x}, src_key_padding_mask=torch.ones({x}.shape[:2]{d}).triu(1) > 0)",
    ),
    (
        "decoder layer",
        3,
        "self.a{k} = nn.TransformerDecoderLayer({n}, 1, 8, 0., batch_first=True)",
        "self.a{k}({x}, {y})",
    ),
    ("sdpa", 3, "", "F.scaled_dot_product_attention({x}, {x}, {x})"),
    ("Embedding", 0, "self.e{k} = nn.Embedding(5, {n})", "{x} + self.e{k}(torch.arange({n}{d}) % 5).sum(0)"),
    ("parameter operand", 0, "self.p{k} = nn.Parameter(torch.randn({n}))", "{x} * self.p{k} + self.p{k}"),
    ("0-d parameter", 0, "self.p{k} = nn.Parameter(torch.tensor(.75))", "({x} * self.p{k}).tanh()"),
    ("buffer", 0, "self.register_buffer('b{k}', torch.randn({n}))", "F.relu({x} + self.b{k})"),
    ("buffer where", 0, "self.register_buffer('b{k}', torch.randn({n}))", "torch.where(self.b{k} > 0, {x} * 2, {x})"),
    ("integer operand", 0, "self.register_buffer('i{k}', torch.arange({n}))", "({x} + self.i{k}) * .5"),
    ("tensor attribute", 0, "self.t{k} = torch.randn({n}{d})", "({x} + self.t{k}).sigmoid()"),
]
ACTIVATIONS = [
    "nn.ReLU()",
    "nn.ReLU(inplace=True)",
    "nn.ReLU6()",
    "nn.ReLU6(inplace=True)",
    "nn.Hardswish(inplace=True)",
    "nn.GELU()",
    "nn.GELU('tanh')",
    "nn.SiLU()",
    "nn.SiLU(inplace=True)",
    "nn.Mish()",
    "nn.ELU()",
    "nn.SELU()",
    "nn.CELU(1.5)",
    "nn.LeakyReLU(.2)",
    "nn.Hardtanh(-.5,.5)",
    "nn.Hardswish()",
    "nn.Hardsigmoid()",
    "nn.Sigmoid()",
    "nn.Tanh()",
    "nn.Softplus()",
    "nn.Softsign()",
    "nn.LogSigmoid()",
    "nn.Tanhshrink()",
    "nn.Softshrink()",
    "nn.RReLU()",
    "nn.Identity()",
]
LAYERS += [(f"{name} after a copy", 0, f"self.a{{k}} = {name}", "self.a{k}({x} * .5)") for name in ACTIVATIONS]
POINTWISE: list[Row] = [
    (text.replace("{x}", "x").replace("{y}", "y"), 0, "", text)
    for text in (
        "F.relu({x})",
        "{x}.relu()",
        "torch.relu({x})",
        "torch.ops.aten.relu({x})",
        "{x} + {y}",
        "{x} * {y}",
        "torch.add({x}, {y}, alpha=.5)",
        "torch.add({x}, 2, alpha=.5)",
        "{x}.sub({y})",
        "{x} - 1",
        "1.5 - {x}",
        "{x} / 2.0",
        "{x} * .5 + .25",
        "-{x}",
        "{x}.clamp(-1, 1)",
        "torch.clamp({x}, min={y})",
        "torch.clamp({x}, {y}, {y} + 1)",
        "torch.sub({x}, {y}, alpha=2)",
        "torch.clamp({x}, min=0.1)",
        "torch.sigmoid({x}) * {x}",
        "{x}.tanh()",
        "F.gelu({x})",
        "torch.minimum({x}, {y})",
        "torch.maximum({x}, torch.zeros_like({x}))",
        "{x}.abs().sqrt()",
        "{x}.exp().log1p()",
        "torch.erf({x})",
        "{x}.sin() + {x}.cos()",
        "F.softplus({x}) - {y}",
        "torch.lerp({x}, {y}, .3)",
        "torch.addcmul({x}, {y}, {x}, value=.1)",
        "torch.where({x} > 0, {x}, {y})",
        "{x}.masked_fill({x} > 1, 0.5)",
        "{x}.type_as({y}) + 1",
        "{x}.pow(2) * .1",
        "{x}.square().add(1).rsqrt()",
        "F.hardtanh({x}) * {x}",
        "F.leaky_relu({x}, .1)",
        "F.mish({x})",
        "{x} * 2 + {y} * 3",
        "{x}.neg().exp()",
        "F.glu({x}.repeat_interleave(2, -1))",
        "{x}.to(torch.float64).to({x}.dtype)",
        "torch.ops.aten.mul.Tensor({x}, {y}).tanh()",
        "{x}.reciprocal().clamp(-3, 3)",
        "torch.nan_to_num({x} / ({y}.abs() + 1), 0., 1., -1.)",
        "torch.where(torch.isfinite({x}), {x}, {y})",
        "torch.rsub({x}, 1)",
        "{x}.float() * 2",
        "{x} + torch.tensor(.5)",
        "torch.sqrt({x})",
        "{x}.log() * 2",
        "{x}.bfloat16() * 2",
        "{x}.half() + 1",
        "{x}.to(torch.bfloat16).float() * 3",
        "{x} * ({x} > {y}).float()",
    )
]
VIEWS: list[Row] = [
    ("transpose", 0, "", "{x}.transpose(-1, -2)"),
    ("permute", 3, "", "{x}.permute(0, 2, 1)"),
    ("permute 4", 4, "", "{x}.permute(0, 2, 3, 1)"),
    ("flatten", 0, "", "{x}.flatten(1)"),
    ("reshape", 0, "", "{x}.reshape({x}.shape[0], -1)"),
    ("chunk", 0, "", "{x}.chunk(2, -1)[0]"),
    ("cat", 0, "", "torch.cat([{x}, {y}], -1)"),
    ("slice", 0, "", "{x}[..., 1:]"),
    ("step", 0, "", "{x}[..., ::2]"),
    ("roll", 0, "", "torch.roll({x}, 1, -1)"),
    ("flip", 0, "", "{x}.flip(-1)"),
    ("contiguous", 0, "", "{x}.contiguous()"),
    ("channels_last", 4, "", "{x}.to(memory_format=torch.channels_last)"),
    ("mean", 0, "", "{x}.mean(-1, keepdim=True)"),
    ("softmax", 0, "", "{x}.softmax(-1)"),
    ("unsqueeze", 2, "", "{x}.unsqueeze(1)"),
    ("expand", 0, "", "{x}[..., :1].expand_as({x})"),
    ("view_as", 0, "", "{x}.view_as({x})"),
    ("detach", 0, "", "{x}.detach() + {x}"),
    ("unbind", 3, "", "torch.stack({x}.unbind(1), 1)"),
]
MOVES: list[Row] = [
    ("pad", 0, "", "F.pad({x}, (1, 2))"),
    ("pad with a number", 4, "", "F.pad({x}, (1, 0, 2, 1), value=-1.5)"),
    ("crop", 0, "", "F.pad({x}, (-1, 1))"),
    ("index_select", 0, "", "{x}.index_select(-1, torch.tensor([{n} - 1, 0]{d}))"),
    ("index", 0, "", "{x}[:, torch.tensor([0, -1, 0]{d})]"),
    ("gather", 0, "", "{x}.gather(-1, {x}.detach().argsort(-1))"),
    ("take_along_dim", 0, "", "torch.take_along_dim({x}, {x}.detach().argmax(-1, keepdim=True), -1)"),
    ("tril", 0, "", "{x}.tril()"),
    ("triu", 3, "", "{x}.triu(1) + {x}"),
    ("pixel_shuffle", 4, "", "F.pixel_shuffle({x}.repeat_interleave(4, 1), 2)"),
    ("pixel_unshuffle", 4, "", "F.pixel_unshuffle({x}, 2)"),
    ("nearest", 4, "", "F.interpolate({x}, scale_factor=2)"),
    ("repeat_interleave", 0, "", "{x}.repeat_interleave(2, -1)"),
    ("stacked last", 0, "", "torch.stack([{x}, {x} * 2], -1).flatten(-2)"),
    ("volumes twice", 3, "", "F.interpolate({x}[None, None], scale_factor=2)[0, 0]"),
    ("bilinear", 4, "", "F.interpolate({x}.nan_to_num(), scale_factor=2, mode='bilinear')"),
    ("heads", 3, "", "{x}.reshape({x}.shape[0], {x}.shape[1], 2, -1).transpose(1, 2)"),
    ("heads put together", 4, "", "{x}.transpose(1, 2).flatten(2)"),
    ("windows", 4, "", "{x}.unflatten(-1, (2, -1)).transpose(2, 3).flatten(0, 1).contiguous()"),
    ("tokens", 4, "", "{x}.flatten(2).transpose(1, 2)"),
    ("tokens of patches", 4, "self.c{k} = nn.Conv2d({c}, 4, 2, 2)", "self.c{k}({x}).flatten(2).permute(0, 2, 1)"),
    ("image of tokens", 3, "", "{x}.transpose(1, 2).unflatten(2, (2, -1))"),
    ("contiguous image", 3, "", "{x}.unflatten(1, (2, -1)).permute(0, 3, 1, 2).contiguous()"),
    ("residual block", 3, "self.n{k} = nn.LayerNorm({n}); self.l{k} = nn.Linear({n}, {n})",
     "{x} + self.l{k}(self.n{k}({x})).relu()"),
    ("depthwise", 4, "self.c{k} = nn.Conv2d({c}, {c}, 3, padding=1, groups={c})", "self.c{k}({x})"),
    ("shifted", 4, "", "torch.roll({x}, (1, -1), (2, 3))"),
    ("halves turned", 0, "", "torch.cat([-{x}[..., {n} // 2 :], {x}[..., : {n} // 2]], -1)"),
    ("stack", 0, "", "torch.stack([{x}, {y}], 1)"),
    ("cat of some", 0, "", "torch.cat([{x}[:, :1], {y}, {x}[:, -1:]], 1)"),
    ("repeat", 3, "", "{x}.repeat(1, 2, 1)"),
    ("new_zeros", 0, "", "torch.cat([{x}, {x}.new_zeros({x}.shape)], 1)"),
    ("split", 0, "", "{x}.chunk(2, 1)[0] * {x}.chunk(2, 1)[-1].sigmoid()"),
    ("swapped", 0, "", "{x}.swapaxes(0, 1) + 1"),
    ("mask", 0, "", "{x}.masked_fill(torch.ones({n}, {n}{d}).tril()[0] == 0, -1e4)"),
    ("positions", 0, "", "{x} * torch.arange({n}{d}).float().mul(.1).cos()"),
    ("cumsum", 0, "", "{x}.cumsum(-1)"),
    ("sort", 0, "", "{x}.sort(-1)[0]"),
    ("sum", 0, "", "{x} / ({x}.abs().sum(1, keepdim=True) + 1)"),
    ("amax", 0, "", "{x} - {x}.amax(-1, keepdim=True)"),
    ("var", 0, "", "{x} * ({x}.var(-1, keepdim=True, correction=0) + 1e-3)"),
    ("normalize", 0, "", "F.normalize({x}, dim=-1)"),
    ("mean of two", 3, "", "{x} + {x}.mean((1, 2), keepdim=True)"),
    ("mean of pixels", 4, "", "{x} * {x}.mean((2, 3), keepdim=True).sigmoid()"),
    ("mean of rows", 0, "", "{x}.mean(1)"),
    ("softmax of columns", 0, "", "{x}.softmax(1)"),
    ("masked sdpa", 3, "", "F.scaled_dot_product_attention({x}, {x}, {x}, {x}[..., :1] > -1)"),
    ("log_softmax", 0, "", "F.log_softmax({x}, -1)"),
    ("scores", 3, "", "(({x} @ {x}.transpose(1, 2)) * .5).softmax(-1) @ {x}"),
    ("max_pool", 4, "", "F.max_pool2d({x}, 3, 2, 1)"),
    ("pool", 4, "", "F.adaptive_avg_pool2d({x}, 1)"),
    ("standardised weight", 4, "self.w{k} = nn.Parameter(torch.randn({c}, {c}, 1, 1))",
     "F.conv2d({x}, (self.w{k} - self.w{k}.mean((1, 2, 3), True)) * .5)"),
]  # fmt: skip
"""Of programs: what moves elements, and reductions."""
_INDICES = "self.register_buffer('i{k}', torch.arange({n}))"
_SQUARE = "self.w{k} = nn.Parameter(torch.randn({n}, {n}) * .1)"
_REGULAR = "self.w{k} @ self.w{k}.mT + torch.eye({n}{d}).type_as(self.w{k})"
NUMBERS: list[Row] = [
    ("integers divided", 0, _INDICES, "{x} + (self.i{k} * 2 + 1) / (self.i{k} - 2)"),
    ("small integers divided", 0, _INDICES, "{x} - self.i{k}.short() / (self.i{k}.int() + 1)"),
    ("integers and a number", 0, _INDICES, "{x} * (self.i{k} - 2).abs() / 7 + (1 - self.i{k}).clamp(-1, 2) / 3"),
    ("integers chosen", 0, _INDICES, "torch.where(self.i{k} > 1, self.i{k}, -self.i{k}) / 4 + {x}"),
    ("integers rounded", 0, _INDICES, "{x} + torch.div(self.i{k}, 2, rounding_mode='floor') % 3 + self.i{k} // 2"),
    ("integers' functions", 0, _INDICES, "{x} * self.i{k}.sqrt() + (self.i{k} - 1).sigmoid() + F.softsign(self.i{k})"),
    ("truths divided", 0, _INDICES, "{x} * ((self.i{k} > 0) / (self.i{k} < 3).float())"),
    ("truths and integers", 0, _INDICES, "{x} + (self.i{k} < 2) / (self.i{k} + 1) - (self.i{k} > 1) * self.i{k}"),
    ("truths counted", 0, "", "{x} + ({x} > 0).sum(-1, keepdim=True) / ({y} > -1).sum(-1, keepdim=True)"),
    ("one element", 0, "", "{x} * {x}.flatten()[0].sigmoid() + {y}.flatten()[-1:].relu()"),
    ("index of one element", 0, "", "{x} + {x}.flatten()[0].index_select(0, torch.zeros(1{d}).long()) * 2"),
    ("gathered from one", 0, "", "{x} + {x}.flatten()[0].gather(0, torch.zeros(1{d}).long()).flip(0).sum(0)"),
    ("PReLU of a row", 0, "self.p{k} = nn.PReLU()", "{x} + self.p{k}({x}.flatten()[:1] * 2)"),
    ("sgn", 0, "", "torch.sgn({x}) * {y} + {x}"),
    ("inverse", 0, _SQUARE, "{x} @ torch.linalg.inv(" + _REGULAR + ")"),
    ("solve", 0, _SQUARE, "torch.linalg.solve(" + _REGULAR + ", {x}.reshape(-1, {n}).mT).mT.reshape({x}.shape)"),
    ("Cholesky", 0, _SQUARE, "{x} @ torch.linalg.cholesky(" + _REGULAR + ").mT"),
]
"""Integers and truth values, tensors without dimensions, and operators of torch's that check what they give."""
WRITES: list[Row] = [
    ("part written", 0, "", "{v} = torch.zeros_like({x})\n{v}[..., 1:] = {x}[..., :-1]"),
    ("column written", 0, "", "{v} = {x} * 2\n{v}[:, 0] = {y}[:, 0] + 1"),
    ("first written", 0, "", "{v} = torch.ones({n}{d})\n{v}[0] = {x}.sum()\n{v} = {x} * {v}"),
    ("index written", 0, "", "{v} = {x} * 2\n{v}[:, torch.tensor([0]{d})] = {y}[:, :1]"),
    ("written after it was read", 0, "", "{v} = {x} * 2\nw = {v}.tanh() + {y}\n{v}.mul_(.5)\n{v} = {v} + w"),
    ("copy_", 0, "", "{v} = torch.empty_like({x})\n{v}.copy_({y} * 2)\n{v} = {v} + {x}"),
    ("masked_fill_", 0, "", "{v} = {x} + 0\n{v}.masked_fill_({y} > 0, .25)"),
    (
        "cache",
        0,
        "self.register_buffer('r{k}', torch.zeros(4, {n}))",
        "w = {x}.detach().reshape(-1, {n})[:1].expand(2, -1).to(self.r{k}.dtype)\n"
        "self.r{k}.index_copy_(0, torch.tensor([2, 0]{d}), w)\n"
        "{v} = {x} + self.r{k}.sum(0)",
    ),
    (
        "cache by index",
        0,
        "self.register_buffer('r{k}', torch.zeros(4, {n}))",
        "self.r{k}[torch.tensor([-1, 1]{d})] = {x}.detach().exp().reshape(-1, {n}).mean(0).to(self.r{k}.dtype)\n"
        "{v} = {x} * self.r{k}[1:].mean(0)",
    ),
    (
        "part of a buffer",
        0,
        "self.register_buffer('r{k}', torch.zeros(3, {n}))",
        "self.r{k}[1] = {x}.detach().reshape(-1, {n})[0] * 2\nself.r{k}[:, 0] = 0\n{v} = {x} - self.r{k}.sum(0)",
    ),
]
"""Of programs: memory that is overwritten in part."""
STATEFUL: list[Row] = [
    ("randn", 0, "", "{x} + torch.randn_like({x})"),
    ("rand", 0, "", "{x} * torch.rand({n}{d})"),
    ("bernoulli", 0, "", "{x} * torch.bernoulli(torch.full_like({x}, .5)).relu()"),
    ("random module", 0, "", "{x} * random.choice([1., 2.])"),
    ("fresh", 0, "", "{x} + torch.ones({n}{d}) * 2"),
    ("shape branch", 0, "", "{x}.relu() if {x}.shape[0] > 3 else {x}.tanh() * 2"),
    ("flag branch", 0, "self.flag = True", "{x}.relu() * 2 if self.flag else {x}"),
    ("training branch", 0, "", "{x} * 2 if self.training else {x}.tanh() + 1"),
    ("gradients branch", 0, "", "{x} * 2 if torch.is_grad_enabled() else {x} - 1"),
    ("value branch", 0, "", "{x} * 2 if float({x}.detach().sum()) > 0 else {x}.tanh()"),
    ("function of its own", 0, "", "Scaled.apply({x}, {y})"),
    ("dropping nothing", 0, "", "F.dropout({x}, 0.0, True)"),
    ("turned image", 4, "", "{x}.transpose(2, 3).reshape({x}.shape)"),
    ("pixels", 4, "self.c{k} = nn.Conv2d({c}, 8, 1)", "self.c{k}({x})"),
    ("complex", 0, "", "torch.view_as_real(torch.complex({x}.float(), {x}.float()) * 2).sum(-1).to({x}.dtype)"),
]
STATEMENTS: list[Row] = [
    ("in place", 0, "", "{v} = {x} * 1\n{v} += 1"),
    ("relu_", 0, "", "{v} = F.relu_({x} + 1) * 2"),
    ("in place on a view", 0, "", "{v} = {x} * 1\n{v}[..., 0] = 0\n{v} = {v} + 1"),
    ("part changed", 0, "", "{v} = {x}.flip(-1)\n{v}[..., 1:] += {y}[..., 1:] * 2"),
    ("parts changed", 0, "", "{v} = {x} * 1\n{v}[0] *= 1.5\n{v}.transpose(0, -1)[..., :1].clamp_(-1, 1)"),
    ("in place on a value", 0, "", "{x}.mul_(2)\n{v} = {x} + 1"),
    ("add_ alpha", 0, "", "{v} = ({x} + 0).add_({y}, alpha=2)"),
    ("buffer +=", 0, "self.register_buffer('r{k}', torch.zeros({n}))", "self.r{k} += 1\n{v} = {x} + self.r{k}"),
    (
        "buffer =",
        0,
        "self.register_buffer('r{k}', torch.ones({n}))",
        "self.r{k} = self.r{k} * .5\n{v} = {x} * self.r{k}",
    ),
    ("counter", 0, "self.n{k} = 0", "self.n{k} += 1\n{v} = {x} * self.n{k}"),
    ("attribute +=", 0, "self.t{k} = torch.zeros({n}{d})", "self.t{k} += .125\n{v} = {x} + self.t{k}"),
    ("fresh written", 0, "", "{v} = torch.ones({n}{d})\n{v}[0] = {x}.detach().sum()\n{v} = {x} * {v}"),
    ("no_grad inside", 0, "", "with torch.no_grad():\n    {v} = {x} * 2 + 1\n{v} = {v} + {x}"),
    (
        "running mean",
        0,
        "self.register_buffer('r{k}', torch.zeros({n}))",
        "self.r{k}.copy_({x}.detach().reshape(-1, {n}).mean(0))\n{v} = {x} - self.r{k}",
    ),
]
ON_GPU: list[Row] = [row for row in LAYERS if "after a copy" not in row[0]] + [
    row for row in LAYERS if re.match(r"nn\.(ReLU|SiLU|Hardtanh|Dropout)", row[0])
]
OUTPUTS = (
    "{a}",
    "{a}",
    "{a}",
    "({a}, {b})",
    "{{'a': {a}, 'b': {b}}}",
    "({a}, {a})",
    "({a}, x)",
    "Result({a}, {b})",
    "[{a}, {a}.transpose(0, -1)]",
    "({a}, None, 3)",
    "({a}, {a}.reshape(-1))",
)
INPUTS = ((2,), (4, 6), (4,), (3, 6, 6), (8,), (1,), (5, 1), (2, 4, 5), (1, 4, 4), (4, 1, 1))
LAYOUTS = ("plain", "plain", "transposed", "expanded", "sliced", "channels_last")
DTYPES = ("float32",) * 8 + ("float64", "bfloat16", "float16")
STEPS = (
    "call",
    "call",
    "call",
    "no_grad",
    "no_grad",
    "no_grad",
    "inference",
    "train",
    "eval",
    "autocast",
    "deepcopy",
    "pickle",
    "state_dict",
    "update",
    "replace",
    "functional_call",
    "vmap",
    "func_grad",
    "threads",
    "hook",
    "double",
    "half",
    "bfloat16",
    "repeat",
    "hook child",
    "flag",
    "bias None",
)
SLOW_STEPS = ("export", "compile")
HEADER = """import dataclasses, functools, random
import torch
from torch import nn
from torch.nn import functional as F

@dataclasses.dataclass
class Result:
    a: torch.Tensor
    b: torch.Tensor

class Scaled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, y):
        return x * y.sigmoid()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * y.sigmoid() * 2, gradient * x

"""


@dataclass
class Case:
    """A model and what is done with it."""

    seed: int
    inputs: list[int]
    """Of one element of the batch."""
    dtype: str
    lines: list[tuple[str, str, str, str]]
    """(feature, in __init__, in forward, the value that stands for it if the line is dropped)."""
    output: str
    steps: list[tuple[str, int, str]] = field(default_factory=list)
    """(what, batch, layout)."""
    argument: bool = False
    device: str = "cpu"

    def source(self) -> str:
        init = "\n".join(f"        {text}" for _, text, _, _ in self.lines if text)
        forward = "\n".join("        " + line for _, _, text, _ in self.lines for line in text.split("\n"))
        extra = ", y=None" if self.argument else ""
        use = "        if y is not None:\n            x = x + y\n" if self.argument else ""
        return (
            f"{HEADER}class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n{init}\n\n"
            f"    def forward(self, x{extra}):\n{use}{forward}\n        return {self.output}\n"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def is_stateful(self) -> bool:
        """Whether two calls at a time disturb each other in eager, too."""
        text = "\n".join(init + "\n" + forward for _, init, forward, _ in self.lines)
        words = r"rand|bernoulli|Dropout|RReLU|BatchNorm|self\.[ntr]\d|[a-z]_\(|inplace|\] ="
        return re.search(words, text) is not None

    def features(self) -> list[str]:
        return [
            *(line[0] for line in self.lines),
            *(f"step {what}" for what, _, _ in self.steps),
            *(f"layout {layout}" for *_, layout in self.steps),
            f"dtype {self.dtype}",
            f"output {self.output[:1]}",
        ]


def draw(
    seed: int, slow: float = 0.01, device: str = "cpu", programs: bool = False, repeats: bool = False
) -> Case:  # fmt: skip
    """The model of this seed; on a GPU, where kernels take seconds to compile, of few operations in short regions.

    Args:
        slow: which part of the steps exports or compiles.
        programs: draw what programs merge, and calls that are repeated.
        repeats: draw many calls of few kinds, as CUDA graphs need them.
    """
    dice = random.Random(seed)
    torch.manual_seed(seed)
    sizes = list(dice.choice(INPUTS))
    dtype = dice.choice(DTYPES)
    case = Case(seed, sizes, dtype, [], "x", argument=dice.random() < 0.1, device=device)
    module = nn.Module()
    scope: dict[str, Any] = {}
    exec(HEADER, scope)
    scope |= {"self": module, "F": F, "x": torch.randn(3, *sizes)}
    names = ["x"]
    for k in range(dice.randint(2, 8)):
        _add(case, dice, scope, names, k, programs)
    a, b = names[-1], dice.choice(names)
    case.output = dice.choice(OUTPUTS).format(a=a, b=b)
    if repeats:
        for _ in range(dice.randint(12, 20)):
            what = "call" if dice.random() < 0.8 else dice.choice(STEPS)
            case.steps.append((what, dice.choice((3, 3, 3, 3, 5)), dice.choice(("plain", "plain", "plain", "sliced"))))
        return case
    for _ in range(dice.randint(4, 9)):
        what = dice.choice(SLOW_STEPS) if dice.random() < slow else dice.choice(STEPS)
        if programs and dice.random() < 0.4:
            what = "repeat"
        batch = dice.choice((3, 3, 3, 5, 2, 1, 0))
        case.steps.append((what, batch, dice.choice(LAYOUTS)))
    return case


def _add(case: Case, dice: random.Random, scope: dict[str, Any], names: list[str], k: int, programs: bool) -> None:
    """One more line, if one is found that eager takes."""
    tables = (LAYERS, POINTWISE, VIEWS, STATEFUL, STATEMENTS)
    weights = (10, 12, 4, 1.2, 1.2)
    if case.device != "cpu":
        tables, weights = (ON_GPU, POINTWISE[:: len(POINTWISE) // 7], VIEWS, STATEFUL, STATEMENTS), (10, 7, 8, 1, 1)
    weights = (*weights, 0.7, 0, 0) if not programs else (5, 6, 4, 0.3, 0.7, 2, 10, 2)
    tables = (*tables, NUMBERS, MOVES, WRITES)
    for _ in range(8):
        (table,) = dice.choices(tables, weights)
        feature, rank, init, text = dice.choice(table)
        x = names[-1] if dice.random() < 0.8 else dice.choice(names)
        shape = scope[x].shape
        if (rank and rank != len(shape)) or len(shape) < 2:
            continue
        y = dice.choice([name for name in names if scope[name].shape == shape])
        v = f"v{k}"
        words = {"x": x, "y": y, "v": v, "k": k, "n": shape[-1], "c": shape[1], "m": dice.choice((4, 6, shape[-1]))}
        if table not in (STATEMENTS, WRITES):
            text = f"{v} = {text}"
        made, done = (part.format(**words, d="") for part in (init, text))
        before = {name: scope[name].clone() for name in names}
        try:
            exec(made, scope)
            exec(done, scope)
        except Exception:
            scope.update(before)
            continue
        scope[v] = scope[v].detach()  # shapes are all that is wanted
        where = "" if case.device == "cpu" else f", device={case.device!r}"
        init, text = (part.format(**words, d=where) for part in (init, text))
        case.lines.append((feature, init, text, x if scope[v].shape == shape else ""))
        names.append(v)
        return
