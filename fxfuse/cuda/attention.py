"""Attention kernels. `candidates` turns a problem into instantiations of templates. Nothing here needs a GPU.

Few queries and many keys, such as one token and a cache (kernels/attention.cuh): torch's kernels use one or a few
thread blocks for each head, which read its keys and values one tile after the other. With few heads most of the GPU is
idle. Here as many thread blocks share a head's keys as the GPU can hold.

Many queries (kernels/attention_tiles.cuh): torch's quick kernels take no tensor that is added to the scores, and its
other kernel reads such a tensor slowly.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from fxfuse.cuda.codegen import CPP_TYPES
from fxfuse.cuda.gemm import shared_sums_bytes
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import MMA

DOTS_HEADER, MMA_HEADER, TILES_HEADER = "attention_dots.cuh", "attention_mma.cuh", "attention_tiles.cuh"
ACCESS: Final = 16
"""Bytes of a vector access."""
MOST_ROWS: Final = 8
"""Most queries that share keys: the columns of one tensor core instruction."""
MOST_CHANNELS: Final = {2: 256, 4: 128}
"""Most channels for which a warp has registers, by the bytes of an element."""
WARP: Final = 32
MOST_SUMS: Final = 44 << 10
"""Most bytes of shared memory for the results of a block's warps; a block has 48 KB without asking for more."""
MOST_SPLITS: Final = 64
"""Most blocks that share a head's keys (kMost)."""
FEW_BLOCKS: Final = 8
"""One block for each head is a candidate if there are at least multiprocessors / FEW_BLOCKS heads."""
FREELY: Final = 0.9
"""Largest fraction of the multiprocessors that clusters may take: see `candidates`."""
MAX_GRID_X, MAX_GRID_YZ = 2**31 - 1, 65535
MOST_KEYS: Final = 2**30
"""Most keys: the kernel counts them in int, up to some tiles beyond the end."""
MOST_SHARED: Final = 80 << 10
"""Most bytes of shared memory for tiles of keys and values: two blocks have room beside each other."""
TILES_OF_KEYS: Final = {2: (64, 32, 16), 4: (32, 16)}
"""Keys of a tile of keys and values, by the bytes of an element."""
MOST_CHANNELS_OF_TILES: Final = 128
MOST_BYTES: Final = 384
"""Most bytes of a query for which a thread has registers beside those for more than the smallest tile of keys."""
FLASH: Final = 512
"""Most keys without a mask in 16 bits: with more, torch's flash attention is quicker by more than a call takes longer
than a launch."""
GUESSED_KEYS, GUESSED_CHANNELS = 256, 64
"""Where nothing is measured, kernels for many queries come before torch's up to so many keys in 16 bits, and up to so
many channels in float32."""
MMA_ROWS: Final = 16
"""Queries of a tensor core instruction."""
MOST_WARPS: Final = 4
"""Of a block with tiles of queries."""

Strides: TypeAlias = tuple[int, int, int]
"""Strides of batch, head and row, in elements."""


@dataclass(frozen=True)
class Problem:
    """out[b, h, l] = softmax(q[b, h, l] . k[b, h // group] * scale + mask[b % p, h, l]) . v[b, h // group] for query l.

    p is `mask_period`. Channels are contiguous in q, k, v and out.
    """

    batch: int
    key_heads: int
    group: int
    """Heads of q for each head of keys and values."""
    queries: int
    keys: int
    width: int
    """Channels of keys, and of values."""
    element: torch.dtype
    mask: torch.dtype | None
    q: Strides
    k: Strides
    v: Strides
    out: Strides
    mask_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Strides of batch, head, query and key; 0 where the mask broadcasts."""
    mask_period: int = 0
    """Batches after which the mask repeats, as those of an image's windows do; 0 if it does not."""
    is_causal: bool = False
    """Whether query l sees the keys up to l alone. There is no mask then."""
    logs: int = 0
    """How many numbers a head has where the logarithms of the sums that its softmax divides by are stored, one for each
    query. They are stored if this is not 0; then each head of queries has its own keys."""
    scale: float = 1.0
    alignment: int = ACCESS
    """Largest power of two, up to 16, that divides the addresses of q, k and v in bytes."""
    mask_alignment: int = 1
    """The same for the mask's address."""
    multiprocessors: int = 108
    largest_cluster: int = 1
    """Blocks of the largest cluster that the GPU supports."""

    @property
    def shares_mask(self) -> bool:
        """Whether queries that share keys also share the mask."""
        _, head, query, _ = self.mask_strides
        return (self.group == 1 or head == 0) and (self.queries == 1 or query == 0)

    @property
    def reads_pairs(self) -> bool:
        """Whether what the mask adds for keys 2 * i and the next lies in one aligned piece."""
        *others, of_key = self.mask_strides
        if self.mask is None or of_key != 1 or any(stride % 2 for stride in others):
            return False
        return self.mask_alignment % (2 * self.mask.itemsize) == 0


