"""`saltern store`: checks what can be checked from files and free memory, then loads the model and serves.

Everything up to `_load` runs without torch, so that a wrong option costs one line within seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cachestore.checkpoint import ELEMENT_BYTES, Checkpoint
from cachestore.engine import Engine
from cachestore.fingerprint import model_fingerprint, model_tokenizer_fingerprint
from cachestore.geometry import BLOCK_TOKENS, BlockLayout
from cachestore.memory import available_memory_bytes
from cachestore.model_source import resolve
from cachestore.own_kernels import require_own_kernels
from cachestore.protocol import LAYOUT_VERSION, DType, Geometry, KVDType, Limits, Welcome
from cachestore.server import StoreServer, check_socket
from cachestore.start_error import StartError
from policies.reuse import ORDERS

if TYPE_CHECKING:
    from cachestore.model import ModelRunner

log = logging.getLogger("saltern.store")

Device = Literal["cpu", "cuda"]

GIB = 1 << 30
DEFAULT_CPU_CACHE_BYTES = 1 << 30
CUDA_CACHE_SHARE = 0.8
# What the process needs beside weights and cache: the libraries, and the activations of one step.
OVERHEAD_BYTES = 600 << 20


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What the operator asked for. None means the default, which depends on the device and the model.

    Attributes:
        life_descriptor: a pipe that the parent holds open; at its end the store ends. None for a store of its own.
    """

    model: str | None
    socket: Path
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    kv_dtype: Literal["auto", "fp32", "bf16", "fp16", "int8", "fp8"] = "auto"
    block_tokens: int = 16
    cache_memory_bytes: int | None = None
    max_context_tokens: int | None = None
    max_running: int | None = None
    step_tokens: int | None = None
    eviction: Literal["lru", "reuse"] = "lru"
    prefix_cache: bool = True
    threads: int | None = None
    life_descriptor: int | None = None


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What will be served, decided before torch is imported. `cache_bytes` is None on CUDA by default: it depends on
    what is free after the weights."""

    checkpoint: Checkpoint
    device: Device
    dtype: DType
    kv_dtype: KVDType
    layout: BlockLayout
    cache_bytes: int | None
    max_running: int
    step_tokens: int
    threads: int


def plan_store(options: StoreOptions) -> StorePlan:
    """Check the options against the model's files and the free memory.

    Raises:
        StartError: one line with the numbers and the remedy.
    """
    require_own_kernels()
    if options.block_tokens not in BLOCK_TOKENS:
        offered = ", ".join(map(str, BLOCK_TOKENS))
        raise StartError(f"--block-tokens {options.block_tokens} is not offered: choose from {offered}")
    device = _device(options.device)
    dtype: DType = ("fp32" if device == "cpu" else "bf16") if options.dtype == "auto" else options.dtype
    kv_dtype: KVDType = dtype if options.kv_dtype == "auto" else options.kv_dtype
    max_running = options.max_running or (32 if device == "cpu" else 256)
    step_tokens = options.step_tokens or (256 if device == "cpu" else 2048)
    if max_running > step_tokens:
        raise StartError(
            f"--max-running {max_running} is above --step-tokens {step_tokens}: a step has room for one token of every "
            "running request; raise --step-tokens or lower --max-running"
        )
    checkpoint = Checkpoint.open(resolve(options.model))
    layout = BlockLayout(
        layers=checkpoint.layers,
        kv_heads=checkpoint.kv_heads,
        key_dim=checkpoint.head_dim,
        value_dim=checkpoint.value_dim,
        block_tokens=options.block_tokens,
        element_bytes=ELEMENT_BYTES[kv_dtype],
    )
    cache_bytes = options.cache_memory_bytes
    if device == "cpu":
        cache_bytes = DEFAULT_CPU_CACHE_BYTES if cache_bytes is None else cache_bytes
        _check_memory(cache_bytes, checkpoint.weight_bytes(dtype), available_memory_bytes(), "free memory")
    if cache_bytes is not None:
        _max_context_tokens(options, checkpoint, _blocks(layout, cache_bytes), options.block_tokens)
    threads = options.threads or physical_cores()
    return StorePlan(checkpoint, device, dtype, kv_dtype, layout, cache_bytes, max_running, step_tokens, threads)


def _device(wanted: Literal["auto", "cpu", "cuda"]) -> Device:
    # Only the driver's own files: asking CUDA itself takes torch and seconds.
    present = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()
    if wanted == "cuda" and not present:
        raise StartError("--device cuda, and no NVIDIA driver is loaded on this machine: use --device cpu, or load it")
    return "cuda" if present and wanted != "cpu" else "cpu"


def _check_memory(cache_bytes: int, weight_bytes: int, available_bytes: int, where: str) -> None:
    needed = cache_bytes + weight_bytes + OVERHEAD_BYTES
    if needed > available_bytes:
        room = max(0, available_bytes - weight_bytes - OVERHEAD_BYTES)
        remedy = f"--cache-memory {room / GIB:.2f}GiB or less fits" if room else "use a smaller model or --dtype bf16"
        raise StartError(
            f"a cache of {cache_bytes / GIB:.2f} GiB with {weight_bytes / GIB:.2f} GiB of weights and "
            f"{OVERHEAD_BYTES / GIB:.2f} GiB to work in needs {needed / GIB:.2f} GiB, and {where} is "
            f"{available_bytes / GIB:.2f} GiB: {remedy}"
        )


def _blocks(layout: BlockLayout, cache_bytes: int) -> int:
    blocks = layout.blocks_in(cache_bytes)
    if blocks < 1:
        raise StartError(
            f"a cache of {cache_bytes} bytes holds no block of {layout.block_bytes} bytes "
            f"({layout.block_tokens} tokens): raise --cache-memory"
        )
    return blocks


def _max_context_tokens(options: StoreOptions, checkpoint: Checkpoint, blocks: int, block_tokens: int) -> int:
    pool_tokens = blocks * block_tokens
    most = min(checkpoint.max_position_tokens, pool_tokens)
    wanted = options.max_context_tokens
    if wanted is None:
        return most
    if wanted > most:
        limit = (
            f"the model was made for {checkpoint.max_position_tokens}: lower it"
            if wanted > checkpoint.max_position_tokens
            else f"the cache holds {pool_tokens} tokens: raise --cache-memory, or lower it"
        )
        raise StartError(f"--max-context {wanted} is too long, {limit}")
    return wanted


def physical_cores() -> int:
    """Cores this process may run on, hyperthreads of one core counted once."""
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return max(1, len(cores))


def require_float8(kv_dtype: KVDType, capability: tuple[int, int]) -> None:
    """Raises StartError: an fp8 cache on a CUDA device whose compute capability has no such numbers."""
    if kv_dtype == "fp8" and capability < (8, 9):
        major, minor = capability
        raise StartError(
            f"--kv-dtype fp8 needs a device of compute capability 8.9 or above, and this one has {major}.{minor}: "
            "use --kv-dtype int8, which takes as little"
        )


def run_store(options: StoreOptions, version: str) -> int:
    """Serve until SIGTERM, SIGINT or the end of the parent's pipe; answers the exit status.

    A start that is refused is one line on stderr, with the numbers and the remedy, and status 2.
    """
    try:
        _run(options, version)
    except StartError as error:
        print(f"saltern: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: StoreOptions, version: str) -> None:
    if options.life_descriptor is not None:
        threading.Thread(target=_end_with_parent, args=(options.life_descriptor,), daemon=True).start()
    plan = plan_store(options)
    check_socket(options.socket)
    fingerprint = model_fingerprint(plan.checkpoint)
    tokenizer = model_tokenizer_fingerprint(plan.checkpoint.directory)
    # Before torch is imported; what the operator has set stays. Threads that wait for their next piece of work by
    # spinning slow every other process on these cores, and themselves beside one. A decode step of the default model
    # (bf16, two cores) takes 40 ms like this, 37 with GOMP_SPINCOUNT=1000 and 32 with OMP_WAIT_POLICY=ACTIVE; beside
    # processes that keep both cores busy, its matrix products alone take 20 ms like this, 26 and 100.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    runner, limits, rope_context_tokens = _load(plan, options)
    layout = plan.layout
    geometry = Geometry(
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        key_dim=layout.key_dim,
        value_dim=layout.value_dim,
        block_tokens=layout.block_tokens,
        kv_dtype=plan.kv_dtype,
        layout_version=LAYOUT_VERSION,
        rope_context_tokens=rope_context_tokens,
        bytes_per_token=layout.bytes_per_token,
    )
    welcome = Welcome(
        store=secrets.token_hex(8),
        model_dir=str(plan.checkpoint.directory),
        model_fingerprint=fingerprint,
        tokenizer_fingerprint=tokenizer,
        geometry=geometry,
        dtype=plan.dtype,
        limits=limits,
    )
    tokens = limits.blocks * layout.block_tokens
    if options.max_context_tokens is None and tokens < plan.checkpoint.max_position_tokens:
        log.warning(
            "the cache holds %d tokens, the model's context is %d: longer requests are refused; raise --cache-memory",
            tokens,
            plan.checkpoint.max_position_tokens,
        )
    log.info(
        "saltern store %s: %s in %s on %s, cache of %d tokens in %s (%d blocks of %d, the smallest prefix that is "
        "reused), "
        "context %d, %s",
        version, plan.checkpoint.directory.name, plan.dtype, plan.device, tokens, plan.kv_dtype, limits.blocks,
        layout.block_tokens, limits.max_context_tokens, options.socket,
    )  # fmt: skip
    asyncio.run(_serve(options, welcome, runner, layout))


def _load(plan: StorePlan, options: StoreOptions) -> tuple[ModelRunner, Limits, int]:
    """The model over its cache, what it can take, and the context that its rotary factors were frozen for, or 0."""
    import torch

    from cachestore.binding import prove_binding, warm_up
    from cachestore.model import TORCH_DTYPES, KVCache, Model, ModelRunner

    torch.set_num_threads(plan.threads)
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise StartError("an NVIDIA driver is loaded, but this build of torch finds no CUDA device: use --device cpu")
    device = torch.device(plan.device)
    if plan.device == "cuda":
        require_float8(plan.kv_dtype, torch.cuda.get_device_capability(device))
    checkpoint, layout = plan.checkpoint, plan.layout
    cache_bytes = plan.cache_bytes
    frozen_for = options.max_context_tokens or checkpoint.max_position_tokens
    if cache_bytes is not None:
        frozen_for = _max_context_tokens(options, checkpoint, _blocks(layout, cache_bytes), layout.block_tokens)
    started = time.monotonic()
    model = Model(checkpoint.directory, dtype=plan.dtype, device=device, max_context_tokens=frozen_for)
    difference = prove_binding(
        model, layout, plan.dtype, plan.kv_dtype, checkpoint.vocabulary_tokens, checkpoint.directory.name
    )
    log.info(
        "model loaded and bound in %.1f s, attention by %s; over the paged cache %s",
        time.monotonic() - started, model.kernels.__name__, difference,
    )  # fmt: skip
    if cache_bytes is None:
        cache_bytes = int(CUDA_CACHE_SHARE * torch.cuda.mem_get_info(device)[0])
    elif plan.device == "cuda":
        _check_memory(cache_bytes, 0, torch.cuda.mem_get_info(device)[0], "free memory on the device")
    blocks = _blocks(layout, cache_bytes)
    limits = Limits(
        blocks=blocks,
        max_context_tokens=_max_context_tokens(options, checkpoint, blocks, layout.block_tokens),
        max_running=plan.max_running,
        step_tokens=plan.step_tokens,
        vocabulary_tokens=checkpoint.vocabulary_tokens,
    )
    cache = KVCache(layout, blocks, TORCH_DTYPES[plan.kv_dtype], device)
    runner = ModelRunner(model, cache, layout.block_tokens)
    warm_up(runner, limits.max_context_tokens)
    return runner, limits, frozen_for if checkpoint.needs_rope_context else 0


async def _serve(options: StoreOptions, welcome: Welcome, runner: ModelRunner, layout: BlockLayout) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    server = StoreServer(
        options.socket,
        welcome,
        lambda emit: Engine(
            runner,
            limits=welcome.limits,
            block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes,
            emit=emit,
            clock_ns=time.monotonic_ns,
            make_order=partial(ORDERS[options.eviction], welcome.limits.blocks),
            prefix_cache=options.prefix_cache,
        ),
    )
    await server.serve(stopped)


def _end_with_parent(descriptor: int) -> None:
    """Wait for the end of the parent's pipe, then end as on SIGTERM, or at once where that is not heard."""
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3)
    os._exit(1)