def largest_cluster(capability: tuple[int, int]) -> int:
    """Blocks of the largest cluster on a GPU of this compute capability. GPUs of data centres support larger ones."""
    return 1 if capability < (9, 0) else 16 if capability[0] in (9, 10) else 8


def candidates(problem: Problem) -> list[Kernel]:
    """The kernels that can run `problem`, best first.

    Their tensors are q, k, v, the mask if there is one, the output, the logarithms if they are asked for, and a
    workspace if blocks share keys through one.
    """
    rows, size = problem.group * problem.queries, problem.element.itemsize
    moves = math.gcd(*(stride * size for strides in (problem.q, problem.k, problem.v) for stride in strides))
    if problem.width > MOST_CHANNELS[size] or problem.width * size % ACCESS:
        return []
    if math.gcd(moves, problem.alignment, ACCESS) < ACCESS or any(stride % 2 for stride in problem.out):
        return []
    sizes = (problem.batch, problem.key_heads, problem.keys, problem.queries)
    if min(sizes) < 1 or max(sizes[:2]) > MAX_GRID_YZ or problem.keys > MOST_KEYS:
        return []
    if rows > MOST_ROWS or problem.is_causal or problem.logs:
        return _of_many_queries(problem)
    rows = next(count for count in (1, 2, 4, 8) if rows <= count)
    warp = _warp(problem, rows)
    heads, tiles = problem.batch * problem.key_heads, -(-problem.keys // warp.keys)
    room = MOST_SUMS // (rows * problem.width * 4) - 1  # in warps; -1 leaves a place for the combined result
    whole, half = min(warp.resident, room), min(warp.resident // 2, room)  # warps that (half) fill a multiprocessor
    places = problem.multiprocessors
    of_whole, of_half = min(-(-tiles // whole), places // heads), min(-(-tiles // half), 2 * places // heads)
    # A cluster lies within one part of the GPU, and parts differ in size. If clusters nearly fill the GPU, some wait.
    most = min(of_half, problem.largest_cluster, places * FREELY / heads)
    of_cluster = [size for size in (16, 8, 4, 2) if size <= most]
    choices = [(whole, size, "kCluster") for size in of_cluster[:1]]
    if of_whole > 1:
        choices.append((whole, min(of_whole, MOST_SPLITS), "kWorkspace"))
    if FEW_BLOCKS * heads >= places or not choices:
        choices.append((whole if heads <= places else half, 1, "kNone"))
    if of_half > 1:
        choices.append((half, min(of_half, MOST_SPLITS), "kWorkspace"))
    return [_kernel(problem, warp, rows, *choice) for choice in choices]


def is_quicker(problem: Problem) -> bool:
    """Whether our kernels are quicker than torch's: a guess, used where nothing is measured."""
    if problem.group * problem.queries <= MOST_ROWS and not problem.is_causal:
        return True
    is_float = problem.element == torch.float32
    return problem.width <= GUESSED_CHANNELS if is_float else problem.keys <= GUESSED_KEYS


def _of_many_queries(problem: Problem) -> list[Kernel]:
    width, size = problem.width, problem.element.itemsize
    if problem.is_causal and not fits_by_tiles(problem.batch * problem.key_heads, problem.group * problem.queries):
        return []
    # two tiles of keys and of values, with padded rows
    room = MOST_SHARED // (4 * (width * size + ACCESS)) if width * size <= MOST_BYTES else TILES_OF_KEYS[size][-1]
    tiles = [keys for keys in TILES_OF_KEYS[size] if keys <= room]
    if width % 8 or width > MOST_CHANNELS_OF_TILES:
        return []
    if problem.mask is None and size == 2 and problem.keys > FLASH:
        return []
    enough = [keys for keys in tiles if keys >= problem.keys]
    keys = enough[-1] if enough else tiles[0]
    rows = max(problem.group * problem.queries, problem.logs)
    warps = min(MOST_WARPS, -(-rows // MMA_ROWS))
    pairs = str(problem.reads_pairs).lower()
    sizes, logs, blocks = f"{width}, {keys}, {warps}", str(problem.logs > 0).lower(), _blocks(problem, MMA_ROWS * warps)
    element = str(problem.element).removeprefix("torch.")
    return [
        Kernel(
            name=f"attention {element} {width}, {'causal, ' * problem.is_causal}tiles of {MMA_ROWS * warps}x{keys}",
            header=TILES_HEADER,
            type=f"TiledAttention<{mma_of(problem)}, {mask_of(problem)}, {sizes}, {pairs}, {logs}, {blocks}, "
            "{output}, {epilogue}>",
            params=_params(problem, 1),
        )
    ]


def mma_of(problem: Problem) -> str:
    """The C++ type of the products of attention_products.cuh."""
    return "Tf32x3" if problem.element == torch.float32 else _MMA[problem.element]


def mask_of(problem: Problem) -> str:
    """The C++ type of the mask there."""
    return "CausalMask" if problem.is_causal else "NoMask" if problem.mask is None else CPP_TYPES[problem.mask]


def fits_by_tiles(heads: int, rows: int) -> bool:
    """Whether a grid can have all heads along x, and tiles of at least MMA_ROWS rows along y (AttentionBlock)."""
    return heads <= MAX_GRID_X and rows <= MAX_GRID_YZ * MMA_ROWS


def _blocks(problem: Problem, rows: int) -> int:
    """How many blocks, of `rows` queries each, share a multiprocessor's registers.

    With 64 channels in 16 bits that may be three or four. Then as few places as possible are left empty while the last
    blocks run.
    """
    if problem.width <= 32:
        return 4
    if problem.width > 64:
        return 2
    if problem.element == torch.float32:
        return 3
    blocks = problem.batch * problem.key_heads * -(-problem.group * problem.queries // rows)
    return min((3, 4), key=lambda count: count * -(-blocks // (count * problem.multiprocessors)))


@dataclass(frozen=True)
class _Warp:
    """The template for one warp's part of the work, and its sizes."""

    type: str
    """Its C++ type."""
    header: str
    keys: int
    """Keys of a tile."""
    resident: int
    """Number of warps for which a multiprocessor has registers (kResident)."""


def _warp(problem: Problem, rows: int) -> _Warp:
    mask, width = "NoMask" if problem.mask is None else CPP_TYPES[problem.mask], problem.width
    if problem.element != torch.float32:
        type_ = f"MmaAttention<{_MMA[problem.element]}, {mask}, {width}, {rows}>"
        return _Warp(type_, MMA_HEADER, 16 if width <= 128 else 8, 16 if width <= 64 else 12 if width <= 128 else 8)
    keys = 8 if rows <= 2 else 4 if rows <= 4 or problem.shares_mask else 2
    mask_rows = 1 if problem.shares_mask else rows
    lanes = 2 ** math.ceil(math.log2(width * problem.element.itemsize / ACCESS))
    type_ = f"DotAttention<{CPP_TYPES[problem.element]}, {mask}, {width}, {rows}, {mask_rows}, {keys}>"
    return _Warp(type_, DOTS_HEADER, keys * (WARP // lanes), 16 if rows <= 2 else 12 if rows <= 4 else 8)


_MMA: Final = {torch.float16: MMA["fp16"], torch.bfloat16: MMA["bf16"]}


def _kernel(problem: Problem, warp: _Warp, rows: int, warps: int, splits: int, meeting: str) -> Kernel:
    kinds = {"kNone": "", "kCluster": f", cluster of {splits}", "kWorkspace": f", split {splits}"}
    element = str(problem.element).removeprefix("torch.")
    return Kernel(
        name=f"attention {element} {problem.width}, {rows} row{'s' * (rows > 1)}, {warps} warps{kinds[meeting]}",
        header=warp.header,
        type=f"Attention<{warp.type}, {{output}}, {{epilogue}}, {warps}, Meeting::{meeting}>",
        params=_params(problem, splits),
        workspace=_workspace_bytes(problem, rows, splits) if meeting == "kWorkspace" else 0,
    )


def _workspace_bytes(problem: Problem, rows: int, splits: int) -> int:
    """Bytes of workspace: each block's sums, and the greatest score and the sum of weights of each of its rows."""
    return shared_sums_bytes(problem.batch * problem.key_heads, rows * (problem.width + 2), splits)


def _params(problem: Problem, splits: int) -> bytes:
    """The struct AttentionProblem of attention.cuh, packed."""
    return struct.pack(
        "<24qd",
        problem.batch,
        problem.key_heads,
        problem.group,
        problem.queries,
        problem.keys,
        splits,
        *problem.q,
        *problem.k,
        *problem.v,
        *problem.out,
        *problem.mask_strides,
        problem.mask_period or problem.batch,
        problem.logs,
        problem.scale,
    )
